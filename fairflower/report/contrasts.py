"""Comparison of methods: differences paired by federation or seed, judged in families, in words.

A difference is significant if there are at least five pairs and their t test has p < 0.05 after a
correction over all metrics of a measure and all methods of a group: those that are compared
with the same baseline, or one kind of local training under all strategies. Variances are moderated
across the methods (`fairflower.statistics`).
`contrasts_of` computes all contrasts of a comparison, from which tables, verdicts, the legend and
data frames are made.

A method is *fairer* than a baseline if its worst domain is better or its STD is lower, and neither
is worse. It is *equivalent* if both differences are shown to be within a margin. Otherwise, it is
*undecided*, and the verdict states the smallest difference that is detectable with 80 % power.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

import numpy as np

from fairflower.config.text import grouped, join_words
from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import DIFFERENCES
from fairflower.numerics.metrics import AVG, GAP, STD0, Summary, over_domains
from fairflower.numerics.scores import ACCURACY, AUC, BALANCED_ACCURACY, Score
from fairflower.registry import PLAIN_CLIENTS
from fairflower.report.cells import format_number, format_std, within_range
from fairflower.report.methods import BASELINES, Comparison, Method, client_strategy_grids, sweeps
from fairflower.report.reading import Run
from fairflower.statistics import (
    MIN_PAIRS,
    Difference,
    MeanStd,
    differences,
    example_worth,
    judged_as_family,
    redrawn,
)

#: Judgment if there are too few pairs.
TOO_FEW = f"too few pairs for a verdict ({MIN_PAIRS} needed)"

#: Judgment of differences that may be zero or too small to detect.
UNDECIDED = "undecided"

SIGMA = "\N{GREEK SMALL LETTER SIGMA}"


# --- measures -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Metric(Score):
    """A score of a whole run, by which methods are compared; its name is that in sentences."""

    of: Callable[[Run], float]
    #: Whether the metric has an influence on verdicts.
    judged: bool = True
    #: Gradient with respect to the domains' accuracies, None if unknown.
    gradient: Callable[[Vector], Vector] | None = None
    #: Number of a reference's run of which ``margin`` is a percentage; None: it is in the unit.
    scale: Callable[[Run], float] | None = None
    #: Multiple of the setting ``evaluate.margin`` that replaces ``margin``, if the run sets it.
    declared: float = 0.0

    def value(self, run: Run) -> float:
        """Return the metric of a run, in its unit."""
        return self.shown(self.of(run))

    def margin_from(self, references: Iterable[Run]) -> float:
        """Return the margin of equivalence with a method that has these runs, in the unit."""
        runs = list(references)
        declared = self.declared * runs[0].config["evaluate.margin"]
        if declared or self.scale is None:
            return declared or self.margin
        return abs(fmean(map(self.scale, runs))) * self.margin / 100

    def example_worth(self, run: Run) -> float:
        """Return the metric's `example_worth`, in points; 0 if it is unknown."""
        sizes = np.array(run.sizes, dtype=np.float64)
        accuracy = run.final()
        if self.gradient is None or sizes.shape != accuracy.shape or not (sizes > 0).all():
            return 0.0
        return example_worth(self.shown(self.gradient(accuracy)), sizes)


@dataclass(frozen=True)
class Measure:
    """Metrics that are judged together."""

    name: str  # for example "accuracy over domains"
    metrics: Sequence[Metric]
    methods: Sequence[Method]  # those that have these metrics
    #: Adjectives for a better and for a worse method.
    words: tuple[str, str] = ("fairer", "less fair")


def measures(comparison: Comparison) -> list[Measure]:
    """Return a comparison's measures: fairness over domains, then measures that runs recorded."""
    found = [fairness(comparison)]
    rated = comparison.rated()
    for score in (BALANCED_ACCURACY, AUC):
        if scored := [m for m in rated if all(score.name in run.scores for run in m.runs)]:
            found.append(_by_domain(comparison, score, scored))
    found += [
        _over_domains(comparison, *of_user)
        for of_user in comparison.methods_by_score(lambda run: run.user_scores)
    ]
    for attribute, methods in comparison.attributes():
        between = [_between_groups(attribute, methods, place) for place in (0, 1)]
        found += [measure for measure in between if measure.metrics]  # or all are undefined
    typed = comparison.typed()
    return [*found, _over_clients(comparison.score, typed)] if typed else found


def fairness(comparison: Comparison) -> Measure:
    """Return the fairness measure: worst domain, STD and the average, which is not judged."""
    return _over_domains(comparison, comparison.score, comparison.methods)


def _of_domains(run: Run, name: str, of: Callable[[Vector], float]) -> float:
    """Return a metric of the domains' scores; NaN if some domain was not tested in each round."""
    tests = run.tests_by(name)
    return float(of(tests.final())) if tests.fully_tested() else math.nan


def _over_domains(comparison: Comparison, score: Score, methods: Sequence[Method]) -> Measure:
    """Return the measure for a score over domains: worst value, STD and average."""
    value = partial(_of_domains, name=score.name)
    average, worst, spread, _ = over_domains(score)
    primary = score is comparison.score
    scale = None if score.margin else partial(value, of=average)
    metrics = [
        Metric(
            row.phrase if primary else f"{row.phrase} of {score.phrase}",
            row.better,
            score.unit,
            score.low,
            score.high,
            row.margin * (score.margin or 1.0),
            score.digits,
            title=row.title if primary else f"{row.title} {score.title}",
            of=partial(value, of=row),
            judged=row is not average,
            gradient=row.gradient if score == ACCURACY else None,  # a mean over examples
            scale=scale,
            declared=primary * row.margin / worst.margin,
        )
        for row in (worst, spread, average)
    ]
    return Measure(f"{score.phrase} over domains", metrics, methods)


def _by_domain(comparison: Comparison, score: Score, methods: Sequence[Method]) -> Measure:
    """Return the measure for a score: the mean over the last rounds by domain, average and gap."""

    def metric(name: str, better: int, margin: float, of: Callable[[Vector], float]) -> Metric:
        value = partial(_of_domains, name=score.name, of=of)
        return Metric(name, better, margin=margin, of=value)

    metrics = [
        metric(f"{domain} {score.title}", score.better, 2 * score.margin, itemgetter(d))
        for d, domain in enumerate(comparison.domains)
    ]
    if len(metrics) > 1:
        metrics.append(metric(f"{AVG.phrase} {score.title}", AVG.better, score.margin, AVG))
        metrics.append(metric(f"{score.title} gap", GAP.better, GAP.margin, GAP))
    return Measure(score.phrase, metrics, methods, ("better", "worse"))


def _between_groups(attribute: str, methods: Sequence[Method], place: int) -> Measure:
    """Return the measure of the differences between groups that are defined at a ``place``."""
    where, whose = (", worst client", "worst client's ") if place else ("", "")
    metrics = [
        Metric(
            f"{whose}{score.phrase}", score.better, title=score.title, margin=1.0 + place, of=value
        )
        for score in DIFFERENCES
        for value in [of_people(score.name, place)]
        if all(np.isfinite(value(run)) for method in methods for run in method.runs)
    ]
    name = f"fairness between groups by {attribute}{where}"
    return Measure(name, metrics, methods)


def _over_clients(score: Score, methods: Sequence[Method]) -> Measure:
    """Return FedGCR's measure: the average over clients, and the spread over types and clients."""
    clients = of_clients(methods)
    average = "average over clients"

    def over_clients(run: Run) -> float:
        return AVG(clients(run))

    metrics = [
        Metric(
            *(name, better, score.unit, score.low, score.high, score.margin or 1.0, score.digits),
            title="Avg over clients" if name == average else name,
            of=of,
            scale=None if score.margin else over_clients,
            declared=0.5,
        )
        for name, better, of in (
            (average, score.better, over_clients),
            (f"{SIGMA} type", STD0.better, lambda run: STD0(run.final())),
            (f"{SIGMA} client", STD0.better, lambda run: STD0(clients(run))),
        )
    ]
    return Measure("client types and clients", metrics, methods, ("better", "worse"))


def of_people(metric: str, place: int) -> Callable[[Run], float]:
    """Return a function that computes a run's metric of group fairness.

    ``place`` is 0 for all people, 1 for the worst client, and 2 or more for the domains. The value
    is the mean over the last tested rounds, or NaN if it is undefined.
    """
    return lambda run: float(run.group_metrics[metric].final()[place])


def of_clients(methods: Sequence[Method]) -> Callable[[Run], Vector]:
    """Return a function that returns the primary score of each client of a run, [K].

    It is the score on the client's test data if all clients in all runs of the methods tested,
    else that of its domain, without clients of an untested domain.
    """
    if all(run.all_clients_tested for method in methods for run in method.runs):
        return lambda run: run.by_client.final()

    def of_domains(run: Run) -> Vector:
        values = run.final()[[run.domains.index(client.domain) for client in run.clients]]
        return values[np.isfinite(values)]

    return of_domains


def over(
    row: Summary,
    comparison: Comparison,
    *,
    domains: Callable[[Run], Vector] = Run.final,
    clients: Callable[[Run], Vector] | None = None,
) -> Callable[[Method], MeanStd]:
    """Return a function of a method: its summary of the values of ``domains`` or of ``clients``.

    It is NaN if the summary compares domains but only one domain was tested.
    """

    def value(values: Vector) -> float:
        single = row.compares and len(values) < 2 <= len(comparison.domains)
        return math.nan if single else row.shown(row(values))

    if clients is None:
        return lambda method: method.over_domains(domains, value)
    return lambda method: method.over_seeds(lambda run: value(clients(run)))


# --- contrasts ------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Differences between two methods in each pair of runs, by metric, in the metric's unit."""

    measure: Measure
    method: Method
    #: For each metric, the difference of each pair.
    values: tuple[tuple[float, ...], ...]
    #: For each metric, the argument ``floors`` of `differences`.
    floors: tuple[float, ...]
    #: For each metric, the margin of equivalence.
    margins: tuple[float, ...]


class MetricDifference(NamedTuple):
    """The difference between two methods in a metric, in the metric's unit."""

    metric: Metric
    difference: Difference
    sign: int  # 1 if better, -1 if worse, 0 if neither

    @property
    def verdict(self) -> str:
        """Better, worse, equivalent or undecided; empty for fewer than `MIN_PAIRS` pairs."""
        if self.difference.n < MIN_PAIRS:
            return ""
        if self.sign:
            return "better" if self.sign > 0 else "worse"
        return "equivalent" if self.difference.equivalent else UNDECIDED


@dataclass(frozen=True)
class Contrast:
    """Differences between two methods in each metric of a measure, in the metric's unit."""

    measure: Measure
    differences: Sequence[Difference]
    #: What the runs of a pair share: ``"federation"``, or ``"seed of federation 0"``.
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
            within = ", ".join(
                f"{one.metric.name} within {one.difference.margin:.3g}" for one in judged
            )
            return f"equivalent ({within})", "to"
        return UNDECIDED, "against"

    @property
    def detectable(self) -> str:
        """The smallest difference that is detectable with 80 % power, for each metric."""
        return ", ".join(
            f"{one.metric.name} "
            f"{within_range(least, format_number(least, digits), one.metric.largest)}"
            for one in self.by_metric
            for least, digits in [
                (one.difference.detectable, one.metric.digits - (one.metric.unit == "%"))
            ]
            if one.metric.judged
        )


@dataclass(frozen=True)
class ContrastGroup:
    """Contrasts of several methods, by name, with the same ``other`` method."""

    heading: str
    other: str
    contrasts: Mapping[str, Contrast]


@dataclass(frozen=True)
class Contrasts:
    """All contrasts of a comparison in a measure."""

    measure: Measure
    #: Method -> title of a baseline -> contrast.
    against_baselines: Mapping[str, Mapping[str, Contrast]]
    #: Title of an additional comparison (`BY_STRATEGY`, `FURTHER`) -> its groups.
    further: Mapping[str, Sequence[ContrastGroup]]


def contrasts_of(comparison: Comparison) -> list[Contrasts]:
    """Compute all contrasts between the methods of a comparison, for each measure."""
    contrasts = []
    for measure in measures(comparison):
        groups = judged_groups(against_baselines, comparison, measure)
        against: dict[str, dict[str, Contrast]] = {m.name: {} for m in measure.methods}
        for group in groups:
            for name, contrast in group.contrasts.items():
                against[name][group.heading] = contrast
        by_strategy: dict[tuple[str, str], dict[str, Contrast]] = {}
        for grid in client_strategy_grids(comparison):
            for client, row in grid.items():
                for strategy, method in row.items():
                    for name, contrast in against.get(method.name, {}).items():
                        by_strategy.setdefault((strategy, name), {})[client] = contrast
        further = {BY_STRATEGY: [ContrastGroup(*of, found) for of, found in by_strategy.items()]}
        for title, compared in FURTHER.items():
            further[title] = judged_groups(compared, comparison, measure)
        contrasts.append(Contrasts(measure, against, further))
    return contrasts


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
    margins = (metric.margin_from(run for _, run in pairs) for metric in metrics)
    return Pairs(measure, method, tuple(values), tuple(floors), tuple(margins))


def judge_family(pairs_of: Mapping[str, Pairs | None]) -> dict[str, Contrast]:
    """Judge all methods that are compared with the same method, in all metrics together.

    Methods without pairs are left out.
    """
    family = {name: pairs for name, pairs in pairs_of.items() if pairs}
    if not family:
        return {}
    measure = next(iter(family.values())).measure
    alone: dict[tuple[str, int], Difference] = {}
    for i in range(len(measure.metrics)):
        by_method = differences(
            {name: pairs.values[i] for name, pairs in family.items()},
            {name: pairs.margins[i] for name, pairs in family.items()},
            {name: pairs.floors[i] for name, pairs in family.items()},
        )
        alone |= {(n, i): redrawn(one, family[n].method.overlap) for n, one in by_method.items()}
    judged = judged_as_family(alone)
    return {
        name: Contrast(
            measure, [judged[name, i] for i in range(len(measure.metrics))], pairs.method.unit
        )
        for name, pairs in family.items()
    }


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
        if contrasts := judge_family(family):
            judged.append(ContrastGroup(heading, other, contrasts))
    return judged


def against_baselines(comparison: Comparison) -> Iterator[Compared]:
    """Yield comparisons with FedAvg and with Uniform under the same local training."""
    for baseline, title in BASELINES.items():
        families: dict[str, dict[str, tuple[Method, Method]]] = {}
        for method in comparison.methods:
            other = comparison.baseline(method, baseline)
            if other and method.strategy != baseline and not method.reference:
                families.setdefault(other.name, {})[method.name] = method, other
        for name, family in families.items():
            yield title, name, family


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


#: Title of the same contrasts as against the baselines, by strategy over all local training.
BY_STRATEGY = "Strategies by local training"

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
    too_few: str = ""  # the number of pairs if every comparison has too few

    def __str__(self) -> str:
        return f"{': '.join(filter(None, (self.name, self.numbers, self.conclusion)))}."

    @property
    def on_screen(self) -> "Verdict":
        """The verdict; for too few pairs it says how to get enough."""
        option = "seeds" if " of federation" in self.too_few else "federations"
        advice = f"{MIN_PAIRS} are needed. Repeat with --{option} 0-{MIN_PAIRS - 1}"
        few = f"no verdict from {self.too_few}, {advice}"
        return Verdict(self.name, self.numbers, few) if self.too_few else self


def verdicts(
    comparison: Comparison, contrasts: Sequence[Contrasts]
) -> dict[str, Sequence[Verdict]]:
    """Return the sentences about all methods, by a title for each measure and kind of comparison.

    The title is empty for fairness over domains against the baselines. A run alone, to which nobody
    compares, has none.
    """
    fair, *others = contrasts
    alone = len(comparison.runs) == 1 and comparison.methods[0].fully_tested()
    found = {
        "": [
            fairness_verdict(comparison, method, against)
            for method in comparison.methods
            for against in [fair.against_baselines[method.name]]
            if against or not (method.reference or method.only_tested or alone)
        ]
    }
    for one in others:
        found[f"Against the baselines, {one.measure.name}"] = [
            verdict_on(name, against) for name, against in one.against_baselines.items() if against
        ]
    for title in fair.further:
        # A grid has too many methods for one sentence per method.
        write = _of_group if title in (BY_STRATEGY, PLAIN_TITLE) else _of_each
        for one in contrasts:
            said = [verdict for group in one.further[title] for verdict in write(group)]
            found[f"{title}, {one.measure.name}"] = said
    return {title: with_few_summed_up(said) for title, said in found.items() if said}


def with_few_summed_up(found: Sequence[Verdict]) -> Sequence[Verdict]:
    """Merge the verdicts on methods with too few pairs into a single verdict."""
    few = [verdict for verdict in found if verdict.too_few]
    if len(few) < 2:
        return found
    names = join_words([verdict.name for verdict in few])
    pairs = join_words([*{verdict.too_few: None for verdict in few}])
    together = Verdict(names, "", f"{TOO_FEW}; see the tables for the differences", pairs)
    return [together, *(verdict for verdict in found if verdict not in few)]


def fairness_verdict(
    comparison: Comparison, method: Method, against: Mapping[str, Contrast]
) -> Verdict:
    """Return the verdict on a method's fairness over the last five tested rounds."""
    conclusion = ""
    if not (against or method.fully_tested()):
        conclusion = "not compared, because some domains were not tested in every round"
    elif len(comparison.domains) < 2:
        conclusion = "not judged, because a single domain has no spread"
    elif not against:
        wanted = [title for name, title in BASELINES.items() if name != method.strategy]
        baselines = [comparison.baseline(method, name) for name in BASELINES]
        tested = all(baseline is None or baseline.fully_tested() for baseline in baselines)
        conclusion = (
            f"no {' or '.join(wanted)} run with the same settings, rounds and seeds"
            f"{'' if tested else ', tested on every domain,'} to compare with"
        )
    if conclusion:
        return Verdict(method.name, "", conclusion)
    rows = {name: contrast.by_metric for name, contrast in against.items()}
    worst = [f"{signed_in_unit(row[0])} against {name}" for name, row in rows.items()]
    std = [signed(row[1].difference, comparison.score.digits) for row in rows.values()]
    worse = [f"{name}'s" for name, row in rows.items() if row[2].sign < 0]
    numbers = f"worst domain {', '.join(worst)}, STD {' and '.join(std)}"
    where = "below" if comparison.score.better > 0 else "above"
    beside = f", with an average {where} {' and '.join(worse)}" if worse else ""
    return verdict_on(method.name, against, numbers, beside)


def verdict_on(
    name: str, contrasts: Mapping[str, Contrast], numbers: str = "", added: str = ""
) -> Verdict:
    """Return the verdict with a method's differences and the conclusion from its contrasts.

    The conclusion is, for example, ``fairer (STD) than FedAvg``; ``added`` follows it.
    """
    numbers = numbers or "; ".join(
        ", ".join(f"{o.metric.name} {signed(o.difference, o.metric.digits)}" for o in rows[:-1])
        + f"{', ' * bool(rows[:-1])}{rows[-1].metric.name} {signed_in_unit(rows[-1])}"
        + f" against {other}"
        for other, contrast in contrasts.items()
        for rows in [contrast.by_metric]
    )
    parts = []
    by_judgment = grouped((contrast.judgment, name) for name, contrast in contrasts.items())
    for (judgment, preposition), names in by_judgment.items():
        if judgment == UNDECIDED:
            names = [f"{other} (detectable: {contrasts[other].detectable})" for other in names]
        parts.append(f"{judgment} {preposition} {' and '.join(names)}")
    return Verdict(
        name,
        f"{numbers} ({pairs_text(contrasts.values())})",
        ", ".join(parts) + added,
        too_few_pairs(contrasts),
    )


def _of_group(group: ContrastGroup) -> Iterator[Verdict]:
    """Yield one verdict on the whole group: ``fairer (STD) with a, b; ...``."""
    by_judgment = grouped((one.judgment[0], name) for name, one in group.contrasts.items())
    conclusion = "; ".join(
        f"{judgment} with {', '.join(names)}" for judgment, names in by_judgment.items()
    )
    name = f"{group.heading} against {group.other}"
    yield Verdict(name, "", conclusion, too_few_pairs(group.contrasts))


def _of_each(group: ContrastGroup) -> Iterator[Verdict]:
    """Yield one verdict on each contrast of the group."""
    for name, contrast in group.contrasts.items():
        yield verdict_on(f"{group.heading}, {name}", {group.other: contrast})


def too_few_pairs(contrasts: Mapping[str, Contrast]) -> str:
    """Return the number of pairs if no contrast has enough for a verdict, else nothing."""
    few = all(contrast.n < MIN_PAIRS for contrast in contrasts.values())
    return pairs_text(contrasts.values()) if few else ""


def pairs_text(contrasts: Iterable[Contrast]) -> str:
    """Return the number of pairs: ``10 federations``, ``2 and 3 seeds of federation 0``."""
    compared = list(contrasts)
    counts = join_words(sorted({str(contrast.n) for contrast in compared}, key=int))
    noun, *federation = compared[0].unit.split(" ", 1)
    return " ".join([counts, f"{noun}{'' if counts == '1' else 's'}", *federation])


def signed(difference: MeanStd, digits: int = 2) -> str:
    """Format a difference with its sign and standard deviation.

    >>> signed(MeanStd(0.5, 0.25, 3)), signed(MeanStd(0.5, float("nan"), 1))
    ('+0.50 ± 0.25', '+0.50')
    """
    mean = format_number(difference.mean, digits, signed=True)
    return f"{mean} {format_std(difference.std, difference.n, digits)}".strip()


def signed_in_unit(one: MetricDifference) -> str:
    """Format a difference as `signed` does, with its unit."""
    return f"{signed(one.difference, one.metric.digits)} {one.metric.points}".strip()
