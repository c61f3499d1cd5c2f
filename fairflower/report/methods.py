"""Runs grouped into methods, and methods into comparisons.

Runs that differ only in the seed, or only in the seed and the federation drawn with it
(``data.seed`` = ``seed``), are a *method*. A method's numbers are means and standard deviations
over its runs. Methods are *comparable* if they differ only in ``strategy.*``, ``client.*``,
``bound.*`` and ``server.*``, and reached the same round. Among comparable methods there may be
grids of clients and strategies, and sweeps of an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairflower.config import ClientConfig, StrategyConfig
from fairflower.config.methods import MethodSpec
from fairflower.config.run import COMPARED_TABLES, data_key, method_key, tuned_keys
from fairflower.config.text import grouped, is_argument, key_to_argument
from fairflower.numerics import Vector
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.registry import REFERENCES
from fairflower.report.reading import Run
from fairflower.server.history import WINDOW
from fairflower.statistics import MeanStd

_Settings = frozenset[tuple[str, str]]

#: Setting that tells apart runs with other examples under equal data settings.
_EXAMPLES = "examples"

#: Setting of runs over several federations, each drawn with the seed of its run.
_FEDERATED = ("data.seed", "seed")

#: Strategies that methods are compared with -> their titles.
BASELINES = {"fedavg": "FedAvg", "uniform": "Uniform"}

#: What tables of the best rounds say of them.
BEST_ROUND = "best round on validation examples"


class Curve(NamedTuple):
    """A metric over R rounds: mean and std over runs, and whether all domains were tested."""

    rounds: NDArray[np.int64]
    mean: Vector
    spread: Vector
    whole: NDArray[np.bool_]

    @classmethod
    def of(cls, rounds: NDArray[np.int64], values: Vector) -> Curve:
        """Return the curve of values [runs, R] over all domains. A single run has a spread of 0."""
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
        return cls(rounds, values.mean(axis=0), spread, np.ones(len(rounds), np.bool_))


@dataclass(frozen=True)
class Method:
    """A method under fixed settings, with one run per seed or federation."""

    #: The label of the runs. If several methods have this label, their differing settings are
    #: added.
    name: str
    #: All settings that the runs have in common.
    identity: _Settings
    #: The runs, ordered by seed; all reached the same round.
    runs: tuple[Run, ...]
    #: Runs that are left out of the method's numbers, each with the reason.
    left_out: tuple[tuple[Run, str], ...] = ()

    @property
    def federations(self) -> bool:
        """Whether each run has its own federation: drawn with its seed, another division."""
        return _FEDERATED in self.identity and self.divisions == len(self.runs)

    @property
    def unit(self) -> str:
        """The unit in which the runs differ: ``federation``, or ``seed of federation 0``.

        A single run is one federation if that was drawn with its seed, and not found at sites.
        """
        first, *others = self.runs
        drawn = not others and first.federation == first.seed and "sites" not in first.info
        if _FEDERATED in self.identity and 1 < self.divisions < len(self.runs):
            return f"run on {self.divisions} federations"
        return (
            "federation" if self.federations or drawn else f"seed of federation {first.federation}"
        )

    @property
    def divisions(self) -> int:
        """Number of different divisions of the data."""
        return len({run.division for run in self.runs})

    @property
    def overlap(self) -> float:
        """Number of test examples per training example if they are drawn anew, for `redrawn`."""
        facts = self.runs[0].info.get("redraw") or {}
        return float(facts.get("tests per training example", 0.0)) if self.divisions > 1 else 0.0

    @property
    def config(self) -> Mapping[str, Any]:
        """The run config of the first seed."""
        return self.runs[0].config

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return str(self.config.get("strategy.name", self.runs[0].label))

    @property
    def reference(self) -> str:
        """The strategy's name if it is one of `REFERENCES`; else empty."""
        return self.strategy if self.strategy in REFERENCES else ""

    @property
    def only_tested(self) -> bool:
        """Whether models were tested without training."""
        return bool(self.config.get("evaluate.model"))

    @cached_property
    def client(self) -> str:
        """The client's name and arguments; tuned arguments are shown as ``fedprox:mu=tuned``."""
        return self._label(ClientConfig.of(self.config))

    @property
    def aggregation(self) -> str:
        """``name`` without the client and ``setting``; tuned arguments have the value "tuned"."""
        strategy, label = StrategyConfig.of(self.config), self.runs[0].label
        apart = self.name.removeprefix(label)[2:-1].split(", ")  # of (bound.clip=1, train.lr=0.1)
        bounds = ", ".join(part for part in apart if part.startswith(COMPARED_TABLES))
        rule = label.removeprefix(f"{ClientConfig.of(self.config).label}+")
        rule = rule.replace(strategy.label, self._label(strategy), 1)
        return f"{rule} ({bounds})" if bounds else rule

    def _label(self, choice: MethodSpec) -> str:
        """Return a label with the value "tuned" for arguments that were tuned."""
        tuned = {key_to_argument(key.removeprefix(f"{choice.TABLE}.")) for key in self._tuned}
        own = tuned and tuned & {*choice.defaults(), *choice.args}
        return replace(choice, args=dict(choice.args) | dict.fromkeys(own, "tuned")).label

    @cached_property
    def setting(self) -> _Settings:
        """The settings that comparable methods share; those tuned for each are "tuned"."""
        return frozenset((dict(self.shared) | dict.fromkeys(self.tuned, "tuned")).items())

    @cached_property
    def shared(self) -> _Settings:
        """The settings of ``setting``, with the values of those that were tuned."""
        return self.identity - self.settings(*COMPARED_TABLES)

    @property
    def tuned(self) -> list[str]:
        """Training settings that were tuned for this method (the setting ``tuned``)."""
        return [key for key in self._tuned if not key.startswith(COMPARED_TABLES)]

    @cached_property
    def _tuned(self) -> list[str]:
        """Training settings and arguments that were tuned for this method."""
        return tuned_keys(self.config)

    def settings(self, *tables: str) -> _Settings:
        """Return the settings in some tables of the run config, for example in ``"data."``."""
        return frozenset(item for item in self.identity if item[0].startswith(tables))

    @property
    def comparable(self) -> tuple[Any, ...]:
        """A key that is equal for all comparable methods."""
        return self.setting, self.runs[0].reach

    def comparable_with(self, other: Method, apart: Sequence[str] = ()) -> bool:
        """Return whether two methods are comparable, or equal in the values of tuned settings.

        The latter are, for example, a method that was not tuned and a baseline for which tuning
        chose the defaults. Settings in the tables ``apart`` may differ.
        """
        here, there = self.settings(*apart), other.settings(*apart)
        return self.runs[0].reach == other.runs[0].reach and (
            self.setting - here == other.setting - there
            or self.shared - here == other.shared - there
        )

    def over_seeds(self, value_of: Callable[[Run], float]) -> MeanStd:
        """Return the mean and std over runs of a metric that has one value per run."""
        return MeanStd.of([value_of(run) for run in self.runs])

    def over_domains(
        self, scores: Callable[[Run], Vector], value_of: Callable[[Vector], float]
    ) -> MeanStd:
        """Return the mean and std over runs of a metric, computed on domains that all runs tested.

        The result is NaN if no domain was tested by all runs. ``scores`` returns a run's
        values [D], with NaN for untested domains.
        """
        values = np.array([scores(run) for run in self.runs])
        return MeanStd.of(_over_common_domains(values, value_of).tolist())

    def fully_tested(self) -> bool:
        """Return whether all runs were tested on all domains in each of the last rounds."""
        return all(run.fully_tested() for run in self.runs)

    def curve(
        self, value_of: Callable[[Vector], float], domains: Sequence[int] | slice = slice(None)
    ) -> Curve:
        """Return a metric of the domains' scores over rounds, by default for all domains.

        If a run was not tested on some domain in a round, the round's value covers only the other
        domains. It is NaN if there are none.
        """
        rounds = reduce(np.intersect1d, [run.rounds for run in self.runs])
        values = [run.values[np.isin(run.rounds, rounds)][:, domains] for run in self.runs]
        tested = np.array(values)
        whole = np.all(np.isfinite(tested), axis=(0, 2))
        return Curve.of(rounds, _over_common_domains(tested, value_of))._replace(whole=whole)


@dataclass(frozen=True)
class Comparison:
    """The methods that were tested on the same domains with the same primary score."""

    domains: tuple[str, ...]
    #: The baselines, the others in the order of the runs, and the references.
    methods: tuple[Method, ...]
    #: Setting -> {method name: value}, for each setting that differs between methods.
    differing: Mapping[str, Mapping[str, str]]
    #: The primary score, whose fairness over domains is judged.
    score: Score = ACCURACY

    @property
    def heading(self) -> str:
        """The name of the primary score, as a sentence begins with it."""
        return self.score.title[:1].upper() + self.score.title[1:]

    @property
    def classes(self) -> bool:
        """Whether classes are learnt, whose primary score is the accuracy."""
        return self.score == ACCURACY

    @property
    def lacking(self) -> str:
        """What happened to domains without a value; scores but accuracy may be undefined."""
        return "were not tested" if self.classes else "have no value"

    @property
    def runs(self) -> list[tuple[Method, Run]]:
        """All runs, each with its method, including runs that are left out."""
        return [
            (method, run)
            for method in self.methods
            for run in (*method.runs, *(run for run, _ in method.left_out))
        ]

    @property
    def kept_runs(self) -> list[Run]:
        """All runs that are not left out."""
        return [run for method in self.methods for run in method.runs]

    @property
    def replicates(self) -> str:
        """What a method's numbers are averaged over: ``federations`` or ``seeds``."""
        return "federations" if any(method.federations for method in self.methods) else "seeds"

    @property
    def examples(self) -> str:
        """The examples on which scores were measured: ``test`` or ``validation``, or both."""
        return " or ".join(sorted({run.split for run in self.kept_runs}))

    @property
    def held_out(self) -> list[str]:
        """The domains that runs held out: domains that were tested but had no client."""
        return list(dict.fromkeys(r.held_out_domain for r in self.kept_runs if r.held_out_domain))

    @property
    def gaps(self) -> bool:
        """Whether a domain was not tested in some round."""
        return not all(np.isfinite(run.values).all() for run in self.kept_runs)

    def span(self, window: int = WINDOW) -> str:
        """Describe the averaged rounds, such as ``mean of the last 5 tested rounds (16 to 20)``.

        The numbers are left out if they differ between runs.
        """
        spans = {run.final_rounds(window) for run in self.kept_runs}
        if any(run.chosen for run in self.kept_runs):
            best = sorted({run.chosen for run in self.kept_runs if run.chosen})
            which = f"s {best[0]} to {best[-1]}" if len(best) > 1 else f" {best[0]}"
            return f"{BEST_ROUND} (round{which})"
        if len(spans) > 1:
            return "last round" if window == 1 else mean_of_last(map(len, spans), window)
        (rounds,) = spans
        if window == 1:
            return f"last round ({rounds[-1]})"
        if len(rounds) == 1:
            return f"round {rounds[0]}"
        whole = rounds[0] <= self.kept_runs[0].config["evaluate.every"]  # none was tested before
        which = f"all {len(rounds)}" if whole or len(rounds) < window else f"the last {window}"
        return f"mean of {which} tested rounds ({rounds[0]} to {rounds[-1]})"

    def having(self, condition: Callable[[Run], object]) -> list[Method]:
        """Return the methods whose runs all fulfill a condition."""
        return [method for method in self.methods if all(map(condition, method.runs))]

    def methods_by_score(
        self, of: Callable[[Run], Iterable[Score]]
    ) -> Iterator[tuple[Score, list[Method]]]:
        """Yield each score that ``of`` returns for a run, and the methods that have it."""
        scores = {score.name: score for run in self.kept_runs for score in of(run)}
        for name, score in scores.items():
            if methods := self.having(lambda run: name in run.scores):  # noqa: B023
                yield score, methods

    def attributes(self) -> Iterator[tuple[str, list[Method]]]:
        """Yield each sensitive attribute, and the methods that have metrics of group fairness."""
        for name in dict.fromkeys(run.attribute for run in self.kept_runs if run.attribute):
            yield name, self.having(lambda run: run.attribute == name)  # noqa: B023

    def rated(self) -> list[Method]:
        """Return the methods for FedISM's tables.

        Their runs have an AUC, or class-balanced accuracies and corrupted images. There are none
        unless classes are learnt.
        """
        if not self.classes:
            return []
        return self.having(
            lambda run: (
                "auc" in run.scores
                or ("balanced_accuracy" in run.scores and run.config.get("data.corrupted-clients"))
            )
        )

    def typed(self) -> list[Method]:
        """Return the methods for FedGCR's table, whose domains have different numbers of clients.

        If a method recorded clusters, equal numbers above 1 are also accepted.
        """
        clustered = bool(self.having(lambda run: run.clusters))

        def several(method: Method) -> bool:
            counts = set(Counter(client.domain for client in method.runs[0].clients).values())
            corrupted = method.config.get("data.corrupted-clients")
            return (len(counts) > 1 or (clustered and max(counts) > 1)) and not corrupted

        return [method for method in self.methods if several(method)]

    def groups(self, methods: Iterable[Method]) -> list[tuple[str, dict[str, Method]]]:
        """Group comparable methods by name. If there are several groups, each has a heading."""
        by_setting: dict[Any, dict[str, Method]] = {}
        for method in methods:
            by_setting.setdefault(method.comparable, {})[method.name] = method
        groups = []
        for members in by_setting.values():
            first = next(iter(members.values()))
            parts = [f"{key} = {values[first.name]}" for key, values in self.differing.items()]
            heading = ", ".join([*parts, f"round {first.runs[0].reach}"])
            groups.append((heading if len(by_setting) > 1 else "", members))
        return groups

    def baseline(self, method: Method, name: str) -> Method | None:
        """Return the comparable method with strategy ``name`` and the same client, or None.

        Clients may differ in arguments that were tuned for each method. Of several methods, one
        with the bounds of ``method`` is preferred, then one with the same tuned arguments, then
        one with the same values.
        """

        def differs(other: Method) -> tuple[bool, bool, bool]:
            """Return whether bounds, tuned arguments and values of the client differ."""
            bounds, training = (
                other.settings(*tables) != method.settings(*tables)
                for tables in (("bound.", "server."), ("client.",))
            )
            return bounds, other.client != method.client, training

        candidates = [
            other
            for other in self.methods
            if other.strategy == name
            and other is not method
            and other.comparable_with(method)
            and not all(differs(other)[1:])
        ]
        return min(candidates, key=differs, default=None)


def several_runs(methods: Iterable[Method]) -> bool:
    """Return whether any of the methods is averaged over several runs."""
    return any(len(method.runs) > 1 for method in methods)


def mean_of_last(counts: Iterable[int], window: int = WINDOW) -> str:
    """Describe means over the last ``window`` tested rounds, of which runs may have fewer."""
    if min(counts, default=window) < window:
        return f"mean of the last tested rounds (at most {window})"
    return f"mean of the last {window} tested rounds"


def group_runs(runs: Iterable[Run]) -> list[Comparison]:
    """Group runs by domains and primary score, then by method."""
    alike = grouped(((run.domains, run.primary.stated), run) for run in runs)
    comparisons = []
    order = (*BASELINES, "", *REFERENCES)  # "" are all others
    rank = {name: place for place, name in enumerate(order)}
    for (domains, _), members in alike.items():
        methods = [Method(name, same, *_one_per_seed(of)) for name, same, of in _groups(members)]
        methods.sort(key=lambda method: rank.get(method.strategy, rank[""]))
        names = [method.name for method in methods]
        apart = differing([{_EXAMPLES: "version 1", **dict(m.setting)} for m in methods])
        by_name = {key: dict(zip(names, apart[key], strict=True)) for key in sorted(apart)}
        primary = legible(members[0].primary, members)
        comparisons.append(Comparison(domains, tuple(methods), by_name, primary))
    return comparisons


def legible(score: Score, runs: Iterable[Run]) -> Score:
    """Return a score with enough decimals for its values in these runs; accuracy is unchanged."""
    if score == ACCURACY:
        return score
    finals = (np.abs(run.tests_by(score.name).final()) for run in runs)
    return score.legible(float(v[np.isfinite(v)].mean()) for v in finals if np.isfinite(v).any())


def federated(settings: _Settings) -> _Settings:
    """Return settings with ``data.seed`` replaced by "seed", for runs over several federations."""
    return frozenset(item for item in settings if item[0] != "data.seed") | {_FEDERATED}


def _own_federations(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose federation was drawn with their seed, if they are several.

    The result is empty if several federations have several seeds, because the runs with equal
    numbers are then no draws of their own.
    """
    drawn = [run for run in runs if run.federation == run.seed]
    seeds = Counter(federation for federation, _ in {run.replicate for run in runs})
    crossed = sum(count > 1 for count in seeds.values()) > 1
    return drawn if len({run.federation for run in drawn}) > 1 and not crossed else []


def _versions(runs: Iterable[Run]) -> dict[int, _Settings]:
    """Tell runs apart whose clients had different examples under equal data settings.

    Return a setting ``examples`` by the run's `id`, for all but the examples that most runs had
    (version 1). Runs that did not record a digest of their examples count as version 1.
    """
    versions: dict[int, _Settings] = {}
    recorded = [run for run in runs if run.info.get("digest")]
    for alike in grouped((data_key(run.config), run) for run in recorded).values():
        by_digest = grouped((run.info["digest"], run) for run in alike).values()
        _, *others = sorted(by_digest, key=len, reverse=True)
        for number, members in enumerate(others, start=2):
            versions |= {id(run): frozenset({(_EXAMPLES, f"version {number}")}) for run in members}
    return versions


def _groups(runs: Iterable[Run]) -> list[tuple[str, _Settings, list[Run]]]:
    """Return the name of each method, the settings that its runs have in common, and the runs.

    The name is the label of the runs. If several methods have the same label, their differing
    settings are added.
    """
    versions = _versions(runs := list(runs))
    identity = {id(r): method_key(r.config) | versions.get(id(r), frozenset()) for r in runs}
    alike = grouped(((run.label, federated(identity[id(run)])), run) for run in runs)
    whole = bool(_own_federations(runs))
    groups: dict[tuple[str, _Settings], list[Run]] = {}
    for (label, settings), members in alike.items():
        own = _own_federations(members)
        if not own and whole and all(run.federation == run.seed for run in members):
            own = members
        several = set(map(id, own))
        for run in members:
            here = settings if id(run) in several else identity[id(run)]
            groups.setdefault((label, here), []).append(run)
    named = []
    for (label, settings), members in groups.items():
        namesakes = [other for name, other in groups if name == label]
        apart = sorted(settings - frozenset.intersection(*namesakes))
        detail = f" ({', '.join(f'{key}={value}' for key, value in apart)})" if apart else ""
        named.append((label + detail, settings, members))
    return named


def _over_common_domains(values: Vector, value_of: Callable[[Vector], float]) -> Vector:
    """Return a metric [runs, ...] of values [runs, ..., D], without domains where a run has NaN."""
    common = np.all(np.isfinite(values), axis=0)
    metrics = np.full(values.shape[:-1], math.nan)
    for place in np.ndindex(metrics.shape):
        if (there := common[place[1:]]).any():
            metrics[place] = value_of(values[place][there])
    return metrics


def _one_per_seed(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[tuple[Run, str], ...]]:
    """Return, for each seed, the newest run that reached the last round, and the runs left out.

    Each run that is left out comes with the reason. Runs with an untested domain are kept only if
    no run was tested on all domains.
    """
    furthest = max(run.reach for run in runs)
    some_whole = any(run.fully_tested() for run in runs if run.reach == furthest)
    kept: dict[Any, Run] = {}
    left_out = []
    for run in sorted(runs, key=lambda run: str(run.info.get("started", "")), reverse=True):
        if run.reach < furthest:
            left_out.append((run, f"other seeds reached round {furthest}"))
        elif some_whole and not run.fully_tested():
            left_out.append(
                (run, f"{run.lacks}, but other runs of the method were tested on all domains")
            )
        elif run.seed in kept:
            left_out.append((run, "a newer run has the same seed and settings"))
        else:
            kept[run.seed] = run
    return tuple(kept[seed] for seed in sorted(kept)), tuple(left_out)


def differing(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the keys whose values differ between ``settings``, with all their values."""
    keys = dict.fromkeys(key for mapping in settings for key in mapping)
    values = {key: [mapping.get(key, "not set") for mapping in settings] for key in keys}
    return {key: per_key for key, per_key in values.items() if len(set(per_key)) > 1}


# --- grids and sweeps -----------------------------------------------------------------


class Sweep(NamedTuple):
    """Methods that differ in a run config key, in ascending order of its value.

    ``others`` maps values that are not numbers to methods, as in ``num_clusters=auto``.
    """

    key: str
    values: Vector
    methods: tuple[Method, ...]
    others: Mapping[str, Method]


def client_strategy_grids(comparison: Comparison) -> list[dict[str, dict[str, Method]]]:
    """Return grids of comparable methods: at least two clients by two strategies, largest first."""
    sets = (members for _, members in comparison.groups(comparison.methods))
    grids = []
    for members in sorted(sets, key=len, reverse=True):
        grid: dict[str, dict[str, Method]] = {}
        for method in members.values():
            if method.reference:
                continue
            row = grid.setdefault(method.client, {})
            # Methods that were tuned differently may share their cell.
            row[method.name if method.aggregation in row else method.aggregation] = method
        strategies = {strategy for row in grid.values() for strategy in row}
        if len(grid) > 1 and len(strategies) > 1:
            grids.append(grid)
    return grids


def sweeps(comparison: Comparison) -> list[Sweep]:
    """Return sweeps: at least three values of an argument, all else equal, every domain tested."""
    keys = {key for method in comparison.methods for key, _ in method.identity if is_argument(key)}
    by_argument = []
    for key in sorted(keys):
        groups: dict[Any, dict[Any, Method]] = {}
        for method in comparison.having(Run.fully_tested):
            rest = frozenset(item for item in method.identity if item[0] != key)
            if (value := _value(method, key)) is not None:
                groups.setdefault((rest, method.comparable), {}).setdefault(value, method)
        for members in groups.values():
            values = sorted(value for value in members if isinstance(value, float))
            if len(values) >= 3:
                others = {value: m for value, m in members.items() if isinstance(value, str)}
                methods = tuple(members[value] for value in values)
                by_argument.append(Sweep(key, np.array(values), methods, others))
    return by_argument


def _value(method: Method, key: str) -> float | str | None:
    """Return a method's value for an argument, as a number if possible; None if it has none."""
    table, _, leaf = key.partition(".")
    value: Any = dict(method.identity).get(key)
    for kind in (ClientConfig, StrategyConfig):
        if value is None and table == kind.TABLE:
            value = kind.of(method.config).defaults().get(key_to_argument(leaf))
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value if isinstance(value, str) else None
    return number if math.isfinite(number) else None
