"""Read a run folder back: what was asked for, what happened and what came out."""

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
from fairflower.report.clusters import ClusterHistory, read_cluster_history
from fairflower.server.contents import read_config, read_diagnostics, read_facts, read_history
from fairflower.server.folder import LEVELS, is_locked
from fairflower.server.history import HELD_OUT
from fairflower.server.history import WINDOW as WINDOW

#: What may be known of a domain beside its accuracy, as fractions: its title in tables, its name.
SCORES = {"balanced_accuracy": ("ACC", "class-balanced accuracy"), "auc": ("AUC", "AUC")}


@dataclass(frozen=True, kw_only=True)
class AccuracyHistory:
    """Accuracies of K domains or clients in R tested rounds."""

    #: [R], in ascending order; 0 is before training.
    rounds: NDArray[np.int64]
    #: [R, K], fractions, one row for each of ``rounds``; NaN where one was not tested.
    accuracy: NDArray[np.float64]

    def last(self, window: int = WINDOW) -> NDArray[np.intp]:
        """Places of the last ``window`` rounds; of round 0 only if there is no other."""
        trained = np.flatnonzero(self.rounds > 0)
        return (trained if trained.size else np.arange(self.rounds.size))[-window:]

    def final(self, window: int = WINDOW) -> NDArray[np.float64]:
        """Accuracy [K], the mean over those of the `last` rounds that have it; NaN without any."""
        values = self.accuracy[self.last(window)]
        counts = np.isfinite(values).sum(axis=0)
        return np.where(counts > 0, np.nansum(values, axis=0) / np.maximum(counts, 1), np.nan)

    def final_rounds(self, window: int = WINDOW) -> tuple[int, ...]:
        """The rounds that `final` averages."""
        return tuple(self.rounds[self.last(window)].tolist())

    def fully_tested(self, window: int = WINDOW) -> bool:
        """Whether all were tested in each of the rounds that `final` averages.

        Else `final` lacks a domain, or its means are over different rounds, and what is said
        of all domains can be compared with no other run's.
        """
        return bool(np.isfinite(self.accuracy[self.last(window)]).all())


_NO_TESTS = AccuracyHistory(rounds=np.empty(0, np.int64), accuracy=np.empty((0, 1)))


@dataclass(frozen=True, kw_only=True)
class Run(AccuracyHistory):
    """One run folder, read: the tests of its global model by domain, and all around them.

    With ``evaluate.test = false`` these are on images for validation.
    With ``evaluate.by = "clients"`` a domain's accuracy is the mean of its clients' by test
    images; it is NaN where its sites were away. Every round is of one domain at least.
    """

    #: The folder.
    path: Path
    #: Name of the method, for example ``"fedheal"`` or ``"fedheal:beta=none"``.
    label: str
    #: ``"completed"``, ``"pruned"``, ``"stopped"``, ``"failed"``, ``"running"``, or ``"killed"``:
    #: ``run.json`` says that it runs, but no process of this machine is at work on it.
    status: str
    #: Domain names, D of them.
    domains: tuple[str, ...]
    #: Every client of the federation.
    clients: tuple[ClientInfo, ...]
    #: The resolved run config with dotted keys.
    config: Mapping[str, Any]
    #: The same by client, in the order of ``clients``; no rounds when clients tested nothing.
    by_client: AccuracyHistory
    #: Of the clients' personal models, by domain, the mean of its clients by test images; no
    #: rounds where there are none.
    personal: AccuracyHistory
    #: Of the global model on the domain that no client has, ``held_out_domain``; no rounds where
    #: there is none.
    held_out: AccuracyHistory = field(default_factory=lambda: _NO_TESTS)
    #: Name of this domain, which is not among ``domains``; empty if there is none.
    held_out_domain: str = ""
    #: Those of `SCORES` and of the user's metrics that were measured, [R, D] like ``accuracy``; NaN
    #: in a round without.
    scores: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    #: The user's metrics in ``scores``: 1 if more is better, -1 if less is.
    user_metrics: Mapping[str, int] = field(default_factory=dict)
    #: What the strategy recorded, and who was left out, one mapping a round.
    diagnostics: tuple[Mapping[str, Any], ...] = ()
    #: All of ``run.json``.
    info: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def clusters(self) -> ClusterHistory | None:
        """The clusters that the strategy recorded; None without any."""
        return read_cluster_history(self.clients, self.diagnostics)

    @property
    def seed(self) -> Any:
        """The run's seed."""
        return self.config.get("seed", 0)

    @property
    def federation(self) -> Any:
        """The seed of what its clients hold: runs that share it share a federation."""
        return self.config.get("data.seed", 0)

    @property
    def replicate(self) -> tuple[Any, Any]:
        """What two runs have in common that are paired: the federation and the seed."""
        return self.federation, self.seed

    @property
    def last_round(self) -> int:
        """The last tested round."""
        return int(self.rounds[-1])

    @property
    def reach(self) -> int:
        """The last tested round; of a run that its own settings ended early, the last planned.

        Runs are compared that reach equally far.
        """
        planned = int(self.config.get("num-server-rounds", 0))
        early = self.status == "completed" and int(self.info.get("rounds") or planned) < planned
        return planned if early else self.last_round

    @property
    def progress(self) -> str:
        """For example ``"stopped after round 7 of 20"``."""
        done = max(self.last_round, int(self.info.get("rounds") or 0))
        planned = self.config.get("num-server-rounds", done)
        tested = "" if self.last_round == done else f", last tested in round {self.last_round}"
        return f"{self.status} after round {done} of {planned}{tested}"

    def held_out_accuracy(self, domain: str, window: int = WINDOW) -> float:
        """The accuracy on a held-out domain, a mean as of `final`; NaN if it was not held out."""
        there = domain == self.held_out_domain and self.held_out.rounds.size
        return float(self.held_out.final(window)[0]) if there else math.nan

    def tests_by(self, metric: str) -> AccuracyHistory:
        """The tests of the global model by one of ``scores`` instead of accuracy."""
        return AccuracyHistory(rounds=self.rounds, accuracy=self.scores[metric])

    def final_scores(self, score: str) -> NDArray[np.float64]:
        """One of ``scores`` in each of the `last` rounds, [rounds, D], not averaged."""
        return self.scores[score][self.last()]


def read_run(path: str | Path) -> Run:
    """Read a run folder, of a run that is finished, was stopped or still goes on.

    Rounds that are not written in full yet are left out.

    Raises
    ------
    RunFolderError
        When the folder does not exist, is no run folder, has a malformed file, or
        no round was trained and tested in full.
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
    own = info.get("metrics", {})
    history, finished = _read_history(path / "history.csv", own)
    names = [str(c.client_id) for c in clients]
    # A run that never was tested, as a trial of `fairflower tune`, is read by its validation.
    of_domains, of_clients = LEVELS["test" if config["evaluate.test"] else "validation"]
    tested = _tested(history[of_domains, "accuracy"], domains, finished)
    rounds = tested.rounds
    held_out = str(info.get("held_out", ""))
    scores = {s: history[of_domains, s] for s in (*SCORES, *own) if history[of_domains, s]}

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
        held_out=_tested(history[HELD_OUT, "accuracy"], [held_out], finished),
        held_out_domain=held_out,
        scores={score: _matrix(found, domains, rounds) for score, found in scores.items()},
        user_metrics={name: better for name, better in own.items() if name in scores},
        diagnostics=read_diagnostics(path / "diagnostics.jsonl"),
        info=info,
    )


def find_readable_runs(path: Path) -> list[Run]:
    """The runs below a folder that can be reported on; none where there is no folder."""
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


def _read_history(
    path: Path, own: Collection[str]
) -> tuple[dict[tuple[str, str], _History], set[int]]:
    """By level and metric, values by round and name: accuracies, `SCORES` and the user's.

    And the rounds that were written to their end, which is what is said of the whole run.
    """
    history: dict[tuple[str, str], _History] = {(HELD_OUT, "accuracy"): {}}
    metrics = ("accuracy", "personal_accuracy", *SCORES, *own)
    for of_domains, of_clients in LEVELS.values():
        history[of_clients, "accuracy"] = {}
        history |= {(of_domains, metric): {} for metric in metrics}
    finished: set[int] = set()
    for line, (number, level, name, metric, value) in enumerate(read_history(path), start=2):
        if level == "run":
            finished.add(number)
        if (level, metric) not in history:
            continue
        unmeasured = np.isnan(value) and (metric != "accuracy" or "client" in level)
        if not (unmeasured or 0 <= value <= 1 or (metric in own and np.isfinite(value))):
            raise RunFolderError(
                f"{path}, line {line}: {metric} {value} of {level} {quoted(name)[1:-1]}; expected "
                "a fraction between 0 and 1."
            )
        history[level, metric].setdefault(number, {})[name] = value
    return history, finished


def _matrix(
    history: _History, names: Sequence[str], rounds: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Values [len(rounds), len(names)], NaN where the history has none."""
    values = [[history.get(r, {}).get(name, np.nan) for name in names] for r in rounds.tolist()]
    return np.array(values, dtype=np.float64).reshape(len(rounds), len(names))


def _all_tests(history: _History, names: Sequence[str]) -> AccuracyHistory:
    rounds = np.array(sorted(history), dtype=np.int64)
    return AccuracyHistory(rounds=rounds, accuracy=_matrix(history, names, rounds))


def _tested(history: _History, domains: Sequence[str], finished: Set[int]) -> AccuracyHistory:
    """Rounds with a value of some domain; one that may still be written needs all of them."""
    tests = _all_tests(history, domains)
    there = np.isfinite(tests.accuracy)
    kept = there.all(axis=1) | (there.any(axis=1) & np.isin(tests.rounds, list(finished)))
    return AccuracyHistory(rounds=tests.rounds[kept], accuracy=tests.accuracy[kept])
