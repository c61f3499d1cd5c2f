"""Runs grouped into methods, and methods into what may be compared, products and sweeps.

Runs that differ in nothing but the seed are one *method*, and so are runs on several federations,
of which the seed draws all (``data.seed`` = ``seed``); everything said about it is
a mean and a standard deviation over these. Methods are *comparable* when only the
method itself (``strategy.*``, ``client.*``, ``bound.*``) differs and they reached the same round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairflower.config import (
    METHOD_TABLES,
    ClientConfig,
    StrategyConfig,
    key_to_argument,
    method_key,
)
from fairflower.numerics.metrics import Vector
from fairflower.report.reading import WINDOW, Run
from fairflower.report.text import untested
from fairflower.statistics.differences import MeanStd as MeanStd

BASELINES = ("fedavg", "uniform")


class Curve(NamedTuple):
    """A figure over rounds [R]: mean and std over seeds, and whether it is of all domains."""

    rounds: NDArray[np.int64]
    mean: Vector
    spread: Vector
    whole: NDArray[np.bool_]

    @classmethod
    def of(cls, rounds: NDArray[np.int64], values: Vector) -> Curve:
        """The curve of values [seeds, R], of all domains; one seed has no spread."""
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
        return cls(rounds, values.mean(axis=0), spread, np.ones(len(rounds), np.bool_))


@dataclass(frozen=True)
class Method:
    """Runs of one method under one setting, one per seed."""

    #: The runs' label, with the settings that tell it from a namesake if need be.
    name: str
    #: Ordered by seed; all reach the same round.
    runs: tuple[Run, ...]
    #: Runs of the method that its figures leave out, and why.
    left_out: tuple[tuple[Run, str], ...] = ()
    #: Whether each run is on a federation of its own, by its seed.
    federations: bool = False

    @property
    def unit(self) -> str:
        """What its runs are: a federation, or a seed and of which federation."""
        return "federation" if self.federations else f"seed of federation {self.runs[0].federation}"

    @cached_property
    def identity(self) -> frozenset[tuple[str, str]]:
        """All settings that its runs have in common."""
        settings = method_key(self.config)
        return _federated(settings) if self.federations else settings

    @property
    def config(self) -> Mapping[str, Any]:
        """The run config (of the first seed)."""
        return self.runs[0].config

    @property
    def strategy(self) -> str:
        """Name of the aggregation rule."""
        return str(self.config.get("strategy.name", self.runs[0].label))

    @property
    def client(self) -> str:
        """The local training: its name, with what differs from its defaults."""
        return ClientConfig.of(self.config).label

    @property
    def aggregation(self) -> str:
        """``name`` without the local training."""
        return self.name.removeprefix(f"{self.client}+")

    @cached_property
    def setting(self) -> frozenset[tuple[str, str]]:
        """All that must be equal for a comparison: data, model, training, rounds."""
        return self.identity - self.settings(*METHOD_TABLES)

    def settings(self, *tables: str) -> frozenset[tuple[str, str]]:
        """Those of some tables of the run config, as in ``"data."``."""
        return frozenset(item for item in self.identity if item[0].startswith(tables))

    @property
    def comparable(self) -> tuple[Any, ...]:
        """Equal for methods whose figures may be compared."""
        return self.setting, self.runs[0].reach

    def over_seeds(self, figure: Callable[[Run], float]) -> MeanStd:
        """The estimate of a figure that each run has."""
        return MeanStd.of([figure(run) for run in self.runs])

    def over_rounds(self, figure: Callable[[Run], Vector]) -> MeanStd:
        """The estimate of a figure that each run has several times: over seeds and rounds.

        Its ``std`` is of the population (ddof 0), as in FedISM's tables.
        """
        values = np.concatenate([figure(run) for run in self.runs])
        return MeanStd(float(values.mean()), float(values.std()), len(values))

    def over_domains(
        self, accuracies: Callable[[Run], Vector], figure: Callable[[Vector], float]
    ) -> MeanStd:
        """The estimate of a figure of the domains that every seed was tested on.

        NaN if there is none. ``accuracies`` gives a run's, [D], NaN for an untested domain.
        """
        values = np.array([accuracies(run) for run in self.runs])
        return MeanStd.of([_of_those(row, figure) for row in _in_common(values)])

    def fully_tested(self) -> bool:
        """Whether every seed was tested on every domain in each of the last rounds."""
        return all(run.fully_tested() for run in self.runs)

    def curve(
        self, figure: Callable[[Vector], float], domains: Sequence[int] | slice = slice(None)
    ) -> Curve:
        """A figure of the accuracies per domain over rounds, by default of all domains.

        Where a domain was not tested, by whatever seed, the figure is of the others; NaN
        if there are none.
        """
        rounds = reduce(np.intersect1d, [run.rounds for run in self.runs])
        accuracies = [run.accuracy[np.isin(run.rounds, rounds)][:, domains] for run in self.runs]
        accuracy = _in_common(np.array(accuracies))
        values = np.array([[_of_those(row, figure) for row in run] for run in accuracy])
        return Curve.of(rounds, values)._replace(whole=np.isfinite(accuracy[0]).all(axis=1))


@dataclass(frozen=True)
class Comparison:
    """All methods that were tested on the same domains."""

    domains: tuple[str, ...]
    #: Baselines first, then in the order of the runs.
    methods: tuple[Method, ...]
    #: Setting -> {method name: value} for every setting that is not common to all.
    differing: Mapping[str, Mapping[str, str]]

    @property
    def runs(self) -> list[tuple[Method, Run]]:
        """Every run with its method, those left out included."""
        return [
            (method, run)
            for method in self.methods
            for run in (*method.runs, *(run for run, _ in method.left_out))
        ]

    @property
    def held_out(self) -> list[str]:
        """The domains that were held out of runs: tested, but of no client."""
        runs = (run for method in self.methods for run in method.runs)
        return list(dict.fromkeys(run.held_out_domain for run in runs if run.held_out_domain))

    @property
    def gaps(self) -> bool:
        """Whether in some round a domain was not tested."""
        runs = (run for method in self.methods for run in method.runs)
        return not all(np.isfinite(run.accuracy).all() for run in runs)

    def span(self, window: int = WINDOW) -> str:
        """``mean of the last 5 tested rounds (16 to 20)``; no numbers where runs differ."""
        spans = {run.final_rounds(window) for method in self.methods for run in method.runs}
        if len(spans) > 1:
            return "last round" if window == 1 else f"mean of the last {window} tested rounds"
        (rounds,) = spans
        if window == 1:
            return f"last round ({rounds[-1]})"
        if len(rounds) == 1:
            return f"round {rounds[0]}"
        which = f"the last {window}" if len(rounds) == window else f"all {len(rounds)}"
        return f"mean of {which} tested rounds ({rounds[0]} to {rounds[-1]})"

    def baseline(self, method: Method, name: str) -> Method | None:
        """The FedAvg or Uniform method that ``method`` may be compared with, if any.

        Of several, which differ in their bounds, the one with the method's own.
        """
        bounds, training = method.settings("bound."), method.settings("client.")
        candidates = [
            other
            for other in self.methods
            if other.strategy == name
            and other is not method
            and other.comparable == method.comparable
            and other.settings("client.") == training
        ]
        return min(candidates, key=lambda other: other.settings("bound.") != bounds, default=None)


def group_runs(runs: Iterable[Run]) -> list[Comparison]:
    """Group runs by their domains, then by method."""
    by_domains: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        by_domains.setdefault(run.domains, []).append(run)
    comparisons = []
    for domains, members in by_domains.items():
        methods = _methods(members)
        names = [method.name for method in methods]
        apart = differing([dict(method.setting) for method in methods])
        by_name = {key: dict(zip(names, apart[key], strict=True)) for key in sorted(apart)}
        comparisons.append(Comparison(domains, tuple(methods), by_name))
    return comparisons


def method_names(runs: Sequence[Run]) -> list[str]:
    """The method of each run: its label, with the settings that tell it from a namesake."""
    names = {id(run): name for name, group, _ in _groups(runs) for run in group}
    return [names[id(run)] for run in runs]


def _federated(settings: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Settings of runs on several federations, whose ``data.seed`` is the seed."""
    return frozenset(item for item in settings if item[0] != "data.seed") | {("data.seed", "seed")}


def _over_federations(runs: Sequence[Run]) -> bool:
    """Whether seeds draw federations, too: ``data.seed`` is ``seed`` in all, and not one number."""
    own = all(run.federation == run.seed for run in runs)
    return own and len({run.federation for run in runs}) > 1


def _groups(runs: Iterable[Run]) -> list[tuple[str, list[Run], bool]]:
    """Runs by their methods' names: labels, with the settings that tell one from a namesake.

    And whether they are on a federation each.
    """
    alike: dict[tuple[str, frozenset[tuple[str, str]]], list[Run]] = {}
    for run in (runs := list(runs)):
        alike.setdefault((run.label, _federated(method_key(run.config))), []).append(run)
    whole = _over_federations(runs)
    groups: dict[tuple[str, frozenset[tuple[str, str]]], list[Run]] = {}
    for (label, settings), members in alike.items():
        each = whole or _over_federations(members)
        for run in members:
            own = settings if each else method_key(run.config)
            groups.setdefault((label, own), []).append(run)
    named = []
    for (label, settings), members in groups.items():
        namesakes = [other for name, other in groups if name == label]
        apart = sorted(settings - frozenset.intersection(*namesakes))
        detail = f" ({', '.join(f'{key}={value}' for key, value in apart)})" if apart else ""
        named.append((label + detail, members, ("data.seed", "seed") in settings))
    return named


def _methods(runs: Iterable[Run]) -> list[Method]:
    methods = [Method(name, *_one_per_seed(group), own) for name, group, own in _groups(runs)]
    rank = {name: place for place, name in enumerate(BASELINES)}
    return sorted(methods, key=lambda method: rank.get(method.strategy, len(rank)))


def _in_common(values: Vector) -> Vector:
    """Values [seeds, ..., D] without what some seed lacks, NaN in its place."""
    return np.where(np.isfinite(values).all(axis=0), values, np.nan)


def _of_those(values: Vector, figure: Callable[[Vector], float]) -> float:
    """A figure of those values that there are."""
    there = values[np.isfinite(values)]
    return figure(there) if there.size else math.nan


def _one_per_seed(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[tuple[Run, str], ...]]:
    """Keep the furthest runs, the newest for each seed; say why the others are left out.

    Runs that lack tests of a domain are kept only where all of them do.
    """
    furthest = max(run.reach for run in runs)
    some_whole = any(run.fully_tested() for run in runs if run.reach == furthest)
    kept: dict[Any, Run] = {}
    left_out = []
    for run in sorted(runs, key=lambda run: str(run.info.get("started", "")), reverse=True):
        if run.reach < furthest:
            left_out.append((run, f"other seeds reached round {furthest}"))
        elif some_whole and not run.fully_tested():
            lacks = untested(run.domains, run.rounds, run.accuracy)
            left_out.append((run, f"{lacks}, other runs of the method lack no domain"))
        elif run.seed in kept:
            left_out.append((run, "a newer run has the same seed and settings"))
        else:
            kept[run.seed] = run
    return tuple(kept[seed] for seed in sorted(kept)), tuple(left_out)


def differing(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The keys whose values are not the same in all settings, with the value of each."""
    keys = dict.fromkeys(key for one in settings for key in one)
    values = {key: [one.get(key, "not set") for one in settings] for key in keys}
    return {key: per_key for key, per_key in values.items() if len(set(per_key)) > 1}


#: Fewer values make no curve.
_FEWEST = 3


class Sweep(NamedTuple):
    """Methods in ascending order of the run config key's value.

    ``others`` have a value of it that is no number, as in ``num_clusters=auto``: value ->
    method.
    """

    key: str
    values: Vector
    methods: tuple[Method, ...]
    others: Mapping[str, Method]


def client_strategy_grids(comparison: Comparison) -> list[dict[str, dict[str, Method]]]:
    """Client -> strategy -> method, for each comparable set that is a product; largest first."""
    sets: dict[Any, list[Method]] = {}
    for method in comparison.methods:
        sets.setdefault(method.comparable, []).append(method)
    grids = []
    for members in sorted(sets.values(), key=len, reverse=True):
        grid: dict[str, dict[str, Method]] = {}
        for method in members:
            grid.setdefault(method.client, {})[method.aggregation] = method
        strategies = {strategy for row in grid.values() for strategy in row}
        if len(grid) > 1 and len(strategies) > 1:
            grids.append(grid)
    return grids


def largest_grid(comparison: Comparison) -> dict[str, dict[str, Method]]:
    """The largest of `client_strategy_grids`; empty if there is none."""
    return next(iter(client_strategy_grids(comparison)), {})


def sweeps(comparison: Comparison) -> list[Sweep]:
    """Every method argument of which there are three values or more, all else equal.

    A method that was not tested on every domain throughout is compared with none, and left out.
    """
    keys = {
        key
        for method in comparison.methods
        for key, _ in method.identity
        if key.startswith(("strategy.", "client.")) and not key.endswith(".name")
    }
    by_argument = []
    for key in sorted(keys):
        groups: dict[Any, dict[Any, Method]] = {}
        for method in comparison.methods:
            value = _value(method, key)
            rest = frozenset(item for item in method.identity if item[0] != key)
            if value is not None and method.fully_tested():
                groups.setdefault((rest, method.comparable), {}).setdefault(value, method)
        for members in groups.values():
            values = sorted(value for value in members if isinstance(value, float))
            if len(values) >= _FEWEST:
                others = {value: m for value, m in members.items() if isinstance(value, str)}
                methods = tuple(members[value] for value in values)
                by_argument.append(Sweep(key, np.array(values), methods, others))
    return by_argument


def _value(method: Method, key: str) -> float | str | None:
    """The method's value of an argument, also if it was left to the method; a number if it is one.

    None where the method has no such argument.
    """
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
