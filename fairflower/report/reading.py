"""Reading of run folders: the config, the history and the results of a run."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fairflower.arguments import Range
from fairflower.config.run import tested_split
from fairflower.config.text import grouped, join_words
from fairflower.data import ClientInfo
from fairflower.errors import RunFolderError, logger, quoted
from fairflower.files import metadata
from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import METRICS
from fairflower.numerics.metrics import adjusted_rand, clustering_accuracy
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.server.contents import (
    BEST,
    MODEL,
    ChangedFile,
    Value,
    check_same_file,
    check_same_files,
    divergence,
    read_config,
    read_diagnostics,
    read_facts,
    read_history,
    scores_of,
)
from fairflower.server.folder import is_locked
from fairflower.server.history import (
    ADAPTED,
    ALL,
    HELD_OUT,
    LEVELS,
    OVERALL,
    OWN_LEVELS,
    SHARED_LEVELS,
    WINDOW,
    WORST_CLIENT,
    History,
)

#: Prefix of the primary score of the clients' personal models.
PERSONAL = "personal_"


def user_score(name: str, better: int) -> Score:
    """Return a user's metric, which may have any value; ``better`` is 1 or -1."""
    return Score(name, better, low=-math.inf, high=math.inf)


@dataclass(frozen=True, kw_only=True)
class ScoreHistory:
    """Values of a score of K domains or clients in R tested rounds."""

    #: Tested rounds, [R], in ascending order. Round 0 is before training.
    rounds: NDArray[np.int64]
    #: In base units (fractions), [R, K], with a row for each of ``rounds``. NaN for an untested
    #: domain or client.
    values: Vector
    #: The only round that `last` returns; None: the last rounds.
    chosen: int | None = None

    def last(self, window: int = WINDOW) -> NDArray[np.intp]:
        """Return the positions of the last ``window`` rounds; round 0 only if there is no other."""
        if self.chosen is not None:
            return np.flatnonzero(self.rounds == self.chosen)
        trained = np.flatnonzero(self.rounds > 0)
        return (trained if trained.size else np.arange(self.rounds.size))[-window:]

    def final(self, window: int = WINDOW) -> Vector:
        """Return values [K]: means over the tested rounds in `last`; NaN if there are none."""
        if window not in self._finals:  # the tables of a report ask hundreds of times
            values = self.values[self.last(window)]
            counts = np.isfinite(values).sum(axis=0)
            means = np.nansum(values, axis=0) / np.maximum(counts, 1)
            self._finals[window] = np.where(counts > 0, means, np.nan)
        return self._finals[window].copy()

    @cached_property
    def _finals(self) -> dict[int, Vector]:
        return {}

    def final_rounds(self, window: int = WINDOW) -> tuple[int, ...]:
        """Return the rounds over which `final` averages."""
        return tuple(self.rounds[self.last(window)].tolist())

    def fully_tested(self, window: int = WINDOW) -> bool:
        """Return whether every domain or client was tested in all rounds that `final` averages.

        If not, `final` lacks a domain or averages over different rounds, so summaries over domains
        cannot be compared with those of other runs.
        """
        return bool(np.isfinite(self.values[self.last(window)]).all())


def listed_rounds(rounds: NDArray[np.int64], chosen: NDArray[np.bool_]) -> str:
    """List the chosen rounds as ranges, or only count them if there are too many ranges.

    >>> listed_rounds(np.arange(7), np.array([True, False, True, True, True, False, True]))
    'rounds 0, 2 to 4 and 6'
    """
    if chosen.all():
        return "any round"
    places = np.flatnonzero(chosen)
    spans = np.split(rounds[places], np.flatnonzero(np.diff(places) > 1) + 1)
    if len(spans) > 6:
        return f"{len(places)} of {len(rounds)} rounds"
    parts = [[f"{s[0]} to {s[-1]}"] if len(s) > 2 else map(str, s) for s in spans]
    return f"round{'s' if len(places) > 1 else ''} {join_words([*chain.from_iterable(parts)])}"


# --- clusters of clients ----------------------------------------------------------------

#: Names of the diagnostics that record a client's cluster and its position on a map.
IDS, MAP = "cluster", ("map_x", "map_y")


@dataclass(frozen=True, kw_only=True)
class ClusterScore(Score):
    """A score of clusters, which compares the clients' clusters with their true types."""

    formula: Callable[[NDArray[np.str_], NDArray[np.int64]], float]


#: Scores of clusters, by key.
CLUSTER_SCORES = {
    "number": ClusterScore(
        *("number of clusters", 0, ""),
        digits=1,
        title="clusters found",
        formula=lambda types, ids: float(len(np.unique(ids))),
    ),
    "accuracy": ClusterScore("clustering accuracy", formula=clustering_accuracy),
    "rand": ClusterScore("adjusted Rand index", 1, "", digits=4, formula=adjusted_rand),
}


class ClusterHistory(NamedTuple):
    """A run's clusters of K clients in R rounds, which a strategy recorded."""

    rounds: NDArray[np.int64]  # [R]
    types: NDArray[np.str_]  # [K], the clients' domains, in the order of ``run.clients``
    ids: Vector  # [R, K], the cluster of each client; NaN in rounds without one
    #: Position of each client's representation on a map of the round, [R, K, 2], or NaN.
    map: Vector

    def metric(self, name: str) -> Vector:
        """Return a score (`CLUSTER_SCORES`) by round, [R], over the clients that took part."""
        score = CLUSTER_SCORES[name]
        rows = ((np.isfinite(ids), ids) for ids in self.ids)
        return np.array([score.formula(self.types[t], ids[t].astype(np.int64)) for t, ids in rows])


def read_cluster_history(
    clients: Sequence[ClientInfo], diagnostics: Iterable[Mapping[str, Any]]
) -> ClusterHistory | None:
    """Return the clusters of each round from a run's diagnostics; None if there are none."""
    column = {client.client_id: k for k, client in enumerate(clients)}
    rounds: list[int] = []
    rows: list[Vector] = []
    for record in diagnostics:
        present = record.get("client_ids", [])
        vectors = [as_float_array(record.get(name), (len(present),)) for name in (IDS, *MAP)]
        known = vectors[0] is not None and np.isfinite(vectors[0]).all()
        if not present or not known or not set(present) <= set(column):
            continue
        row = np.full((len(column), len(vectors)), np.nan)
        for k, vector in enumerate(vectors):
            row[[column[client] for client in present], k] = np.nan if vector is None else vector
        rounds.append(int(record["round"]))
        rows.append(row)
    if not rounds:
        return None
    values = np.array(rows)
    types = np.array([client.domain for client in clients])
    return ClusterHistory(np.array(rounds), types, values[:, :, 0], values[:, :, 1:])


#: Larger numbers, which a float32 cannot represent, would overflow in sums and axes.
_LARGEST = 1e100


def as_float_array(value: Any, shape: tuple[int, ...]) -> Vector | None:
    """Return recorded numbers, with NaN where too large; None if of another kind or shape."""
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    found = np.where(np.abs(numbers) <= _LARGEST, numbers, np.nan)
    return found if found.shape == shape else None


@dataclass(frozen=True, kw_only=True)
class Run(ScoreHistory):
    """A run read from its folder: config, facts, and the global model's primary score by domain.

    With ``evaluate.test = false``, scores are measured on validation examples. With
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
    #: The values that reports read, by level and metric.
    history: History
    #: The strategy's diagnostics and the clients that were left out, as a mapping for each round.
    diagnostics: tuple[Mapping[str, Any], ...] = ()
    #: The content of ``run.json``.
    info: Mapping[str, Any] = field(default_factory=dict)

    def tests(
        self,
        level: str,
        metric: str,
        names: Sequence[str],
        rounds: NDArray[np.int64] | None = None,
    ) -> ScoreHistory:
        """Return a metric's values [R, K] by name, with NaN where there is no value.

        By default, the rounds are those in which a name has a value.
        """
        found = self.history[level, metric]
        asked = sorted(found) if rounds is None else rounds.tolist()
        rows = [[found.get(r, {}).get(name, math.nan) for name in names] for r in asked]
        values = np.array(rows, dtype=np.float64).reshape(len(asked), len(names))
        there = np.isfinite(values).any(axis=1) | (rounds is not None)
        numbers = np.array(asked, dtype=np.int64)
        return ScoreHistory(rounds=numbers[there], values=values[there], chosen=self.chosen)

    def at_best(self) -> Self:
        """Return the run with its best round in place of the last ones, in tables and verdicts.

        Validation examples chose it (``checkpoint.best``). Raises ``RunFolderError`` if there is no
        best round, or it was not tested on `split`.
        """
        best = self.info.get("best", {}).get("round")
        if best not in self.rounds:
            raise RunFolderError(f"{self.path} has no best round. {_BEST_KEPT}")
        return replace(self, chosen=best)

    @property
    def summarized(self) -> bool:
        """Whether the run was read from a summary, which has neither a run folder nor all facts."""
        return "remarks" in self.info

    @cached_property
    def primary(self) -> Score:
        """The primary score of what was learnt; accuracy for classes."""
        return scores_of(self.info)[0]

    @property
    def further(self) -> tuple[Score, ...]:
        """The other scores of what was learnt."""
        return scores_of(self.info)[1:]

    @property
    def lacks(self) -> str:
        """The domains without the primary score in some rounds, in words; empty if there are none.

        For example, ``"svhn was not tested in rounds 2 to 4"``. Accuracy is defined wherever a
        domain was tested; other scores may be undefined there.
        """
        by_rounds = grouped(
            (listed_rounds(self.rounds, ~tested), name)
            for name, tested in zip(self.domains, np.isfinite(self.values).T, strict=True)
            if not tested.all()
        )
        classes = self.primary == ACCURACY
        verbs = ("was", "were") if classes else ("has", "have")
        what = "not tested" if classes else f"no {self.primary.title}"
        return "; ".join(
            f"{join_words(names)} {verbs[len(names) > 1]} {what} in {which}"
            for which, names in by_rounds.items()
        )

    def tests_by(self, metric: str) -> ScoreHistory:
        """Return the run itself for the primary score, or the history of another by domain."""
        if metric == PERSONAL + self.primary.name:
            return self.personal
        return self if metric == self.primary.name else self.scores[metric]

    def of_clients(self, metric: str) -> ScoreHistory:
        """Return a metric's values by client, in the order of ``clients``."""
        names = [str(client.client_id) for client in self.clients]
        return self.tests(LEVELS[self.split][1], metric, names)

    @cached_property
    def by_client(self) -> ScoreHistory:
        """Primary scores by client, in the order of ``clients``; no rounds if no client tested."""
        return self.of_clients(self.primary.name)

    @property
    def all_clients_tested(self) -> bool:
        """Whether each client tested the model in some of the last rounds."""
        return bool(np.isfinite(self.by_client.final()).all())

    @cached_property
    def personal(self) -> ScoreHistory:
        """Primary scores of the clients' personal models by domain; no rounds if there are none.

        They are means over the domain's clients, weighted by test examples.
        """
        return self.tests(LEVELS[self.split][0], PERSONAL + self.primary.name, self.domains)

    @cached_property
    def personal_by_client(self) -> ScoreHistory:
        """Primary scores of the personal models by client, in the order of ``clients``."""
        return self.of_clients(PERSONAL + self.primary.name)

    @cached_property
    def own_models(self) -> ScoreHistory:
        """Primary scores of the models that clients keep, each on its domain's test examples.

        They are in the order of ``clients``, and NaN for models that the server did not test.
        """
        names = [f"{client.client_id}/{client.domain}" for client in self.clients]
        return self.tests(OWN_LEVELS[self.split], self.primary.name, names)

    @cached_property
    def cross_tests(self) -> Vector:
        """Primary scores [K, D] of these models on every domain, last round, or NaN; or no rows."""
        levels = OWN_LEVELS[self.split], SHARED_LEVELS[self.split]
        found = [self.history[level, self.primary.name] for level in levels]
        last = (found[0] or found[1]).get(self.last_round, {})
        names = [[f"{client.client_id}/{d}" for d in self.domains] for client in self.clients]
        values = np.array([[last.get(name, math.nan) for name in row] for row in names])
        own = np.array([[d == client.domain for d in self.domains] for client in self.clients])
        return values if np.isfinite(values[~own]).any() else values[:0]

    @property
    def held_out_domain(self) -> str:
        """Name of the domain that no client has; not in ``domains``; empty if there is none."""
        return str(self.info.get("held_out", ""))

    @cached_property
    def held_out(self) -> ScoreHistory:
        """Primary score of the global model on ``held_out_domain``; no rounds if there is none."""
        return self.tests(HELD_OUT, self.primary.name, [self.held_out_domain])

    @cached_property
    def adapted(self) -> ScoreHistory:
        """The same with BatchNorm statistics of that domain's examples (``evaluate.adabn``)."""
        return self.tests(HELD_OUT, ADAPTED + self.primary.name, [self.held_out_domain])

    @cached_property
    def scores(self) -> Mapping[str, ScoreHistory]:
        """Other scores (`further`, the user's metrics) by name: a value per domain, or NaN."""
        level = LEVELS[self.split][0]
        names = (*(score.name for score in self.further), *self.info.get("metrics", {}))
        return {
            name: self.tests(level, name, self.domains, self.rounds)
            for name in names
            if self.history[level, name]
        }

    @property
    def user_scores(self) -> list[Score]:
        """The user's metrics in ``scores``."""
        return [user_score(*m) for m in self.info.get("metrics", {}).items() if m[0] in self.scores]

    @cached_property
    def group_metrics(self) -> Mapping[str, ScoreHistory]:
        """Metrics of group fairness by name; empty if there are no groups of people.

        The columns are all people, the worst client and each domain. Undefined values are NaN.
        """
        levels = (OVERALL[self.split], (ALL, WORST_CLIENT)), (LEVELS[self.split][0], self.domains)
        found = {}
        for name in (m.name for m in METRICS if "groups" in self.info):
            tests = [self.tests(level, name, of, self.rounds) for level, of in levels]
            found[name] = replace(tests[0], values=np.hstack([test.values for test in tests]))
        return found

    @cached_property
    def clusters(self) -> ClusterHistory | None:
        """The clusters of clients that the strategy recorded; None if it recorded none."""
        return read_cluster_history(self.clients, self.diagnostics)

    def final_clusters(self, name: str, window: int = WINDOW) -> float:
        """Return a metric's mean over the last ``window`` tested rounds; NaN without clusters."""
        if self.clusters is None:
            return math.nan
        final = np.isin(self.clusters.rounds, self.final_rounds(window))
        values = self.clusters.metric(name)[final]
        return float(values.mean()) if values.size else math.nan

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

    def held_out_score(self, domain: str, window: int = WINDOW, *, adapted: bool = False) -> float:
        """Return the mean score on a domain (see `final`); NaN if the domain was not held out.

        If ``adapted``, the model has that domain's BatchNorm statistics; NaN if it was not tested.
        """
        tests = self.adapted if adapted else self.held_out
        there = domain == self.held_out_domain and tests.rounds.size
        return float(tests.final(window)[0]) if there else math.nan

    @property
    def attribute(self) -> str:
        """The sensitive attribute for group fairness; empty if there are no groups of people."""
        return str(self.config.get("data.groups", "")) if self.group_metrics else ""


#: How a run keeps its best model.
_BEST_KEPT = "A run keeps it with checkpoint.best and validation examples (data.validation-...)."


def model_file(run: Run, best: bool = False) -> Path:
    """Return the path of a run's last model, or the best; warn unless the run is completed.

    Raises ``RunFolderError`` if there is no model, or it is not the one that the run has written.
    """
    if run.config.get("strategy.name") == "alone":
        raise RunFolderError(f"{run.path} has no common model: each client kept its own.")
    if run.summarized:
        raise RunFolderError(
            f"{run.path} was read from a summary, which has no model. Read the run folder."
        )
    path = run.path / (BEST if best else MODEL)
    if best and "best" not in run.info:
        raise RunFolderError(f"{run.path} has no best model. {_BEST_KEPT}")
    if tested := run.config.get("evaluate.model"):
        raise RunFolderError(f"{run.path} has no model of its own: it has tested {tested}.")
    if not run.info["rounds"] and not path.is_file():
        raise RunFolderError(
            f"{run.path} has no model.safetensors, because the run did not complete any round."
        )
    check_same_file(path, run.info, "" if path.is_file() else "is missing")
    if best and metadata(path).get("round") != str(run.info["best"]["round"]):
        raise RunFolderError(f"{path} and run.json name different rounds. Resume the run.")
    if run.status != "completed":
        logger.warning("%s: %s. This is not the model of a completed run.", run.path, run.progress)
    return path


def read_run(path: str | Path) -> Run:
    """Read the folder of a run that is completed, stopped or still running.

    Rounds that are not completely written yet are left out. Raises `RunFolderError` if the folder
    does not exist, is not a run folder or has a malformed or changed file, or if no round was
    completely trained and tested.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        if path.exists():
            raise RunFolderError(f"{path} is a file, not a run folder.")
        raise RunFolderError(f"The run folder {path} does not exist.")
    for name in ("run.json", "config.toml", "history.csv"):
        if not (path / name).is_file():
            raise RunFolderError(f"{path} is not a run folder: the file {name} is missing.")
    info, config = read_facts(path), read_config(path)
    file = path / "history.csv"
    rows, diagnostics = read_history(file), read_diagnostics(path / "diagnostics.jsonl")
    finished = {row.round for row in rows if row.level == "run"}
    check_same_files(path, info, config, max(finished, default=-1))
    run = run_of(path, info, config, enumerate(rows, start=2), diagnostics, file, finished)
    status = str(info["status"])
    if status == "running" and not is_locked(path):
        if read_facts(path)["status"] != status:  # it has ended in the meantime
            return read_run(path)
        status = "killed"
    if not run.rounds.size or (status != "completed" and not run.last_round):
        reason = f" Its error: {info['error']}" if info.get("error") else ""
        if divergence(info) is not None:
            reason += " Resuming would repeat this. Start a new run with other settings."
        elif status != "completed" and config["checkpoint.every"]:
            reason += " The run can be resumed from its last checkpoint."
        raise RunFolderError(
            f"{path} has no completely trained and tested round ({status}).{reason}"
        )
    return replace(run, status=status)


def run_of(
    path: Path,
    info: Mapping[str, Any],
    config: Mapping[str, Any],
    rows: Iterable[tuple[int, Value]],
    diagnostics: Iterable[Mapping[str, Any]],
    source: Path,
    finished: Set[int] | None = None,
) -> Run:
    """Return the run that ``rows`` of the file ``source``, with their line numbers, describe.

    Unfinished rounds count only if all domains were tested. By default all rounds are finished.
    Raises ``RunFolderError`` for an invalid value.
    """
    domains, split = tuple(info["domains"]), tested_split(config)
    history = _checked_history(rows, source, info, split)
    of_domains = LEVELS[split][0]
    names = {of_domains: domains, HELD_OUT: (str(info.get("held_out", "")),)}
    for (level, _), found in history.values.items():
        for r in set(found) - finished if finished is not None and level in names else ():
            if not all(math.isfinite(found[r].get(name, math.nan)) for name in names[level]):
                del found[r]
    run = Run(
        path=path,
        label=str(info["label"]),
        status=str(info["status"]),
        domains=domains,
        clients=tuple(
            ClientInfo(c["client_id"], c["domain"], c["num_examples"], tuple(c["class_counts"]))
            for c in info["clients"]
        ),
        config=config,
        history=history,
        diagnostics=tuple(diagnostics),
        info=info,
        rounds=np.empty(0, np.int64),
        values=np.empty((0, len(domains))),
    )
    tests = run.tests(of_domains, run.primary.name, domains)
    return replace(run, rounds=tests.rounds, values=tests.values)


def find_readable_runs(path: Path) -> list[Run]:
    """Return the readable runs below a folder; log those whose files have been changed."""
    runs = []
    for info in path.rglob("run.json"):
        try:
            runs.append(read_run(info.parent))
        except ChangedFile as error:
            logger.warning("%s This run is left out.", error)
        except RunFolderError:
            pass
    return runs


def _checked_history(
    rows: Iterable[tuple[int, Value]], source: Path, info: Mapping[str, Any], split: str
) -> History:
    """Return the history of the scores that reports read; infinite values are NaN."""
    of_domains, of_clients = LEVELS[split]
    of_labels = chain.from_iterable(map(scores_of, info.get("labels", ())))
    users = (user_score(*metric) for metric in info.get("metrics", {}).items())
    primary, *further = scores_of(info)
    personal, adapted = (
        replace(primary, name=prefix + primary.name) for prefix in (PERSONAL, ADAPTED)
    )
    wanted = {
        (level, score.name): score
        for level, scores in (
            (of_domains, (primary, personal, *further, *of_labels, *users, *METRICS)),
            (of_clients, (primary, personal)),
            (OWN_LEVELS[split], (primary,)),
            (SHARED_LEVELS[split], (primary,)),
            (HELD_OUT, (primary, adapted)),
            (OVERALL[split], METRICS),
        )
        for score in scores
    }
    history = History(info["domains"], primary)
    for line, row in rows:
        if (score := wanted.get((row.level, row.metric))) is None:
            continue
        if math.isinf(row.value) and math.isinf(score.high):  # of a model that has diverged
            row = row._replace(value=math.nan)
        bounded = score is primary and math.isfinite(score.high)
        unmeasured = math.isnan(row.value) and (not bounded or row.level == of_clients)
        within = math.isfinite(row.value) and score.low <= row.value <= score.high
        if not (unmeasured or within):
            raise RunFolderError(
                f"{source}, line {line}: {row.metric} {row.value} of {row.level} "
                f"{quoted(row.name)[1:-1]}; expected {Range(score.low, score.high)}."
            )
        history.put(row)
    return history
