"""Reading of run folders: a run's config, its course and its results."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.data import ClientInfo
from fairflower.errors import RunFolderError, quoted
from fairflower.numerics.group_fairness import METRICS
from fairflower.report.clusters import ClusterHistory, read_cluster_history
from fairflower.server.contents import read_config, read_diagnostics, read_facts, read_history
from fairflower.server.folder import LEVELS, is_locked
from fairflower.server.history import ADAPTED, ALL, HELD_OUT, OVERALL, WORST_CLIENT
from fairflower.server.history import WINDOW as WINDOW

#: Scores of domains other than accuracy, as fractions: titles in tables, names in sentences.
SCORES = {"balanced_accuracy": ("ACC", "class-balanced accuracy"), "auc": ("AUC", "AUC")}


@dataclass(frozen=True, kw_only=True)
class AccuracyHistory:
    """Accuracies of K domains or clients in R tested rounds."""

    #: [R], in ascending order; 0 is before training.
    rounds: NDArray[np.int64]
    #: [R, K], fractions, a row for each of ``rounds``; NaN for an untested domain or client.
    accuracy: NDArray[np.float64]

    def last(self, window: int = WINDOW) -> NDArray[np.intp]:
        """Return the positions of the last ``window`` rounds; round 0 counts only by itself."""
        trained = np.flatnonzero(self.rounds > 0)
        return (trained if trained.size else np.arange(self.rounds.size))[-window:]

    def final(self, window: int = WINDOW) -> NDArray[np.float64]:
        """Return accuracies [K]: means over the tested rounds among `last`; NaN if none tested."""
        values = self.accuracy[self.last(window)]
        counts = np.isfinite(values).sum(axis=0)
        return np.where(counts > 0, np.nansum(values, axis=0) / np.maximum(counts, 1), np.nan)

    def final_rounds(self, window: int = WINDOW) -> tuple[int, ...]:
        """Return the rounds that `final` averages."""
        return tuple(self.rounds[self.last(window)].tolist())

    def fully_tested(self, window: int = WINDOW) -> bool:
        """Return whether every domain or client was tested in each round that `final` averages.

        If not, `final` lacks a domain or averages different rounds, and summaries over domains
        cannot be compared with other runs.
        """
        return bool(np.isfinite(self.accuracy[self.last(window)]).all())


_NO_TESTS = AccuracyHistory(rounds=np.empty(0, np.int64), accuracy=np.empty((0, 1)))


@dataclass(frozen=True, kw_only=True)
class Run(AccuracyHistory):
    """A run, read from its folder: accuracies of the global model by domain, config and facts.

    With ``evaluate.test = false`` accuracies are on validation images. With ``evaluate.by =
    "clients"`` a domain's accuracy is the mean over its clients, weighted by test images; NaN if
    no client of the domain tested. In each round at least one domain was tested.
    """

    #: The folder.
    path: Path
    #: Name of the method, for example ``"fedheal"`` or ``"fedheal:beta=none"``.
    label: str
    #: ``"completed"``, ``"pruned"``, ``"stopped"``, ``"failed"``, ``"running"``, or ``"killed"``:
    #: ``run.json`` says "running", but no process of this machine has the folder locked.
    status: str
    #: Names of the D domains.
    domains: tuple[str, ...]
    #: Every client of the federation.
    clients: tuple[ClientInfo, ...]
    #: The resolved run config with dotted keys.
    config: Mapping[str, Any]
    #: Accuracies of the global model by client, in the order of ``clients``; without rounds if no
    #: client tested.
    by_client: AccuracyHistory
    #: Accuracies of the clients' personal models by domain: means over its clients, weighted by
    #: test images; without rounds if there are no personal models.
    personal: AccuracyHistory
    #: Accuracies of the personal models by client, in the order of ``clients``.
    personal_by_client: AccuracyHistory = field(default_factory=lambda: _NO_TESTS)
    #: Accuracy of the global model on ``held_out_domain``; without rounds if no domain is held out.
    held_out: AccuracyHistory = field(default_factory=lambda: _NO_TESTS)
    #: The same with BatchNorm statistics of that domain's test examples (``evaluate.adabn``).
    adapted: AccuracyHistory = field(default_factory=lambda: _NO_TESTS)
    #: Name of the domain that no client has, which is not among ``domains``; or empty.
    held_out_domain: str = ""
    #: Other scores (`SCORES` and the user's metrics) by name, [R, D] like ``accuracy``; NaN where
    #: not measured.
    scores: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    #: The user's metrics in ``scores``: 1 if higher values are better, -1 if lower values are.
    user_metrics: Mapping[str, int] = field(default_factory=dict)
    #: Metrics of group fairness by name (`fairflower.numerics.group_fairness`): columns are all
    #: people, the worst client and each domain; NaN where undefined. Empty without groups.
    group_metrics: Mapping[str, AccuracyHistory] = field(default_factory=dict)
    #: The strategy's diagnostics and the clients left out, a mapping for each round.
    diagnostics: tuple[Mapping[str, Any], ...] = ()
    #: All of ``run.json``.
    info: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def clusters(self) -> ClusterHistory | None:
        """The clusters of clients that the strategy recorded; None without clusters."""
        return read_cluster_history(self.clients, self.diagnostics)

    @property
    def seed(self) -> Any:
        """The run's seed."""
        return self.config.get("seed", 0)

    @property
    def federation(self) -> Any:
        """The federation's seed (``data.seed``)."""
        return self.config.get("data.seed", 0)

    @property
    def replicate(self) -> tuple[Any, Any]:
        """Federation and seed: equal for runs that are paired."""
        return self.federation, self.seed

    @property
    def last_round(self) -> int:
        """The last tested round."""
        return int(self.rounds[-1])

    @property
    def reach(self) -> int:
        """The last tested round; if the run's settings ended it early, the last planned round.

        Runs are compared only with runs of the same reach.
        """
        planned = int(self.config.get("num-server-rounds", 0))
        early = self.status == "completed" and int(self.info.get("rounds") or planned) < planned
        return planned if early else self.last_round

    @property
    def progress(self) -> str:
        """Status and rounds in words, for example ``"stopped after round 7 of 20"``."""
        done = max(self.last_round, int(self.info.get("rounds") or 0))
        planned = self.config.get("num-server-rounds", done)
        tested = "" if self.last_round == done else f", last tested in round {self.last_round}"
        return f"{self.status} after round {done} of {planned}{tested}"

    def held_out_accuracy(
        self, domain: str, window: int = WINDOW, *, adapted: bool = False
    ) -> float:
        """Return the mean accuracy on a held-out domain (see `final`); NaN if not held out.

        ``adapted``: of the model with that domain's BatchNorm statistics; NaN without such tests.
        """
        tests = self.adapted if adapted else self.held_out
        there = domain == self.held_out_domain and tests.rounds.size
        return float(tests.final(window)[0]) if there else math.nan

    @property
    def attribute(self) -> str:
        """The sensitive attribute of the metrics of group fairness; empty without groups."""
        return str(self.config.get("data.groups", "")) if self.group_metrics else ""

    def tests_by(self, metric: str) -> AccuracyHistory:
        """Return the values of a score of ``scores``, as a history like that of accuracy."""
        return AccuracyHistory(rounds=self.rounds, accuracy=self.scores[metric])

    def final_scores(self, score: str) -> NDArray[np.float64]:
        """Return a score in each of the `last` rounds, [rounds, D]."""
        return self.scores[score][self.last()]


def read_run(path: str | Path) -> Run:
    """Read the folder of a run that is completed, stopped or still running.

    Rounds that are not written in full yet are left out.

    Raises
    ------
    RunFolderError
        If the folder does not exist or is not a run folder, has a malformed file, or no round was
        trained and tested in full.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        raise RunFolderError(f"There is no run folder {path}.")
    for name in ("run.json", "config.toml", "history.csv"):
        if not (path / name).is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no {name}.")
    info = read_facts(path)
    domains, clients = tuple(info["domains"]), _clients(info)
    config = read_config(path)
    user_metrics = info.get("metrics", {})
    history, finished = _read_history(path / "history.csv", user_metrics)
    names = [str(c.client_id) for c in clients]
    # A run that never was tested, as a trial of `fairflower tune`, is read by its validation.
    split = "test" if config["evaluate.test"] else "validation"
    of_domains, of_clients = LEVELS[split]
    tested = _tested(history[of_domains, "accuracy"], domains, finished)
    rounds = tested.rounds
    held_out = str(info.get("held_out", ""))
    scores = {s: history[of_domains, s] for s in (*SCORES, *user_metrics) if history[of_domains, s]}

    status = str(info["status"])
    if status == "running" and not is_locked(path):
        if read_facts(path)["status"] != status:  # it has ended meanwhile
            return read_run(path)
        status = "killed"
    if not rounds.size or (status != "completed" and not rounds[-1]):
        reason = f" Its error: {info['error']}" if info.get("error") else ""
        raise RunFolderError(f"{path} has no round that was trained and tested ({status}).{reason}")
    return Run(
        path=path,
        label=str(info["label"]),
        status=status,
        domains=domains,
        clients=clients,
        config=config,
        rounds=rounds,
        accuracy=tested.accuracy,
        by_client=_all_tests(history[of_clients, "accuracy"], names),
        personal=_tested(history[of_domains, "personal_accuracy"], domains, finished),
        personal_by_client=_all_tests(history[of_clients, "personal_accuracy"], names),
        held_out=_tested(history[HELD_OUT, "accuracy"], [held_out], finished),
        adapted=_tested(history[HELD_OUT, ADAPTED], [held_out], finished),
        held_out_domain=held_out,
        scores={score: _matrix(found, domains, rounds) for score, found in scores.items()},
        user_metrics={name: better for name, better in user_metrics.items() if name in scores},
        group_metrics=_group_metrics(history, split, domains, rounds) if "groups" in info else {},
        diagnostics=read_diagnostics(path / "diagnostics.jsonl"),
        info=info,
    )


def find_readable_runs(path: Path) -> list[Run]:
    """Return the readable runs below a folder; empty if the folder does not exist."""
    runs = []
    for info in path.rglob("run.json"):
        with suppress(RunFolderError):
            runs.append(read_run(info.parent))
    return runs


# --- files -------------------------------------------------------------------------------

_History = dict[int, dict[str, float]]


def _clients(info: Mapping[str, Any]) -> tuple[ClientInfo, ...]:
    return tuple(
        ClientInfo(**{**client, "class_counts": tuple(client["class_counts"])})
        for client in ({name: client[name] for name in _FIELDS} for client in info["clients"])
    )


_FIELDS = tuple(field.name for field in fields(ClientInfo))


def _group_metrics(
    history: Mapping[tuple[str, str], _History],
    split: str,
    domains: Sequence[str],
    rounds: NDArray[np.int64],
) -> dict[str, AccuracyHistory]:
    over = {m.name: history[OVERALL[split], m.name] for m in METRICS}
    return {
        name: AccuracyHistory(
            rounds=rounds,
            accuracy=np.hstack(
                [
                    _matrix(found, (ALL, WORST_CLIENT), rounds),
                    _matrix(history[LEVELS[split][0], name], domains, rounds),
                ]
            ),
        )
        for name, found in over.items()
    }


def _read_history(
    path: Path, user_metrics: Collection[str]
) -> tuple[dict[tuple[str, str], _History], set[int]]:
    """Return the history, and the rounds that were written completely.

    The history maps (level, metric) to round -> name -> value.
    """
    history: dict[tuple[str, str], _History] = {
        (HELD_OUT, metric): {} for metric in ("accuracy", ADAPTED)
    }
    metrics = ("accuracy", "personal_accuracy", *SCORES, *user_metrics)
    history |= {(level, m.name): {} for level in OVERALL.values() for m in METRICS}
    for of_domains, of_clients in LEVELS.values():
        history |= {(of_domains, m.name): {} for m in METRICS}
        history |= {(of_clients, metric): {} for metric in ("accuracy", "personal_accuracy")}
        history |= {(of_domains, metric): {} for metric in metrics}
    finished: set[int] = set()
    for line, (number, level, name, metric, value) in enumerate(read_history(path), start=2):
        if level == "run":
            finished.add(number)
        if (level, metric) not in history:
            continue
        unmeasured = np.isnan(value) and (metric != "accuracy" or "client" in level)
        if not (unmeasured or 0 <= value <= 1 or (metric in user_metrics and np.isfinite(value))):
            raise RunFolderError(
                f"{path}, line {line}: {metric} {value} of {level} {quoted(name)[1:-1]}; expected "
                "a fraction between 0 and 1."
            )
        history[level, metric].setdefault(number, {})[name] = value
    return history, finished


def _matrix(
    history: _History, names: Sequence[str], rounds: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return values [len(rounds), len(names)]; NaN where the history has no value."""
    values = [[history.get(r, {}).get(name, np.nan) for name in names] for r in rounds.tolist()]
    return np.array(values, dtype=np.float64).reshape(len(rounds), len(names))


def _all_tests(history: _History, names: Sequence[str]) -> AccuracyHistory:
    rounds = np.array(sorted(history), dtype=np.int64)
    return AccuracyHistory(rounds=rounds, accuracy=_matrix(history, names, rounds))


def _tested(history: _History, domains: Sequence[str], finished: Set[int]) -> AccuracyHistory:
    """Return the tested rounds; an unfinished round counts only if all domains have a value."""
    tests = _all_tests(history, domains)
    there = np.isfinite(tests.accuracy)
    kept = there.all(axis=1) | (there.any(axis=1) & np.isin(tests.rounds, list(finished)))
    return AccuracyHistory(rounds=tests.rounds[kept], accuracy=tests.accuracy[kept])
