"""Tables, groups, rows and cells, independent of the output format; numbers as text."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fairflower.numerics.metrics import STD, STD0, over_domains
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.report.methods import Comparison, Method, several_runs
from fairflower.report.reading import Run
from fairflower.statistics import Difference, MeanStd

DASH = "\N{EN DASH}"

#: Text for an interval or a detectable difference that is larger than the metric's range.
FEW_PAIRS = "too few pairs"

#: Text that is shown for an undefined metric of group fairness.
UNDEFINED = "undefined"

#: Reference to the explanation of tables and verdicts.
GUIDE = "How to read the tables and verdicts: docs/report.md."

#: Mark on a number for which some domain was not tested.
MARK = "\N{DAGGER}"

#: How a cell is highlighted. All but the first are bold; pages tint cells that were judged better
#: or worse, and not the best of a column.
Tone = Literal["", "best", "better", "worse"]

#: Judgment (1 better, -1 worse, 0 neither) -> mark after a number, and its tone.
MARKS: dict[int, tuple[str, Tone]] = {0: ("", ""), 1: (" ▲", "better"), -1: (" ▼", "worse")}


@dataclass(frozen=True)
class Cell:
    """A table cell: a mean over runs, its standard deviation, and its highlighting."""

    text: str
    spread: str = ""
    tone: Tone = ""
    second: bool = False  # second best of three or more


def judged_cell(estimate: MeanStd, judgment: int, digits: int = 2, *, signed: bool = False) -> Cell:
    """Return a mean with its spread, marked as better (1), worse (-1) or neither (0)."""
    mark, tone = MARKS[judgment]
    text = format_number(estimate.mean, digits, signed=signed) + mark
    return Cell(text, format_std(estimate.std, estimate.n, digits), tone)


def difference_cell(score: Score, difference: Difference, sign: int) -> Cell:
    """Return a cell with the mean and, below it, the interval and the detectable difference."""
    digits = score.digits
    counted = score.better == score.low == 0  # a number of clients, which has no sign
    cell = judged_cell(difference, sign, digits, signed=not counted)
    if math.isnan(difference.low):
        return cell
    low, high = difference.low, difference.high
    if counted and high - low <= score.high:  # twice the number of clients
        low, high = max(low, 0.0), min(high, score.high / 2)
    parts = [format_interval(low, high, score.largest, digits)]
    if least := difference.detectable:
        parts.append(within_range(least, format_number(least, digits), score.largest))
    return replace(cell, spread="; ".join(dict.fromkeys(parts)))


@dataclass(frozen=True)
class Row:
    """The numbers of a method; ``remark`` is small print below its name."""

    name: str
    remark: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Group:
    """Rows that can be compared. The heading has the settings in which groups differ."""

    heading: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    """A table: title, caption, columns, and groups of rows; ``footers`` follow the caption."""

    title: str
    caption: str
    columns: Sequence[str]
    groups: Sequence[Group]
    footers: Sequence[str] = ()
    heading: str = "method"  # of the rows
    #: The scores that columns summarize.
    of: str = "over domains"

    @property
    def on_screen(self) -> "Table":
        """The table with one standard deviation; files for papers also have that of ddof 0."""
        second = STD0.heading if STD.heading in self.columns else None
        kept = [i for i, column in enumerate(self.columns) if column != second]
        groups = [
            replace(g, rows=[replace(row, cells=[row.cells[i] for i in kept]) for row in g.rows])
            for g in self.groups
        ]
        footers = [line for line in self.footers if line != GUIDE]  # users may not have the file
        columns = [self.columns[i] for i in kept]
        return replace(self, columns=columns, groups=groups, footers=footers)


@dataclass(frozen=True)
class Column:
    """A table column: a score of every method, as ``estimate(method)`` in the score's unit.

    ``whole(method)`` is false if a domain was not tested in some round. The number is then marked
    and not compared.
    """

    title: str
    score: Score
    estimate: Callable[[Method], MeanStd]
    whole: Callable[[Method], bool] = lambda method: True
    #: Text that is shown instead of NaN.
    missing: str = DASH

    def cells(self, methods: Sequence[Method], beside: Sequence[bool]) -> list[Cell]:
        """Return the cell of each method; methods that are ``beside`` are not compared.

        The best mean is bold and, of at least three, the second best is marked. None is if fewer
        than two methods are compared or one has no number, and no second if several are the best.
        """
        digits, better = self.score.digits, self.score.better
        estimates = [self.estimate(method) for method in methods]
        means = [round(e.mean, digits) for e in estimates]
        compared = [mean for mean, aside in zip(means, beside, strict=True) if not aside]
        places: list[float] = []
        if better and len(compared) > 1 and not any(map(math.isnan, compared)):
            first, second = sorted(compared, reverse=better > 0)[:2]
            places = [first, second] if len(compared) > 2 and first != second else [first]
        cells = []
        for method, e, mean, aside in zip(methods, estimates, means, beside, strict=True):
            mark = MARK * (not self.whole(method))
            if math.isnan(mean):
                cells.append(Cell(DASH if aside else self.missing + mark))
                continue
            best, second = (not aside and mean in part for part in (places[:1], places[1:]))
            text = format_number(e.mean, digits) + mark
            cells.append(Cell(text, format_std(e.std, e.n, digits), "best" if best else "", second))
        return cells


def column(
    title: str, value: Callable[[Run], float], score: Score = ACCURACY, missing: str = DASH
) -> Column:
    """Return a column with the mean and std over runs of a score that has one value per run."""

    def estimate(method: Method) -> MeanStd:
        return method.over_seeds(lambda run: score.shown(value(run)))

    return Column(title, score, estimate, missing=missing)


def metric_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    groups: Iterable[tuple[str, Mapping[str, Method]]],
    lacking: str = "were not tested",
    of: str = Table.of,
) -> Table:
    """Return a table of methods. ``groups`` has pairs of a heading and methods by name.

    The best value of each column in a group is bold. If a mark is used, the caption explains it;
    ``lacking`` is what happened to domains that lack a value.
    """
    filled = []
    for heading, methods in groups:
        members = [*methods.values()]
        beside = [
            bool(method.reference) or not all(column.whole(method) for column in columns)
            for method in members
        ]
        cells = zip(*(column.cells(members, beside) for column in columns), strict=True)
        named = zip(methods, map(remark, members), cells, strict=True)
        filled.append(Group(heading, [Row(*row) for row in named]))
    rows = (row for group in filled for row in group.rows)
    if any(cell.text.endswith(MARK) for row in rows for cell in row.cells):
        caption = (
            f"{caption.rstrip()} {MARK}: some domains or clients {lacking} in these "
            "rounds, so the number is not compared."
        )
    return Table(title, caption, [column.title for column in columns], filled, of=of)


def remark(method: Method) -> str:
    """Return the number of federations or seeds, and the progress of unfinished runs."""
    n, unit = len(method.runs), method.unit.split(" ")[0]
    seeds = f"{n} {unit}s" if n > 1 else f"{unit} {method.runs[0].seed}"
    unfinished = sorted({run.progress for run in method.runs if run.status != "completed"})
    return ", ".join([seeds, *unfinished])


def how_to_read(comparison: Comparison) -> str:
    """Explain the small print and bold type of a table; empty if the table has neither."""
    several = several_runs(comparison.methods)
    small = f"±: standard deviation over {comparison.replicates} (ddof 1). " if several else ""
    return f"{small}{bold(comparison)}".strip()


def bold(comparison: Comparison) -> str:
    """Explain the bold type of a table; empty if the table has none."""
    beside = ", without references" * any(method.reference for method in comparison.methods)
    best = "best comparable method" if several_runs(comparison.methods) else "best in these runs"
    verdict = ", no verdict" * (not several_runs(comparison.methods))
    return f"Bold: {best}{beside}{verdict}." if len(comparison.methods) > 1 else ""


def glossary(comparison: Comparison) -> str:
    """Define what verdicts and figures are about; empty for a single domain."""
    worst, each = over_domains(comparison.score).worst, comparison.replicates[:-1]
    beyond = "lower" if worst.better > 0 else "higher"
    means = f", in each {each} and then averaged (so it can be {beyond} than every domain's mean)"
    return (
        f"{worst.title}: the worst domain's {comparison.score.title}"
        f"{means * several_runs(comparison.methods)}. STD: spread over domains (standard "
        "deviation). AVG: mean over domains."
    ) * (len(comparison.domains) > 1)


# --- numbers as text ------------------------------------------------------------------


def capitalized(text: str) -> str:
    """Return a text as a sentence begins with it; only its first letter may change.

    >>> capitalized("accuracy of RNNs"), capitalized("RMSE")
    ('Accuracy of RNNs', 'RMSE')
    """
    return text[:1].upper() + text[1:]


def thousands(value: Any) -> str:
    """Format a whole number with commas; empty for any other value.

    >>> thousands(133514), thousands(None)
    ('133,514', '')
    """
    return f"{value:,}" if isinstance(value, int) else ""


def format_number(value: float, digits: int = 2, *, signed: bool = False) -> str:
    """Format a number with a true minus sign; NaN becomes a dash.

    >>> format_number(0.126, signed=True), format_number(2 / 3, digits=4)
    ('+0.13', '0.6667')
    """
    if math.isnan(value):
        return DASH
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def within_range(value: float, text: str, most: float = 100.0) -> str:
    """Return the text of a difference of at most ``most``, else "too few pairs"."""
    return FEW_PAIRS if abs(value) > most else text


def format_interval(low: float, high: float, most: float = 100.0, digits: int = 2) -> str:
    """Format an interval of a difference that is at most ``most``."""
    text = f"[{format_number(low, digits)}, {format_number(high, digits)}]"
    return within_range(max(abs(low), abs(high)), text, most)


def format_std(std: float, n: int, digits: int = 2) -> str:
    """Format the standard deviation of ``n`` values; empty for a single value.

    >>> format_std(0.25, 3), format_std(math.nan, 1)
    ('± 0.25', '')
    """
    return f"± {format_number(std, digits)}" if n > 1 else ""
