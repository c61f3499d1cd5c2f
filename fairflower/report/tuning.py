"""What was tried to tune methods on validation images, and what was chosen: its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fairflower.arguments import Search
from fairflower.config import shown
from fairflower.numerics.metrics import AVG, MIN, Summary
from fairflower.report.measures import SIGMA
from fairflower.report.methods import MeanStd
from fairflower.report.tables.cells import Cell, Group, Row, Table, judged_cell
from fairflower.report.text import DASH, format_number

#: What is better among trials -> in words. See `chosen`.
CRITERIA = {
    "worst": f"the highest {MIN.phrase}",
    "average": f"the highest {AVG.phrase} over domains",
    "worst-then-average": "the highest average over domains, of trials whose worst domain is "
    "within one point of the highest",
}

#: What it is of -> in words.
METRICS = {"accuracy": "accuracy", "balanced_accuracy": "class-balanced accuracy"}

Outcome = Literal["completed", "pruned", "lost", "unfinished"]

#: How far, as a fraction, worst domains count as equal before averages decide.
_ALIKE = 0.01


@dataclass(frozen=True)
class Trial:
    """One of a method's trials."""

    number: int  # from 0: the paper's values
    values: Mapping[str, float]  # of the run config keys that were searched
    outcome: Outcome
    accuracies: tuple[float, ...] = ()  # by domain, fractions: the mean of its last rounds
    reason: str = ""  # why it did not end

    def percent(self, row: Summary) -> float:
        """A summary over domains, in percent."""
        return 100 * row(self.accuracies)


#: What the table and the figure of trials show.
SHOWN = (MIN, AVG)


@dataclass(frozen=True)
class Tuned:
    """A method's trials, with the ranges that they were drawn from."""

    method: str
    ranges: Mapping[str, Search]
    trials: tuple[Trial, ...]
    select: str
    metric: str = "accuracy"  # one of `METRICS`

    @cached_property
    def completed(self) -> list[Trial]:
        """The trials that can be chosen."""
        return [trial for trial in self.trials if trial.outcome == "completed"]

    @property
    def chosen(self) -> Trial | None:
        """The best trial; None if all were lost."""
        return chosen(self.completed, self.select)

    def count(self, outcome: str) -> int:
        """How many trials ended so."""
        return sum(trial.outcome == outcome for trial in self.trials)


def chosen(trials: Sequence[Trial], select: str) -> Trial | None:
    """The best of completed trials by a criterion; of equal ones the first."""
    if not trials:
        return None
    if select == "worst":
        return max(trials, key=lambda trial: MIN(trial.accuracies))
    if select == "worst-then-average":
        best = max(MIN(trial.accuracies) for trial in trials)
        least = best - _ALIKE - 1e-9  # as 0.0175 - 0.01 > 0.0075
        trials = [trial for trial in trials if MIN(trial.accuracies) >= least]
    return max(trials, key=lambda trial: AVG(trial.accuracies))


def tuning_tables(tuned: Sequence[Tuned]) -> list[Table]:
    """The trials of every method, and the ranges with what was chosen in each."""
    if not tuned:
        return []
    ranges = Table(
        title="Ranges and chosen values",
        caption="The paper's values are the method's defaults; of training, the settings'.",
        columns=["range", "the paper's", "chosen"],
        groups=[
            Group(one.method, [_range(one, key, search) for key, search in one.ranges.items()])
            for one in tuned
            if one.ranges
        ],
    )
    return [_trials(tuned), *([ranges] if ranges.groups else [])]


def _trials(tuned: Sequence[Tuned]) -> Table:
    first = tuned[0]
    return Table(
        title=f"Tuning: {METRICS[first.metric]} on validation images",
        caption=(
            "In %, the mean of the last five tested rounds. Over trials: the mean, and under it ± "
            f"{SIGMA} (ddof 1), of the completed ones. Chosen: {CRITERIA[first.select]}. Every "
            "method has the same budget; one without anything to tune needs but one trial. Pruned "
            "and lost trials count."
        ),
        columns=[
            *("trials", "pruned", "lost"),
            *(f"{what} {row.title}" for row in SHOWN for what in _SEEN),
        ],
        groups=[Group("", [_row(one) for one in tuned])],
        footers=[
            f"{one.method}, trial {trial.number} ({values(trial)}) is lost: {trial.reason}"
            for one in tuned
            for trial in one.trials
            if trial.outcome == "lost"
        ],
    )


_SEEN = ("paper's", "chosen", "over-trials")


def _row(one: Tuned) -> Row:
    counts = [Cell(str(n)) for n in (len(one.trials), one.count("pruned"), one.count("lost"))]
    cells = []
    for row in SHOWN:
        default = next((t for t in one.completed if t.number == 0), None)
        for trial in (default, one.chosen):
            cells.append(Cell(DASH if trial is None else format_number(trial.percent(row))))
        if one.completed:
            cells.append(
                judged_cell(MeanStd.of([trial.percent(row) for trial in one.completed]), 0)
            )
        else:
            cells.append(Cell(DASH))
    return Row(one.method, "" if one.ranges else "nothing to tune", [*counts, *cells])


def _range(one: Tuned, key: str, search: Search) -> Row:
    best = one.chosen
    chosen_values = [one.trials[0].values[key], None if best is None else best.values[key]]
    cells = [Cell(DASH if value is None else shown(value)) for value in chosen_values]
    return Row(key, "", [Cell(str(search)), *cells])


def values(trial: Trial) -> str:
    """What was tried in a trial, as ``strategy.tau = 0.3``; ``defaults`` if nothing was."""
    return ", ".join(f"{key} = {shown(v)}" for key, v in trial.values.items()) or "defaults"
