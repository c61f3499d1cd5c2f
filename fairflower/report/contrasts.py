"""Comparison of methods: differences paired by federation or seed, judged in families, in words.

A difference is significant if there are at least five pairs and their t test has p < 0.05 after a
correction over all metrics of a measure and all methods of a group: those that are compared
with the same baseline, or one kind of local training under all strategies. Variances are moderated
across the methods (`fairflower.statistics.differences`).
`contrasts_of` computes all contrasts of a comparison, from which tables, verdicts, the legend and
data frames are made.

A method is *fairer* than a baseline if its worst domain is higher or its STD is lower, and neither
is worse. It is *equivalent* if both differences are shown to be within a margin. Otherwise, it is
*undecided*, and the verdict states the smallest difference that is detectable with 80 % power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import numpy as np

from fairflower.registry import PLAIN_CLIENTS
from fairflower.report.grids import client_strategy_grids, sweeps
from fairflower.report.measures import Measure, Metric, measures
from fairflower.report.methods import BASELINES, Comparison, Method
from fairflower.report.reading import Run
from fairflower.report.text import format_number, format_std, join_words, within_range
from fairflower.statistics.differences import (
    MIN_PAIRS,
    Difference,
    MeanStd,
    differences,
    judged_as_family,
    redrawn,
)

#: Judgment if there are too few pairs.
TOO_FEW = f"too few pairs for a verdict ({MIN_PAIRS} needed)"

#: Judgment of differences that may be zero or too small to detect.
UNDECIDED = "undecided"

TITLES = {"fedavg": "FedAvg", "uniform": "Uniform"}


@dataclass(frozen=True)
class Pairs:
    """Differences between two methods in each pair of runs, by metric, in points."""

    measure: Measure
    #: For each metric, the difference of each pair.
    values: tuple[tuple[float, ...], ...]
    #: For each metric, the argument ``floors`` of `differences`.
    floors: tuple[float, ...]
    #: What the runs of a pair share: ``"federation"``, or ``"seed of federation 0"``.
    unit: str
    #: The argument ``overlap`` of `redrawn`.
    overlap: float = 0.0


class MetricDifference(NamedTuple):
    """The difference between two methods in a metric, in percentage points."""

    metric: Metric
    difference: Difference
    sign: int  # 1 if better, -1 if worse, 0 if neither


@dataclass(frozen=True)
class Contrast:
    """Differences between two methods in each metric of a measure, in percentage points."""

    measure: Measure
    differences: tuple[Difference, ...]
    unit: str = "seed"

    @property
    def n(self) -> int:
        """Number of paired runs."""
        return self.differences[0].n

    @property
    def by_metric(self) -> list[MetricDifference]:
        """The differences in the order of the measure's metrics."""
        pairs = zip(self.measure.metrics, self.differences, strict=True)
        return [MetricDifference(metric, d, metric.better * d.sign) for metric, d in pairs]

    def __getitem__(self, title: str) -> MetricDifference:
        """Return the difference in the metric with this title."""
        return next(one for one in self.by_metric if one.metric.title == title)

    @property
    def judgment(self) -> tuple[str, str]:
        """The judgment and its preposition, for example ``("fairer (STD)", "than")``."""
        if self.n < MIN_PAIRS:
            return TOO_FEW, "against"
        judged = [one for one in self.by_metric if one.metric.judged]
        better = ", ".join(one.metric.name for one in judged if one.sign > 0)
        worse = ", ".join(one.metric.name for one in judged if one.sign < 0)
        if better and worse:
            return f"mixed ({better} better; {worse} worse)", "compared with"
        if better or worse:
            return f"{self.measure.words[0 if better else 1]} ({better or worse})", "than"
        if all(one.difference.equivalent for one in judged):
            within = ", ".join(f"{one.metric.name} within {one.metric.margin:g}" for one in judged)
            return f"equivalent ({within})", "to"
        return UNDECIDED, "against"

    @property
    def detectable(self) -> str:
        """The smallest difference that is detectable with 80 % power, for each metric."""
        return ", ".join(
            f"{one.metric.name} {within_range(least, format_number(least, 1), one.metric.largest)}"
            for one in self.by_metric
            for least in [one.difference.detectable]
            if one.metric.judged
        )


@dataclass(frozen=True)
class ContrastGroup:
    """Contrasts of several methods, by name, with the same ``other`` method."""

    heading: str
    other: str
    contrasts: Mapping[str, Contrast]


#: Method -> title of a baseline -> contrast.
ByBaseline = Mapping[str, Mapping[str, Contrast]]


@dataclass(frozen=True)
class Contrasts:
    """All contrasts of a comparison. The lists have the same order as ``measures``."""

    measures: list[Measure]
    against_baselines: list[ByBaseline]
    #: The contrasts of ``against_baselines``, grouped by strategy over all kinds of local training.
    by_strategy: list[list[ContrastGroup]]
    #: Title of an additional comparison (`FURTHER`) -> its groups.
    further: Mapping[str, list[list[ContrastGroup]]]

    @property
    def empty(self) -> bool:
        """Whether no two methods could be compared."""
        pairs = chain.from_iterable(groups.values() for groups in self.against_baselines)
        return not any(pairs) and not any(chain.from_iterable(self.further.values()))


def contrasts_of(comparison: Comparison) -> Contrasts:
    """Compute all contrasts between the methods of a comparison."""
    all_measures = measures(comparison)
    baselines: list[ByBaseline] = []
    for measure in all_measures:
        groups = judged_groups(against_baselines, comparison, measure)
        names = (method.name for method in measure.methods)
        baselines.append(
            {n: {g.heading: g.contrasts[n] for g in groups if n in g.contrasts} for n in names}
        )
    return Contrasts(
        measures=all_measures,
        against_baselines=baselines,
        by_strategy=[by_strategy(comparison, against) for against in baselines],
        further={
            title: [judged_groups(against, comparison, measure) for measure in all_measures]
            for title, against in FURTHER.items()
        },
    )


def paired_differences(method: Method, other: Method, measure: Measure) -> Pairs | None:
    """Return the differences between paired runs, or None if the methods have no paired runs.

    Runs in which some domain was not tested are left out. `judge_family` judges the
    differences.
    """
    metrics = measure.metrics

    def is_usable(run: Run) -> bool:
        return run.fully_tested() and all(np.isfinite(metric.value(run)) for metric in metrics)

    if not {method.name, other.name} <= {member.name for member in measure.methods}:
        return None
    theirs = {run.replicate: run for run in other.runs if is_usable(run)}
    usable = (run for run in method.runs if is_usable(run))
    pairs = [(run, theirs[run.replicate]) for run in usable if run.replicate in theirs]
    if not pairs:
        return None
    values = (tuple(metric.value(a) - metric.value(b) for a, b in pairs) for metric in metrics)
    runs = [run for pair in pairs for run in pair]
    floors = (fmean(metric.example_worth(run) for run in runs) for metric in metrics)
    return Pairs(measure, tuple(values), tuple(floors), method.unit, method.overlap)


def judge_family(family: Mapping[str, Pairs]) -> dict[str, Contrast]:
    """Judge all methods that are compared with the same method, in all metrics together."""
    if not family:
        return {}
    measure = next(iter(family.values())).measure
    alone: dict[tuple[str, int], Difference] = {}
    for i, metric in enumerate(measure.metrics):
        by_method = differences(
            {name: pairs.values[i] for name, pairs in family.items()},
            metric.margin,
            {name: pairs.floors[i] for name, pairs in family.items()},
        )
        alone |= {(n, i): redrawn(one, family[n].overlap) for n, one in by_method.items()}
    judged = judged_as_family(alone)
    return {
        name: Contrast(
            measure, tuple(judged[name, i] for i in range(len(measure.metrics))), pairs.unit
        )
        for name, pairs in family.items()
    }


def by_strategy(comparison: Comparison, against: ByBaseline) -> list[ContrastGroup]:
    """Group the contrasts with the baselines by strategy, over all kinds of local training."""
    groups: dict[tuple[str, str], dict[str, Contrast]] = {}
    for grid in client_strategy_grids(comparison):
        for client, row in grid.items():
            for strategy, method in row.items():
                for name, contrast in against.get(method.name, {}).items():
                    groups.setdefault((strategy, name), {})[client] = contrast
    return [ContrastGroup(*names, contrasts) for names, contrasts in groups.items()]


#: A heading, the name of the other method, and name -> (method, the method to compare it with).
Compared = tuple[str, str, dict[str, tuple[Method, Method]]]
Against = Callable[[Comparison], Iterator[Compared]]


def judged_groups(
    against: Against, comparison: Comparison, measure: Measure
) -> list[ContrastGroup]:
    """Judge the pairs of methods that ``against`` yields; each group is a family."""
    judged = []
    for heading, other, methods in against(comparison):
        family = {name: paired_differences(*pair, measure) for name, pair in methods.items()}
        contrasts = judge_family({name: pairs for name, pairs in family.items() if pairs})
        if contrasts:
            judged.append(ContrastGroup(heading, other, contrasts))
    return judged


def against_baselines(comparison: Comparison) -> Iterator[Compared]:
    """Yield comparisons with FedAvg and with Uniform under the same local training."""
    for baseline in BASELINES:
        families: dict[str, dict[str, tuple[Method, Method]]] = {}
        for method in comparison.methods:
            other = comparison.baseline(method, baseline)
            if other and method.strategy != baseline:
                families.setdefault(other.name, {})[method.name] = method, other
        for name, family in families.items():
            yield TITLES[baseline], name, family


def against_plain(comparison: Comparison) -> Iterator[Compared]:
    """Yield comparisons of each kind of local training with plain local training, by strategy."""
    for grid in client_strategy_grids(comparison):
        plain = next((client for client in grid if client in PLAIN_CLIENTS), "")
        under = grid.get(plain, {})
        for client, row in grid.items():
            if client != plain:
                yield client, plain, {n: (m, under[n]) for n, m in row.items() if n in under}


def against_other_models(comparison: Comparison) -> Iterator[Compared]:
    """Yield comparisons of methods with plain FedAvg on another model, under the same settings."""

    def rest(method: Method) -> object:
        return method.setting - method.settings("model."), method.runs[0].reach

    for base in comparison.methods:
        if base.strategy == "fedavg" and base.client in PLAIN_CLIENTS:
            model = base.config.get("model.name")
            others = [m for m in comparison.methods if m.config.get("model.name") != model]
            pairs = {m.name: (m, base) for m in others if rest(m) == rest(base)}
            yield f"FedAvg of {model}", base.name, pairs


def against_first_values(comparison: Comparison) -> Iterator[Compared]:
    """Yield comparisons of each value of a swept argument with its lowest value."""
    for sweep in sweeps(comparison):
        base, *methods = [*sweep.methods, *sweep.others.values()]
        yield sweep.key, base.name, {method.name: (method, base) for method in methods}


PLAIN_TITLE = "Variants of local training compared with plain local training"

#: Title -> additional comparison, besides the one with the baselines.
FURTHER: Mapping[str, Against] = {
    PLAIN_TITLE: against_plain,
    "Comparison of models": against_other_models,
    "Values of an argument compared with its lowest value": against_first_values,
}


# --- verdicts -------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """A sentence about a method: ``"<name>: <numbers>: <conclusion>."``."""

    name: str
    numbers: str
    conclusion: str
    too_few: bool = False  # whether every comparison has too few pairs

    def __str__(self) -> str:
        numbers = f"{self.numbers}: " if self.numbers else ""
        return f"{self.name}: {numbers}{self.conclusion}."


@dataclass(frozen=True)
class Section:
    """Verdicts on a measure in one kind of comparison.

    ``title`` is empty for fairness over domains against the baselines.
    """

    title: str
    verdicts: Sequence[Verdict]


def verdicts(comparison: Comparison, contrasts: Contrasts) -> list[Section]:
    """Return the sentences about all methods, for every measure and every comparison."""
    fair, *others = contrasts.against_baselines
    found = {"": [fairness_verdict(comparison, m, fair[m.name]) for m in comparison.methods]}
    for measure, by_method in zip(contrasts.measures[1:], others, strict=True):
        found[f"Against the baselines, {measure.name}"] = [
            plain_verdict(name, by_baseline)
            for name, by_baseline in by_method.items()
            if by_baseline
        ]
    by_title = {"Strategies by local training": contrasts.by_strategy, **contrasts.further}
    for title, by_measure in by_title.items():
        # A grid has too many methods for one sentence per method.
        write = _of_each if title in contrasts.further and title != PLAIN_TITLE else _of_group
        for measure, groups in zip(contrasts.measures, by_measure, strict=True):
            found[f"{title}, {measure.name}"] = [v for group in groups for v in write(group)]
    return [Section(title, _with_few_summed_up(said)) for title, said in found.items() if said]


def _with_few_summed_up(found: Sequence[Verdict]) -> Sequence[Verdict]:
    """Merge the verdicts on methods with too few pairs into a single verdict."""
    few = [verdict for verdict in found if verdict.too_few]
    if len(few) < 2:
        return found
    names = join_words([verdict.name for verdict in few])
    together = Verdict(names, "", f"{TOO_FEW}; see the tables for the differences")
    return [together, *(verdict for verdict in found if verdict not in few)]


def fairness_verdict(
    comparison: Comparison, method: Method, against: Mapping[str, Contrast]
) -> Verdict:
    """Return the verdict on a method's fairness over the last five tested rounds."""
    if not (against or method.fully_tested()):
        return Verdict(
            method.name, "", "not compared, because some domains were not tested in every round"
        )
    if len(comparison.domains) < 2:
        return Verdict(method.name, "", "not judged, because a single domain has no spread")
    if not against:
        wanted = [TITLES[name] for name in BASELINES if name != method.strategy]
        conclusion = f"no {' or '.join(wanted)} run with the same settings, rounds and seeds"
        baselines = [comparison.baseline(method, name) for name in BASELINES]
        tested = all(baseline is None or baseline.fully_tested() for baseline in baselines)
        condition = "" if tested else ", tested on every domain,"
        return Verdict(method.name, "", f"{conclusion}{condition} to compare with")
    worst = [f"{signed(c['MIN'].difference)} points against {name}" for name, c in against.items()]
    std = [signed(contrast["STD"].difference) for contrast in against.values()]
    lower = [f"{name}'s" for name, contrast in against.items() if contrast["AVG"].sign < 0]
    return Verdict(
        method.name,
        f"worst domain {', '.join(worst)}, STD {' and '.join(std)} "
        f"({pairs_text(against.values())})",
        conclusion_text(against)
        + (f", with an average below {' and '.join(lower)}" if lower else ""),
        all_too_few(against),
    )


def _of_group(group: ContrastGroup) -> Iterator[Verdict]:
    """Yield one verdict on the whole group: ``fairer (STD) with a, b; ...``."""
    conclusion = "; ".join(
        f"{judgment} with {', '.join(names)}"
        for (judgment, _), names in _by_judgment(group.contrasts).items()
    )
    name = f"{group.heading} against {group.other}"
    yield Verdict(name, "", conclusion, all_too_few(group.contrasts))


def _of_each(group: ContrastGroup) -> Iterator[Verdict]:
    """Yield one verdict on each contrast of the group."""
    for name, contrast in group.contrasts.items():
        yield plain_verdict(f"{group.heading}, {name}", {group.other: contrast})


def verdict_legend(contrasts: Contrasts) -> str:
    """Explain the words used in verdicts; empty if no methods were compared."""
    if contrasts.empty:
        return ""
    return (
        "Fairer: higher worst domain or lower STD, neither worse; t tests, p < 0.05 (corrected). "
        "Mixed: one better, one worse. Equivalent: within the margins. Undecided: none of these."
    )


def plain_verdict(name: str, contrasts: Mapping[str, Contrast]) -> Verdict:
    """Return the verdict with a method's differences and the conclusion from them."""
    numbers = "; ".join(
        ", ".join(f"{one.metric.name} {signed(one.difference)}" for one in contrast.by_metric)
        + f" points against {other}"
        for other, contrast in contrasts.items()
    )
    return Verdict(
        name,
        f"{numbers} ({pairs_text(contrasts.values())})",
        conclusion_text(contrasts),
        all_too_few(contrasts),
    )


def all_too_few(contrasts: Mapping[str, Contrast]) -> bool:
    """Return whether no contrast has enough pairs for a verdict."""
    return all(contrast.judgment[0] == TOO_FEW for contrast in contrasts.values())


def conclusion_text(contrasts: Mapping[str, Contrast]) -> str:
    """Return the conclusion from a method's contrasts, for example ``fairer (STD) than FedAvg``."""
    parts = []
    for (judgment, preposition), names in _by_judgment(contrasts).items():
        if judgment == UNDECIDED:
            names = [f"{name} (detectable: {contrasts[name].detectable})" for name in names]
        parts.append(f"{judgment} {preposition} {' and '.join(names)}")
    return ", ".join(parts)


def pairs_text(contrasts: Iterable[Contrast]) -> str:
    """Return the number of pairs: ``10 federations``, ``2 and 3 seeds of federation 0``."""
    compared = list(contrasts)
    counts = join_words(sorted({str(contrast.n) for contrast in compared}, key=int))
    noun, *federation = compared[0].unit.split(" ", 1)
    return " ".join([counts, f"{noun}{'' if counts == '1' else 's'}", *federation])


def signed(difference: MeanStd) -> str:
    """Format a difference with its sign and standard deviation.

    >>> signed(MeanStd(0.5, 0.25, 3)), signed(MeanStd(0.5, float("nan"), 1))
    ('+0.50 ± 0.25', '+0.50')
    """
    mean = format_number(difference.mean, signed=True)
    return f"{mean} {format_std(difference.std, difference.n)}".strip()


def _by_judgment(contrasts: Mapping[str, Contrast]) -> dict[tuple[str, str], list[str]]:
    names: dict[tuple[str, str], list[str]] = {}
    for name, contrast in contrasts.items():
        names.setdefault(contrast.judgment, []).append(name)
    return names
