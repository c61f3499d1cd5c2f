"""Reading of run folders: the config, the history and the results of a run."""

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

from fairflower.config.run import tested_split
from fairflower.data import ClientInfo
from fairflower.errors import RunFolderError, logger, quoted
from fairflower.numerics.group_fairness import METRICS
from fairflower.report.clusters import ClusterHistory, read_cluster_history
from fairflower.server.contents import (
    ChangedFile,
    check_same_file,
    check_same_files,
    divergence,
    read_config,
    read_diagnostics,
    read_facts,
    read_history,
)
from fairflower.server.folder import LEVELS, is_locked
from fairflower.server.history import ADAPTED, ALL, HELD_OUT, OVERALL, WINDOW, WORST_CLIENT

#: Scores of domains other than accuracy, as fractions -> (title in tables, name in sentences).
SCORES = {"balanced_accuracy": ("ACC", "class-balanced accuracy"), "auc": ("AUC", "AUC")}


@dataclass(frozen=True, kw_only=True)
class AccuracyHistory:
    """Accuracies of K domains or clients in R tested rounds."""

    #: Tested rounds, [R], in ascending order. Round 0 is before training.
    rounds: NDArray[np.int64]
    #: Fractions, [R, K], with a row for each of ``rounds``. NaN for an untested domain or client.
    accuracy: NDArray[np.float64]

    def last(self, window: int = WINDOW) -> NDArray[np.intp]:
        """Return the positions of the last ``window`` rounds; round 0 only if there is no other."""
        trained = np.flatnonzero(self.rounds > 0)
        return (trained if trained.size else np.arange(self.rounds.size))[-window:]

    def final(self, window: int = WINDOW) -> NDArray[np.float64]:
        """Return accuracies [K]: means over the tested rounds in `last`; NaN if there are none."""
        values = self.accuracy[self.last(window)]
        counts = np.isfinite(values).sum(axis=0)
        return np.where(counts > 0, np.nansum(values, axis=0) / np.maximum(counts, 1), np.nan)

    def final_rounds(self, window: int = WINDOW) -> tuple[int, ...]:
        """Return the rounds over which `final` averages."""
        return tuple(self.rounds[self.last(window)].tolist())

    def fully_tested(self, window: int = WINDOW) -> bool:
        """Return whether every domain or client was tested in all rounds that `final` averages.

        If not, `final` lacks a domain or averages over different rounds, so summaries over domains
        cannot be compared with those of other runs.
        """
        return bool(np.isfinite(self.accuracy[self.last(window)]).all())


_NO_TESTS = AccuracyHistory(rounds=np.empty(0, np.int64), accuracy=np.empty((0, 1)))


@dataclass(frozen=True, kw_only=True)
class Run(AccuracyHistory):
    """A run read from its folder: config, facts, and the global model's accuracies by domain.

    With ``evaluate.test = false``, accuracies are measured on validation examples. With
    ``evaluate.by = "clients"``, a domain's accuracy is the mean over its clients, weighted by test
    examples, or NaN if no client of the domain tested the model. Each round has at least one tested
    domain.
    """

    #: The run folder.
    path: Path
    #: Name of the method, for example ``"fedheal"`` or ``"fedheal:beta=none"``.
    label: str
    #: ``"completed"``, ``"stopped"``, ``"failed"``, ``"running"`` or ``"killed"``. A run is
    #: "killed" if ``run.json`` says "running", but no process on this machine has locked its
    #: folder.
    status: str
    #: Names of the D domains.
    domains: tuple[str, ...]
    #: All clients of the federation.
    clients: tuple[ClientInfo, ...]
    #: The complete run config, with dotted keys.
    config: Mapping[str, Any]
    #: Accuracies of the global model by client, in the order of ``clients``. There are no rounds if
    #: clients did not test the model.
    by_client: AccuracyHistory
    #: Accuracies of the clients' personal models by domain: means over the domain's clients,
    #: weighted by test examples. There are no rounds if there are no personal models.
    personal: AccuracyHistory
    #: Accuracies of the personal models by client, in the order of ``clients``.
    personal_by_client: AccuracyHistory = field(default_factory=lambda: _NO_TESTS)
    #: Accuracy of the global model on ``held_out_domain``. There are no rounds if no domain is held
    #: out.
    held_out: AccuracyHistory = field(default_factory=lambda: _NO_TESTS)
    #: The same accuracy with BatchNorm statistics from that domain's test examples
    #: (``evaluate.adabn``).
    adapted: AccuracyHistory = field(default_factory=lambda: _NO_TESTS)
    #: Name of the domain that is held out from all clients. It is not in ``domains``. Empty if
    #: there is none.
    held_out_domain: str = ""
    #: Other scores (`SCORES` and the user's metrics) by name, [R, D] like ``accuracy``. NaN if not
    #: measured.
    scores: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    #: Name of a user's metric in ``scores`` -> 1 if higher values are better, -1 if lower values
    #: are.
    user_metrics: Mapping[str, int] = field(default_factory=dict)
    #: Metrics of group fairness by name (`fairflower.numerics.group_fairness`). The columns are all
    #: people, the worst client and each domain. Undefined values are NaN. Empty if there are no
    #: groups of people.
    group_metrics: Mapping[str, AccuracyHistory] = field(default_factory=dict)
    #: The strategy's diagnostics and the clients that were left out, as a mapping for each round.
    diagnostics: tuple[Mapping[str, Any], ...] = ()
    #: The content of ``run.json``.
    info: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def clusters(self) -> ClusterHistory | None:
        """The clusters of clients that the strategy recorded; None if it recorded none."""
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
    def division(self) -> str:
        """A digest of which examples each client has, or the federation's seed if unknown."""
        return str(self.info.get("division") or self.federation)

    @property
    def split(self) -> str:
        """The examples on which the run was tested: ``"test"`` or ``"validation"``."""
        return tested_split(self.config)

    @property
    def sizes(self) -> list[int]:
        """The number of these examples by domain; empty if it is unknown."""
        return list(self.info.get(f"{self.split}_sizes") or ())

    @property
    def replicate(self) -> tuple[Any, Any]:
        """Federation and seed, which are equal for paired runs."""
        return self.federation, self.seed

    @property
    def last_round(self) -> int:
        """The last tested round."""
        return int(self.rounds[-1])

    @property
    def reach(self) -> int:
        """The last tested round or, if early stopping ended the run, the last planned round.

        Runs are compared only with runs that have the same reach.
        """
        planned = int(self.config.get("num-server-rounds", 0))
        early = self.status == "completed" and int(self.info.get("rounds") or planned) < planned
        return planned if early else self.last_round

    @property
    def progress(self) -> str:
        """The status and the rounds in words, for example ``"stopped after round 7 of 20"``."""
        done = max(self.last_round, int(self.info.get("rounds") or 0))
        planned = self.config.get("num-server-rounds", done)
        tested = "" if self.last_round == done else f", last tested in round {self.last_round}"
        return f"{self.status} after round {done} of {planned}{tested}"

    def held_out_accuracy(
        self, domain: str, window: int = WINDOW, *, adapted: bool = False
    ) -> float:
        """Return the mean accuracy on a domain (see `final`); NaN if the domain was not held out.

        If ``adapted``, the model has that domain's BatchNorm statistics; NaN if this was not
        tested.
        """
        tests = self.adapted if adapted else self.held_out
        there = domain == self.held_out_domain and tests.rounds.size
        return float(tests.final(window)[0]) if there else math.nan

    @property
    def attribute(self) -> str:
        """The sensitive attribute for group fairness; empty if there are no groups of people."""
        return str(self.config.get("data.groups", "")) if self.group_metrics else ""

    def tests_by(self, metric: str) -> AccuracyHistory:
        """Return the values of one of the ``scores``, as a history like that of accuracy."""
        return AccuracyHistory(rounds=self.rounds, accuracy=self.scores[metric])

    def final_scores(self, score: str) -> NDArray[np.float64]:
        """Return the values of a score in the `last` rounds, [rounds, D]."""
        return self.scores[score][self.last()]


def model_file(run: Run) -> Path:
    """Return the path of a run's last model; warn unless the run is completed.

    Raises ``RunFolderError`` if there is no model, or it is not the one that the run has written.
    """
    if not run.path.is_absolute():  # a folder with this name here would be of another run
        raise RunFolderError(
            f"{run.path} was read from a summary, which has no model. Read the run folder."
        )
    path = run.path / "model.safetensors"
    if not run.info["rounds"] and not path.is_file():
        raise RunFolderError(
            f"{run.path} has no model.safetensors, because the run did not complete any round."
        )
    check_same_file(path, run.info, "" if path.is_file() else "is missing")
    if run.status != "completed":
        logger.warning("%s: %s. This is not the model of a completed run.", run.path, run.progress)
    return path


def read_run(path: str | Path) -> Run:
    """Read the folder of a run that is completed, stopped or still running.

    Rounds that are not completely written yet are left out.

    Raises
    ------
    RunFolderError
        If the folder does not exist, is not a run folder or has a malformed or changed file, or if
        no round was completely trained and tested.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        if path.exists():
            raise RunFolderError(f"{path} is a file, not a run folder.")
        raise RunFolderError(f"The run folder {path} does not exist.")
    for name in ("run.json", "config.toml", "history.csv"):
        if not (path / name).is_file():
            raise RunFolderError(f"{path} is not a run folder: the file {name} is missing.")
    info = read_facts(path)
    domains, clients = tuple(info["domains"]), _clients(info)
    config = read_config(path)
    user_metrics = info.get("metrics", {})
    history, finished = _read_history(path / "history.csv", user_metrics)
    diagnostics = read_diagnostics(path / "diagnostics.jsonl")
    check_same_files(path, info, config, max(finished, default=-1))
    names = [str(c.client_id) for c in clients]
    # For a run without tests, such as a trial of `fairflower tune`, read the validation accuracy.
    split = tested_split(config)
    of_domains, of_clients = LEVELS[split]
    tested = _tested(history[of_domains, "accuracy"], domains, finished)
    rounds = tested.rounds
    held_out = str(info.get("held_out", ""))
    scores = {s: history[of_domains, s] for s in (*SCORES, *user_metrics) if history[of_domains, s]}

    status = str(info["status"])
    if status == "running" and not is_locked(path):
        if read_facts(path)["status"] != status:  # it has ended in the meantime
            return read_run(path)
        status = "killed"
    if not rounds.size or (status != "completed" and not rounds[-1]):
        reason = f" Its error: {info['error']}" if info.get("error") else ""
        if divergence(info) is not None:
            reason += " Resuming would repeat this. Start a new run with other settings."
        elif status != "completed" and config["checkpoint.every"]:
            reason += " The run can be resumed from its last checkpoint."
        raise RunFolderError(
            f"{path} has no completely trained and tested round ({status}).{reason}"
        )
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
        diagnostics=diagnostics,
        info=info,
    )


def find_readable_runs(path: Path) -> list[Run]:
    """Return the readable runs below a folder; log those whose files have been changed."""
    runs = []
    for info in path.rglob("run.json"):
        with suppress(RunFolderError):
            try:
                runs.append(read_run(info.parent))
            except ChangedFile as error:
                logger.warning("%s This run is left out.", error)
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
    """Return the history, and the rounds that are complete in it.

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
    """Return values [len(rounds), len(names)], with NaN where the history has no value."""
    values = [[history.get(r, {}).get(name, np.nan) for name in names] for r in rounds.tolist()]
    return np.array(values, dtype=np.float64).reshape(len(rounds), len(names))


def _all_tests(history: _History, names: Sequence[str]) -> AccuracyHistory:
    rounds = np.array(sorted(history), dtype=np.int64)
    return AccuracyHistory(rounds=rounds, accuracy=_matrix(history, names, rounds))


def _tested(history: _History, domains: Sequence[str], finished: Set[int]) -> AccuracyHistory:
    """Return the tested rounds. An unfinished round counts only if all domains have a value."""
    tests = _all_tests(history, domains)
    there = np.isfinite(tests.accuracy)
    kept = there.all(axis=1) | (there.any(axis=1) & np.isin(tests.rounds, list(finished)))
    return AccuracyHistory(rounds=tests.rounds[kept], accuracy=tests.accuracy[kept])
