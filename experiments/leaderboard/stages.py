"""The runs of a leaderboard's design: their stages, their order, and the remaining runs.

The first stage, screening, tries every point of a method on the first tuning federation. The
finalists are a method's best points, which are tried on the other tuning federations. Both stages
use validation examples. The confirmation trains and tests with the chosen settings on the design's
federations. There, the reference is also tested with its other finalists, because all conclusions
depend on its settings. Sweeps vary the settings of a benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from experiments.leaderboard.design import Benchmark, Design, Sweep
from experiments.leaderboard.ledger import Ledger, Row, key_of, settings_of
from experiments.leaderboard.points import points, ranges
from fairflower.config import RunConfig
from fairflower.config.text import shown
from fairflower.numerics.metrics import WORST_HALF

#: The stages in their order.
STAGES = ("screening", "finalists", "confirmation", "reference", "sweep")
SCREENING, FINALISTS, CONFIRMATION, REFERENCE, SWEEP = STAGES


@dataclass(frozen=True)
class Planned:
    """A planned run of a leaderboard's design."""

    stage: str
    benchmark: str  # name
    method: str
    federation: int
    settings: str  # as in a row of the ledger
    config: RunConfig
    key: str


class Stages:
    """The runs of a design, and which of them are in a ledger."""

    def __init__(
        self, design: Design, ledger: Ledger, benchmarks: Sequence[str] | None = None
    ) -> None:
        self.design, self.ledger = design, ledger
        self.benchmarks = [b for b in design.benchmarks if not benchmarks or b.name in benchmarks]
        self.sweeps = [s for s in design.sweeps if s.benchmark in self.benchmarks]
        self.points = cache(self._points)
        self._planned, self._configs = cache(self._make_planned), cache(self._make_config)

    # --- points to try, and the chosen point -----------------------------------------------

    def _points(self, benchmark: Benchmark, method: str) -> list[dict[str, float]]:
        config = self.design.config(benchmark, method, self.design.tuned_on[0])
        return points(ranges(config), self.design.points, self.design.scrambling)

    def row(self, planned: Planned) -> Row | None:
        """Return the row of a run, or None if the run is not finished.

        Methods with equal settings share a run, which the row describes as planned.
        """
        row = self.ledger.rows.get(planned.key)
        return replace(row, method=planned.method, settings=planned.settings) if row else None

    def trials(self, benchmark: Benchmark, method: str, number: int) -> list[Planned]:
        """Return the trials of a point: one per tuning federation, in the federations' order."""
        return [
            self.screened(benchmark, method, number),
            *(
                self._planned(FINALISTS, benchmark, method, federation, number)
                for federation in self.design.tuned_on[1:]
            ),
        ]

    def screened(self, benchmark: Benchmark, method: str, number: int) -> Planned:
        """Return the trial of a point on the first tuning federation."""
        return self._planned(SCREENING, benchmark, method, self.design.tuned_on[0], number)

    def finalists(self, benchmark: Benchmark, method: str) -> list[int] | None:
        """Return the finalists, best first; None during screening."""
        scores = {}
        for number in range(self.design.points):
            row = self.row(self.screened(benchmark, method, number))
            if row is None:
                return None
            if row.completed:
                scores[number] = WORST_HALF(row.accuracies)
        return sorted(scores, key=lambda number: -scores[number])[: self.design.again]

    def chosen(self, benchmark: Benchmark, method: str) -> int | None:
        """Return the point with the highest mean over tuning federations; None if not known yet.

        A point with a lost run is not chosen. If every point has a lost run, return -1.
        """
        finalists = self.finalists(benchmark, method)
        if finalists is None:
            return None
        best, mean = -1, -math.inf
        for number in sorted(finalists):  # of equals the earlier point is taken
            rows = [self.row(trial) for trial in self.trials(benchmark, method, number)]
            if not all(rows):
                return None
            made = [row for row in rows if row and row.completed]
            value = sum(WORST_HALF(row.accuracies) for row in made) / len(rows)
            if len(made) == len(rows) and value > mean:
                best, mean = number, value
        return best

    def usable(self, benchmark: Benchmark, method: str) -> int | None:
        """Return the chosen point, or None if it is not known yet or no finalist completed."""
        number = self.chosen(benchmark, method)
        return None if number == -1 else number

    def never_completed(self, benchmark: Benchmark, methods: Iterable[str]) -> list[str]:
        """Return the methods of which no finalist completed all its trials."""
        return [method for method in methods if self.chosen(benchmark, method) == -1]

    # --- the runs of a stage ---------------------------------------------------------------

    def screening(self, benchmark: Benchmark, methods: Sequence[str]) -> Iterator[Planned]:
        """Yield the runs that try every point of every method."""
        for method in methods:
            for number in range(len(self.points(benchmark, method))):
                yield self.screened(benchmark, method, number)

    def finalist_runs(self, benchmark: Benchmark, methods: Sequence[str]) -> Iterator[Planned]:
        """Yield the runs of the finalists, once they are known, on the other tuning federations."""
        for method in methods:
            for number in self.finalists(benchmark, method) or ():
                yield from self.trials(benchmark, method, number)[1:]

    def confirmation(self, benchmark: Benchmark) -> Iterator[Planned]:
        """Yield runs with the chosen settings, by federation, so that pairs are complete early."""
        chosen = {method: self.usable(benchmark, method) for method in benchmark.confirmed}
        for federation in benchmark.federations:
            for method, number in chosen.items():
                if number is not None:
                    yield self._planned(CONFIRMATION, benchmark, method, federation, number)

    def references(self, benchmark: Benchmark) -> Iterator[Planned]:
        """Yield the reference's runs with its other finalists, finalist by finalist."""
        reference = self.design.reference
        chosen = self.usable(benchmark, reference)
        if chosen is None:
            return
        others = [n for n in self.finalists(benchmark, reference) or () if n != chosen]
        for number, federation in product(others, benchmark.federations):
            yield self._planned(REFERENCE, benchmark, reference, federation, number)

    def tuned(self, sweep: Sweep) -> bool:
        """Return whether all trials of a sweep's methods are finished, so its runs are known."""
        return all(self.chosen(sweep.benchmark, method) is not None for method in sweep.methods)

    def swept(self, sweep: Sweep) -> Iterator[tuple[str, Planned]]:
        """Yield the runs of a sweep that can be planned, each with the name of its variation."""
        chosen = {method: self.usable(sweep.benchmark, method) for method in sweep.methods}
        for name, place in sweep.places.items():
            for federation in sweep.federations:
                for method, number in chosen.items():
                    if number is not None:
                        key = (SWEEP, sweep.benchmark, method, federation, number)
                        yield name, self._planned(*key, tuple(place.items()))

    def planned(self) -> Iterator[Planned]:
        """Yield all runs that can be planned now. Those needed for conclusions come first."""
        for benchmark in self.benchmarks:
            yield from self.screening(benchmark, benchmark.confirmed)
            yield from self.finalist_runs(benchmark, benchmark.confirmed)
            yield from self.confirmation(benchmark)
            yield from self.references(benchmark)
        for sweep in self.sweeps:
            yield from (planned for _, planned in self.swept(sweep))
        for benchmark in self.benchmarks:
            others = [
                method for method in self.design.screened if method not in benchmark.confirmed
            ]
            yield from self.screening(benchmark, others)
            yield from self.finalist_runs(benchmark, others)

    def left(self) -> Iterator[Planned]:
        """Return the planned runs that have no row yet."""
        return (planned for planned in self.planned() if planned.key not in self.ledger.rows)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of runs for each stage and benchmark, as far as it is known.

        Runs without a result, such as those of a method that diverged in all trials, do not count.
        """
        design, again = self.design, min(self.design.again, self.design.points)
        counts = {}
        for benchmark in self.benchmarks:
            methods = dict.fromkeys((*benchmark.confirmed, *design.screened))
            counts[SCREENING, benchmark.name] = len(methods) * design.points
            finalists = {method: self.finalists(benchmark, method) for method in methods}
            tried = {m: again if best is None else len(best) for m, best in finalists.items()}
            counts[FINALISTS, benchmark.name] = sum(tried.values()) * (len(design.tuned_on) - 1)
            confirmed = self._able(benchmark, benchmark.confirmed)
            counts[CONFIRMATION, benchmark.name] = confirmed * len(benchmark.federations)
            able = self._able(benchmark, [design.reference])
            others = able * max(0, tried[design.reference] - 1)
            counts[REFERENCE, benchmark.name] = others * len(benchmark.federations)
        for sweep in self.sweeps:
            able = self._able(sweep.benchmark, sweep.methods)
            name = sweep.benchmark.name
            runs = len(sweep.places) * able * len(sweep.federations)
            counts[SWEEP, name] = counts.get((SWEEP, name), 0) + runs
        return counts

    def _able(self, benchmark: Benchmark, methods: Sequence[str]) -> int:
        return len(methods) - len(self.never_completed(benchmark, methods))

    def _make_planned(
        self,
        stage: str,
        benchmark: Benchmark,
        method: str,
        federation: int,
        number: int,
        varied: tuple[tuple[str, Any], ...] = (),
    ) -> Planned:
        on_test = stage in (CONFIRMATION, REFERENCE, SWEEP)
        settings = {**self.points(benchmark, method)[number], **dict(varied)}
        config, others = self._configs(benchmark, method, on_test, tuple(settings.items()))
        config = replace(config, seed=federation, data=replace(config.data, seed=federation))
        told = " ".join(f"{key}={shown(value)}" for key, value in settings.items())
        key = key_of(config, others)
        return Planned(stage, benchmark.name, method, federation, told, config, key)

    def _make_config(
        self,
        benchmark: Benchmark,
        method: str,
        on_test: bool,
        settings: tuple[tuple[str, Any], ...],
    ) -> tuple[RunConfig, frozenset[tuple[str, str]]]:
        """Return the config of runs that differ only in their federation, and `settings_of` it."""
        flat = {**dict(settings), "evaluate.test": on_test}
        # Early stopping needs the validation examples that it had when the settings were chosen.
        if on_test and not {**benchmark.settings, **flat}.get("stop.patience"):
            flat["data.validation-examples"] = 0
        config = self.design.config(benchmark, method, self.design.tuned_on[0], **flat)
        return config, settings_of(config)
