"""Differences between a leaderboard's methods, judged in families."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain
from statistics import fmean

import numpy as np

from experiments.leaderboard.benchmarks import mixed_model, over_benchmarks
from experiments.leaderboard.design import Benchmark, Design, Sweep
from experiments.leaderboard.ledger import Row
from experiments.leaderboard.points import LR
from experiments.leaderboard.stages import Stages
from fairflower.numerics.metrics import AVG, MIN, STD0, WORST_HALF, Summary
from fairflower.numerics.scores import ACCURACY
from fairflower.registry import REFERENCES
from fairflower.server.history import WINDOW
from fairflower.statistics import (
    MIN_PAIRS,
    Difference,
    differences,
    example_worth,
    judged_as_family,
    redrawn,
)

#: Method -> federation -> accuracies in percent, by domain.
Accuracies = Mapping[str, Mapping[int, Sequence[float]]]

#: Size of the largest test set that `examples_tested` can infer.
_MOST_EXAMPLES = 4000


def primary(design: Design) -> Summary:
    """Return the primary metric, from which conclusions are drawn."""
    return replace(WORST_HALF, margin=design.margins.worst)


def secondary(design: Design, domains: Sequence[str]) -> list[Summary]:
    """Return the other metrics: worst domain, average, STD (ddof 0), and each domain's accuracy."""
    margins = design.margins
    return [
        replace(MIN, title=MIN.phrase, margin=margins.worst),
        replace(AVG, title=AVG.phrase, margin=margins.average),
        replace(STD0, title=STD0.heading, margin=margins.std),
        *(_domain(name, place, len(domains), margins.worst) for place, name in enumerate(domains)),
    ]


def _domain(name: str, place: int, count: int, margin: float) -> Summary:
    """Return the accuracy of one of ``count`` domains as a summary."""
    slopes = np.eye(count)[place]
    return Summary(
        name,
        margin=margin,
        formula=lambda a: float(np.asarray(a)[place]),
        gradient=lambda _: slopes,
    )


class Findings:
    """Differences between methods in the confirmation and the sweeps of a design.

    A benchmark, a sweep, or the mean over benchmarks is judged only when all its runs are finished,
    because testing a difference after each run would give too many false positives.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages, self.design = stages, stages.design
        self.judged = cache(self._judged_primary)
        self.other_references = cache(self._judged_again)

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

    def accuracies(self, benchmark: Benchmark) -> Accuracies:
        """Return the accuracies of every confirmed method."""
        return _accuracies(self.rows[benchmark.name])

    def hours(self, benchmark: Benchmark) -> float:
        """Return the core-hours of a benchmark's runs: trials, confirmation and references."""
        stages, methods = self.stages, benchmark.confirmed
        planned = chain(
            stages.screening(benchmark, methods),
            stages.finalist_runs(benchmark, methods),
            stages.references(benchmark),
        )
        rows = (row for run in planned if (row := stages.row(run)))
        return sum(row.seconds for row in chain(rows, self.rows[benchmark.name])) / 3600

    def validated(self, benchmark: Benchmark, method: str) -> float | None:
        """Return the chosen settings' mean primary metric over trials, in percent, or None.

        Trials are tested on validation examples. None: not tuned yet, or nothing was chosen.
        """
        number = self.stages.usable(benchmark, method)
        if number is None:
            return None
        trials = self.stages.trials(benchmark, method, number)
        return fmean(
            ACCURACY.shown(primary(self.design)(row.accuracies))
            for trial in trials
            if (row := self.stages.row(trial))
        )

    def on_other_processors(self, benchmark: Benchmark) -> Counter[str]:
        """Return how many of a method's runs are on another kind of processor than its pair's."""
        reference = self.design.reference
        completed = [row for row in self.rows[benchmark.name] if row.completed]
        kinds = {row.federation: row.processor for row in completed if row.method == reference}
        return Counter(
            row.method
            for row in completed
            if row.processor != kinds.get(row.federation, row.processor)
        )

    def lost(self, benchmark: Benchmark) -> list[Row]:
        """Return the confirmation runs that diverged or were not fully tested. Means omit them."""
        return [row for row in self.rows[benchmark.name] if not row.completed]

    def diverged(self, benchmark: Benchmark) -> list[Row]:
        """Return the completed confirmation runs whose loss was very large at the end."""
        return [row for row in self.rows[benchmark.name] if row.completed and row.reason]

    def lost_in_sweep(self, sweep: Sweep) -> Counter[tuple[str, str]]:
        """Return the number of lost runs for each variation and method of a sweep that has any."""
        rows = ((place, self.stages.row(run)) for place, run in self.stages.swept(sweep))
        return Counter((p, row.method) for p, row in rows if row and not row.completed)

    def _judged_primary(self, benchmark: Benchmark) -> dict[str, Difference]:
        """Return all methods' differences from the reference in the primary metric, as a family."""
        return self.judged_rows(benchmark, self.rows[benchmark.name])

    def judged_rows(self, benchmark: Benchmark, rows: Sequence[Row]) -> dict[str, Difference]:
        """Return the differences of rows' methods from the reference as `judged` does."""
        judged = self._judged(_accuracies(rows), [primary(self.design)], benchmark.overlap)
        return {method: difference for (_, method), difference in judged.items()}

    def _judged_again(self, benchmark: Benchmark) -> dict[str, dict[str, Difference]]:
        """Return `judged` against the reference with its other finalists, by their settings.

        The result is empty if runs remain.
        """
        runs = [*self.stages.references(benchmark)]
        reference_rows = [row for run in runs if (row := self.stages.row(run))]
        if len(reference_rows) < len(runs):
            return {}
        reference = self.design.reference
        others = [row for row in self.rows[benchmark.name] if row.method != reference]
        judged = {}
        for settings in dict.fromkeys(row.settings for row in reference_rows):
            rows = [*others, *(row for row in reference_rows if row.settings == settings)]
            judged[settings] = self.judged_rows(benchmark, rows)
        return judged

    def at_largest_rate(self, benchmark: Benchmark) -> list[str]:
        """Return the methods for which tuning chose the largest learning rate that it tried."""
        highest = []
        for method in benchmark.confirmed:
            number = self.stages.usable(benchmark, method)
            rates = [point[LR] for point in self.stages.points(benchmark, method)]
            if number is not None and rates[number] == max(rates):
                highest.append(method)
        return highest

    def judged_secondary(self, benchmark: Benchmark) -> dict[tuple[str, str], Difference]:
        """Return the family of differences in all other metrics, by metric and method."""
        measures = secondary(self.design, self.domains(benchmark))
        return self._judged(self.accuracies(benchmark), measures, benchmark.overlap)

    def of_references(self, benchmark: Benchmark) -> dict[tuple[str, str], float]:
        """Return the mean differences of ``alone`` and ``pooled``, by metric and reference.

        They belong to no family: a reference does not compete with the methods.
        """
        accuracies, other = self.accuracies(benchmark), self.design.reference
        return {
            (metric.title, name): fmean(pairs)
            for metric in (primary(self.design), *secondary(self.design, self.domains(benchmark)))
            for name, pairs in _pairs(accuracies, metric, other).items()
            if name in REFERENCES
        }

    def against(
        self, benchmark: Benchmark, method: str, other: str, metric: Summary | None = None
    ) -> Difference | None:
        """Return a method's difference from another as a single test, by default in `primary`."""
        both = {m: a for m, a in self.accuracies(benchmark).items() if m in (method, other)}
        metrics = [metric or primary(self.design)]
        judged = self._judged(both, metrics, benchmark.overlap, other)
        return next(iter(judged.values()), None)

    @cached_property
    def sources(self) -> dict[str, list[Benchmark]]:
        """The finished benchmarks by the people or images that they have in common."""
        by_source: dict[str, list[Benchmark]] = {}
        for benchmark in self.benchmarks:
            by_source.setdefault(benchmark.same_data or benchmark.name, []).append(benchmark)
        return by_source

    def over_sources(
        self, instead: Mapping[str, Mapping[str, Difference]] | None = None
    ) -> dict[str, list[float]]:
        """Return each method's mean gain for each of `sources`, if all benchmarks judge it.

        The gains on benchmarks with the same data are averaged, because they are not independent.
        ``instead`` maps benchmarks' names to differences that replace `judged`.
        """
        judged = {b.name: self.judged(b) for b in self.benchmarks} | dict(instead or {})
        methods = dict.fromkeys(chain.from_iterable(judged.values()))
        return {
            method: [fmean(judged[b.name][method].mean for b in of) for of in self.sources.values()]
            for method in methods
            if all(method in by and by[method].n >= MIN_PAIRS for by in judged.values())
        }

    @cached_property
    def judged_over_benchmarks(self) -> dict[str, Difference]:
        """Each method's mean gain over `sources`, judged as a family."""
        return over_benchmarks(self.over_sources(), primary(self.design).margin)

    @cached_property
    def over_by_mixed_model(self) -> dict[str, Difference]:
        """The same as `judged_over_benchmarks`, judged by a mixed model."""
        return mixed_model(self.over_sources(), primary(self.design).margin)

    @cached_property
    def over_with_other_references(self) -> dict[str, dict[str, Difference]]:
        """`judged_over_benchmarks` with another finalist as reference, by its benchmark."""
        margin = primary(self.design).margin
        return {
            f"{benchmark.name}, {settings}": over_benchmarks(
                self.over_sources({benchmark.name: family}), margin
            )
            for benchmark in self.benchmarks
            for settings, family in self.other_references(benchmark).items()
        }

    def references_left(self) -> int:
        """Return how many runs remain of the reference's other finalists, on all benchmarks."""
        runs = (run for b in self.stages.benchmarks for run in self.stages.references(b))
        return sum(self.stages.row(run) is None for run in runs)

    def swept(self, sweep: Sweep) -> dict[tuple[str, str], Difference]:
        """Return the differences from the reference by variation and method, as a single family.

        The result is empty if the sweep, or the tuning of one of its methods, has remaining runs.
        """
        return judged_as_family(self.swept_alone(sweep))

    def swept_alone(self, sweep: Sweep) -> dict[tuple[str, str], Difference]:
        """Return the same before the correction for several tests."""
        if not self.stages.tuned(sweep):
            return {}
        rows: dict[str, list[Row]] = defaultdict(list)
        for place, planned in self.stages.swept(sweep):
            row = self.stages.row(planned)
            if row is None:
                return {}
            rows[place].append(row)
        judged: dict[tuple[str, str], Difference] = {}
        metrics, overlap = [primary(self.design)], sweep.benchmark.overlap
        for place, members in rows.items():
            alone = self._alone(_accuracies(members), metrics, overlap, self.design.reference)
            judged |= {(place, method): difference for (_, method), difference in alone.items()}
        return judged

    def _judged(
        self, accuracies: Accuracies, metrics: Sequence[Summary], overlap: float, other: str = ""
    ) -> dict[tuple[str, str], Difference]:
        return judged_as_family(
            self._alone(accuracies, metrics, overlap, other or self.design.reference)
        )

    def _alone(
        self, accuracies: Accuracies, metrics: Sequence[Summary], overlap: float, other: str
    ) -> dict[tuple[str, str], Difference]:
        """Return differences by metric and method, with variances moderated across methods."""
        alone = {}
        accuracies = {name: a for name, a in accuracies.items() if name not in REFERENCES}
        examples = examples_tested(accuracies)
        for metric in metrics:
            pairs = _pairs(accuracies, metric, other)
            floors = {
                method: _floor(metric, examples, accuracies[method], accuracies[other])
                for method in pairs
            }
            for method, difference in differences(pairs, metric.margin, floors).items():
                alone[metric.title, method] = redrawn(difference, overlap)
        return alone


def _accuracies(rows: Iterable[Row]) -> Accuracies:
    accuracies: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for row in rows:
        if row.completed:
            accuracies[row.method][row.federation] = [
                ACCURACY.shown(value) for value in row.accuracies
            ]
    return accuracies


def _pairs(accuracies: Accuracies, metric: Summary, other: str) -> dict[str, list[float]]:
    theirs = {f: metric(a) for f, a in accuracies.get(other, {}).items()}
    pairs_by_method = {
        method: [metric(a) - theirs[f] for f, a in sorted(by_federation.items()) if f in theirs]
        for method, by_federation in accuracies.items()
        if method != other
    }
    return {method: pairs for method, pairs in pairs_by_method.items() if pairs}


def examples_tested(by_method: Accuracies) -> list[int]:
    """Return the number n of test examples of each domain, inferred from accuracies; 0 if unknown.

    An accuracy is a mean of `WINDOW` tests, stored with six digits, so it is a multiple of 1 / (5
    n). If a domain's accuracies are all 0 or 1, they tell nothing about n. With fewer tests the
    result is too small, and `_floor` too large.
    """
    rows = [
        accuracies for by_federation in by_method.values() for accuracies in by_federation.values()
    ]
    if len(rows) < WINDOW:
        return [0] * (len(rows[0]) if rows else 0)
    found = []
    for values in np.array(rows).T / 100:
        sizes = np.arange(1, _MOST_EXAMPLES + 1)
        for value in values:
            counts = value * WINDOW * sizes
            sizes = sizes[np.abs(counts - np.rint(counts)) < 0.02]
        known = sizes.size and bool(np.any(values % 1))
        found.append(int(sizes[0]) if known else 0)
    return found


def _floor(
    metric: Summary, examples: Sequence[int], *by_federation: Mapping[int, Sequence[float]]
) -> float:
    """Return a metric's `example_worth` in points; 0 if it is unknown."""
    gradient = metric.gradient
    if gradient is None or not examples or not all(examples):
        return 0.0
    rows = chain.from_iterable(accuracies.values() for accuracies in by_federation)
    return fmean(example_worth(ACCURACY.shown(gradient(np.array(row))), examples) for row in rows)
