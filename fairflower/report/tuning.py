"""Tables of tuning: the trials of each method on validation examples, and the chosen values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fairflower.arguments import Search
from fairflower.config.text import counted, shown
from fairflower.numerics.metrics import Summary, over_domains
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.report.cells import (
    DASH,
    Cell,
    Group,
    Row,
    Table,
    capitalized,
    format_number,
    judged_cell,
)
from fairflower.report.contrasts import SIGMA
from fairflower.statistics import MeanStd

#: Criterion for choosing a trial -> words for captions (see `chosen`).
CRITERIA = {
    "worst": "the {best} worst domain",
    "average": "the {best} average over domains",
    "worst-then-average": "the {best} average over domains, among trials whose worst domain is "
    "at most {alike} the {best}",
}

Outcome = Literal["completed", "lost", "unfinished"]

#: Maximum difference of worst domains for which the averages decide: as a fraction or, of a score
#: that is none, relative to the best of them.
_ALIKE = 0.01


@dataclass(frozen=True)
class Trial:
    """A trial of a method."""

    number: int  # from 0: the paper's values
    values: Mapping[str, float]  # by tuned run config key
    outcome: Outcome
    scores: tuple[float, ...] = ()  # by domain, in base units: means over the last rounds
    reason: str = ""  # of a lost trial

    @property
    def completed(self) -> bool:
        """Whether the trial was completed, so that it can be chosen."""
        return self.outcome == "completed"

    @property
    def settings(self) -> str:
        """The values, like ``strategy.tau = 0.3``, or ``defaults`` if none is tuned."""
        return ", ".join(f"{key} = {shown(v)}" for key, v in self.values.items()) or "defaults"

    def shown(self, row: Summary) -> float:
        """Return a summary over domains, in its unit."""
        return row.shown(row(self.scores))


def shown_rows(metric: Score) -> tuple[Summary, Summary]:
    """Return the summaries over domains that the table and the figure of trials show."""
    return over_domains(metric).worst, over_domains(metric).average


def criterion(select: str, metric: Score) -> str:
    """Return a criterion in words.

    >>> criterion("worst-then-average", Score("mae", -1, "days")).partition("whose ")[2]
    'worst domain is at most 1 % above the lowest'
    """
    unit = "point" if metric.unit == "%" else "%"
    best, side = ("highest", "below") if metric.better > 0 else ("lowest", "above")
    return CRITERIA[select].format(best=best, alike=f"1 {unit} {side}")


@dataclass(frozen=True)
class Tuned:
    """The trials of a method, and the ranges of its tuned arguments."""

    method: str
    ranges: Mapping[str, Search]
    trials: tuple[Trial, ...]
    select: str
    metric: Score = ACCURACY

    @cached_property
    def completed(self) -> list[Trial]:
        """The completed trials. Only these can be chosen."""
        return [trial for trial in self.trials if trial.completed]

    @property
    def chosen(self) -> Trial | None:
        """The best completed trial; None if no trial is completed."""
        return chosen(self.completed, self.select, self.metric)

    def count(self, outcome: str) -> int:
        """Return the number of trials that have this outcome."""
        return sum(trial.outcome == outcome for trial in self.trials)


def chosen(trials: Sequence[Trial], select: str, metric: Score = ACCURACY) -> Trial | None:
    """Return the best completed trial by a criterion, or the first of several equal trials."""
    if not trials:
        return None
    sign = metric.better
    average, worst, _, _ = over_domains(metric)
    if select == "worst":
        return max(trials, key=lambda trial: sign * worst(trial.scores))
    if select == "worst-then-average":
        best = max(sign * worst(trial.scores) for trial in trials)
        alike = _ALIKE if metric.unit == "%" else _ALIKE * abs(best)
        least = best - alike - 1e-9  # as 0.0175 - 0.01 > 0.0075
        trials = [trial for trial in trials if sign * worst(trial.scores) >= least]
    return max(trials, key=lambda trial: sign * average(trial.scores))


def tuning_tables(tuned: Sequence[Tuned]) -> list[Table]:
    """Return the table of trials, and the table of ranges with the chosen values."""
    if not tuned:
        return []
    ranges = Table(
        title="Ranges and chosen values",
        caption="The paper's value is the default of the method's argument, or the value of the "
        "setting (train.lr, server.lr and others) without tuning.",
        columns=["range", "the paper's", "chosen"],
        groups=[
            Group(
                method.method,
                [_range(method, key, search) for key, search in method.ranges.items()],
            )
            for method in tuned
            if method.ranges
        ],
    )
    return [_trials(tuned), *([ranges] if ranges.groups else [])]


def _trials(tuned: Sequence[Tuned]) -> Table:
    first, metric = tuned[0], tuned[0].metric
    lead = "In %, mean" if metric.like_accuracy else f"{metric.stated}. Mean"
    return Table(
        title=f"Tuning: {metric.phrase} on validation examples",
        caption=(
            f"{capitalized(lead)} of the last five tested rounds (of all, if fewer). Over "
            f"trials: mean and, below it, ± {SIGMA} (ddof 1) of completed trials. "
            f"Chosen: {criterion(first.select, metric)}. "
            "Every method has the same number of trials, including lost trials; a method without "
            "tuned arguments has a single trial."
        ),
        columns=[
            *("trials", "lost"),
            *(f"{what} {row.title}" for row in shown_rows(metric) for what in _SEEN),
        ],
        groups=[Group("", [_row(method) for method in tuned])],
        footers=[
            f"{method.method}, trial {trial.number} ({trial.settings}) is lost: {trial.reason}"
            for method in tuned
            for trial in method.trials
            if trial.outcome == "lost"
        ]
        + [
            f"{method.method}: unfinished: {left} of {counted(len(method.trials), 'trial')}, so "
            "the choice may change"
            for method in tuned
            if (left := method.count("unfinished"))
        ],
    )


_SEEN = ("paper's", "chosen", "over-trials")


def _row(method: Tuned) -> Row:
    counts = [Cell(str(n)) for n in (len(method.trials), method.count("lost"))]
    cells = []
    for row in shown_rows(method.metric):
        digits = row.digits
        default = next((t for t in method.completed if t.number == 0), None)
        for trial in (default, method.chosen):
            cells.append(Cell(DASH if trial is None else format_number(trial.shown(row), digits)))
        if method.completed:
            over = MeanStd.of([trial.shown(row) for trial in method.completed])
            cells.append(judged_cell(over, 0, digits))
        else:
            cells.append(Cell(DASH))
    return Row(method.method, "" if method.ranges else "nothing to tune", [*counts, *cells])


def _range(method: Tuned, key: str, search: Search) -> Row:
    best = method.chosen
    texts = (str(search), shown(method.trials[0].values[key]), best and shown(best.values[key]))
    return Row(key, "", [Cell(text or DASH) for text in texts])
