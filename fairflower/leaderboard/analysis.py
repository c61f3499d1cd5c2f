"""Differences between a leaderboard's methods, judged in families."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import fmean

import numpy as np

from fairflower.leaderboard.design import Benchmark, Design, Sweep
from fairflower.leaderboard.ledger import Row
from fairflower.leaderboard.stages import HALF, SWEEP, Stages, worst_half
from fairflower.numerics.metrics import AVG, MIN, STD0
from fairflower.server.history import WINDOW
from fairflower.statistics.differences import (
    Difference,
    MeanStd,
    difference_of,
    differences,
    judged_as_family,
)

#: Method -> federation -> accuracies in percent, by domain.
Accuracies = Mapping[str, Mapping[int, Sequence[float]]]

#: Size of the largest test set that `examples_tested` can infer.
_MOST_EXAMPLES = 4000


@dataclass(frozen=True)
class Metric:
    """A metric of the domains' accuracies, in points, with its equivalence margin."""

    title: str
    value: Callable[[Sequence[float]], float]
    margin: float
    better: int = 1  # -1 if lower is better
    #: Function of the accuracies that returns the domains that the metric averages, for its
    #: sampling error.
    of: Callable[[Sequence[float]], Sequence[int]] | None = None


def worst_places(accuracies: Sequence[float], count: int) -> list[int]:
    """Return the positions of the ``count`` lowest accuracies."""
    return [int(place) for place in np.argsort(accuracies, kind="stable")[:count]]


def primary(design: Design) -> Metric:
    """Return the primary metric, from which conclusions are drawn."""
    return Metric(
        "worst half",
        worst_half,
        design.margins.worst,
        of=lambda a: worst_places(a, max(1, int(HALF * len(a)))),
    )


def secondary(design: Design, domains: Sequence[str]) -> list[Metric]:
    """Return the other metrics: worst domain, average, STD (ddof 0), and each domain's accuracy."""
    margins = design.margins
    outcomes = [
        Metric(MIN.phrase, MIN, margins.worst, of=lambda a: worst_places(a, 1)),
        Metric(AVG.phrase, AVG, margins.average, of=lambda a: range(len(a))),
        Metric(STD0.heading, STD0, margins.std, better=STD0.better),
    ]
    for place, name in enumerate(domains):
        outcomes.append(
            Metric(
                name,
                lambda a, place=place: a[place],  # type: ignore[misc]
                margins.worst,
                of=lambda _, place=place: [place],  # type: ignore[misc]
            )
        )
    return outcomes


class Findings:
    """Differences between methods in the confirmation and the sweeps of a design.

    A benchmark or a sweep is judged only when all its runs are finished, because testing a
    difference after each run would give too many false positives.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages, self.design = stages, stages.design
        self.judged = cache(self._judged_primary)

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The rows of the confirmation's planned runs, for each benchmark."""
        stages = self.stages
        return {
            benchmark.name: [
                row for run in stages.confirmation(benchmark) if (row := stages.row(run))
            ]
            for benchmark in stages.benchmarks
        }

    @cached_property
    def benchmarks(self) -> list[Benchmark]:
        """The finished benchmarks on which a method can be compared with the reference."""
        return [b for b in self.stages.benchmarks if not self.left(b) and self.judged(b)]

    def left(self, benchmark: Benchmark) -> int:
        """Return the number of remaining runs in a benchmark's confirmation."""
        methods = len(benchmark.confirmed) - len(self.never_completed(benchmark))
        return methods * len(benchmark.federations) - len(self.rows[benchmark.name])

    def never_completed(self, benchmark: Benchmark) -> list[str]:
        """Return the methods that are not confirmed, because no finalist completed all trials."""
        return self.stages.never_completed(benchmark, benchmark.confirmed)

    def earlier_margins(self, benchmark: Benchmark) -> list[str]:
        """Return margins that differ from the design's and were set when runs were confirmed."""
        recorded = {row.margins for row in self.rows[benchmark.name] if row.margins}
        return sorted(recorded - {str(self.design.margins)})

    def domains(self, benchmark: Benchmark) -> list[str]:
        """Return the names of a benchmark's domains in the order of the accuracies."""
        return self.rows[benchmark.name][0].domain_names

    def figures(self, benchmark: Benchmark) -> Accuracies:
        """Return the accuracies of every confirmed method."""
        return _accuracies((row.method, row.federation, row) for row in self.rows[benchmark.name])

    def hours(self, benchmark: Benchmark) -> float:
        """Return the hours that a benchmark's trials and confirmation took."""
        rows = self.stages.ledger.rows.values()
        of = (row for row in rows if row.benchmark == benchmark.name and row.stage != SWEEP)
        return sum(row.seconds for row in of) / 3600

    def lost(self, benchmark: Benchmark) -> list[Row]:
        """Return the confirmation runs that diverged or were not fully tested. Means omit them."""
        return [row for row in self.rows[benchmark.name] if row.outcome != "completed"]

    def lost_in_sweep(self, sweep: Sweep) -> Counter[tuple[str, str]]:
        """Return the number of lost runs for each variation and method of a sweep that has any."""
        rows = ((place, self.stages.row(run)) for place, run in self.stages.swept(sweep))
        return Counter((p, row.method) for p, row in rows if row and row.outcome != "completed")

    def _judged_primary(self, benchmark: Benchmark) -> dict[str, Difference]:
        """Return all methods' differences from the reference in the primary metric, as a family."""
        if not self.rows[benchmark.name]:
            return {}
        measure = primary(self.design)
        judged = self._judged(self.figures(benchmark), [measure], benchmark.overlap)
        return {method: difference for (_, method), difference in judged.items()}

    def secondary(self, benchmark: Benchmark) -> dict[tuple[str, str], Difference]:
        """Return the family of differences in all other metrics, by metric and method."""
        measures = secondary(self.design, self.domains(benchmark))
        return self._judged(self.figures(benchmark), measures, benchmark.overlap)

    def against(self, benchmark: Benchmark, method: str, other: str) -> Difference | None:
        """Return a method's difference from another in the primary metric, as a single test."""
        figures = {m: f for m, f in self.figures(benchmark).items() if m in (method, other)}
        judged = self._judged(figures, [primary(self.design)], benchmark.overlap, other)
        return next(iter(judged.values()), None)

    def on_benchmarks(self) -> dict[str, list[float]]:
        """Return each method's mean gains on the finished benchmarks, if it is judged on all."""
        by_benchmark = [self.judged(benchmark) for benchmark in self.benchmarks]
        shared = [m for m in by_benchmark[0] if all(m in judged for judged in by_benchmark)]
        return {method: [judged[method].mean for judged in by_benchmark] for method in shared}

    def swept(self, sweep: Sweep) -> dict[tuple[str, str], Difference]:
        """Return the differences from the reference by variation and method, as a single family.

        The result is empty if the sweep has remaining runs.
        """
        rows: dict[str, list[tuple[str, int, Row]]] = defaultdict(list)
        for place, planned in self.stages.swept(sweep):
            row = self.stages.row(planned)
            if row is None:
                return {}
            rows[place].append((row.method, row.federation, row))
        judged: dict[tuple[str, str], Difference] = {}
        for place, members in rows.items():
            alone = self._alone(
                *(_accuracies(members), [primary(self.design)]),
                *(sweep.benchmark.overlap, self.design.reference),
            )
            judged |= {(place, method): difference for (_, method), difference in alone.items()}
        return judged_as_family(judged)

    def _judged(
        self, figures: Accuracies, measures: Sequence[Metric], overlap: float, other: str = ""
    ) -> dict[tuple[str, str], Difference]:
        return judged_as_family(
            self._alone(figures, measures, overlap, other or self.design.reference)
        )

    def _alone(
        self, figures: Accuracies, measures: Sequence[Metric], overlap: float, other: str
    ) -> dict[tuple[str, str], Difference]:
        """Return differences by metric and method, with variances moderated across methods."""
        alone = {}
        examples = examples_tested(figures)
        for measure in measures:
            pairs = _pairs(figures, measure, other)
            floors = {method: _floor(figures, measure, examples, method, other) for method in pairs}
            for method, difference in differences(pairs, measure.margin, floors).items():
                alone[measure.title, method] = _redrawn(difference, overlap)
        return alone


def _accuracies(rows: Iterable[tuple[str, int, Row]]) -> Accuracies:
    accuracies: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for method, federation, row in rows:
        if row.outcome == "completed":
            accuracies[method][federation] = [100 * value for value in row.accuracies]
    return accuracies


def _pairs(figures: Accuracies, measure: Metric, other: str) -> dict[str, list[float]]:
    theirs = {f: measure.value(a) for f, a in figures.get(other, {}).items()}
    pairs_by_method = {
        method: [
            measure.value(a) - theirs[f] for f, a in sorted(by_federation.items()) if f in theirs
        ]
        for method, by_federation in figures.items()
        if method != other
    }
    return {method: pairs for method, pairs in pairs_by_method.items() if pairs}


def _redrawn(difference: Difference, overlap: float) -> Difference:
    """Return the mean difference with Nadeau and Bengio's variance, (1 / n + overlap) s^2."""
    if not overlap:
        return difference
    error = difference.error * math.sqrt(1 + difference.n * overlap)
    return difference_of(
        MeanStd(difference.mean, difference.std, difference.n),
        error,
        difference.df,
        difference.margin,
    )


def examples_tested(figures: Accuracies) -> list[int]:
    """Return the number n of test examples of each domain, inferred from accuracies; 0 if unknown.

    An accuracy is a mean of `WINDOW` tests, stored with six digits, so it is a multiple of 1 / (5
    n). If a domain's accuracies are all 0 or 1, they tell nothing about n.
    """
    rows = [
        accuracies for by_federation in figures.values() for accuracies in by_federation.values()
    ]
    if len(rows) < WINDOW:
        return [0] * (len(rows[0]) if rows else 0)
    found = []
    for values in np.array(rows).T / 100:
        sizes = np.arange(1, _MOST_EXAMPLES + 1)
        counts = values[:, None] * WINDOW * sizes
        fits = (np.abs(counts - np.rint(counts)) < 0.02).all(axis=0)
        known = fits.any() and bool(np.any(values % 1))
        found.append(int(sizes[fits][0]) if known else 0)
    return found


def _floor(
    figures: Accuracies, measure: Metric, examples: Sequence[int], method: str, other: str
) -> tuple[float, float]:
    """Return a metric's change due to one test example, and its std due to sampling."""
    if measure.of is None or not examples or not all(examples):
        return 0.0, 0.0
    worth, variances = [], []
    for name in (method, other):
        for accuracies in figures[name].values():
            places = measure.of(accuracies)
            worth.append(fmean(100 / examples[k] for k in places) / len(places))
            variances.append(
                sum(accuracies[k] * (100 - accuracies[k]) / examples[k] for k in places)
                / len(places) ** 2
            )
    return fmean(worth), math.sqrt(2 * fmean(variances))
