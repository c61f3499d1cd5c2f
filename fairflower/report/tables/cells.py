"""Tables, groups, rows and cells, independent of the output format."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairflower.numerics.scores import Score
from fairflower.report.methods import Comparison, Method, several_runs
from fairflower.report.reading import Run
from fairflower.report.text import DASH, MARK, format_number, format_std
from fairflower.statistics.differences import MeanStd

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


def judged_cell(estimate: MeanStd, judgment: int, *, signed: bool = False) -> Cell:
    """Return a mean with its spread, marked as better (1), worse (-1) or neither (0)."""
    mark, tone = MARKS[judgment]
    text = format_number(estimate.mean, signed=signed) + mark
    return Cell(text, format_std(estimate.std, estimate.n), tone)


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


@dataclass(frozen=True, kw_only=True)
class Column(Score):
    """A table column that shows a score of every method, in the score's unit.

    ``whole(method)`` is false if a domain was not tested in some round. The number is then marked
    and not compared.
    """

    estimate: Callable[[Method], MeanStd]
    whole: Callable[[Method], bool] = lambda method: True
    #: Text that is shown instead of NaN.
    missing: str = DASH

    def podium(self, estimates: Sequence[MeanStd]) -> list[float]:
        """Return the best mean, rounded as shown, and the second best if there are at least three.

        The result is empty if no methods are compared, and has only the best mean if several
        methods share it.
        """
        means = [round(estimate.mean, self.digits) for estimate in estimates]
        if self.better == 0 or len(means) < 2 or any(map(math.isnan, means)):
            return []
        first, second = sorted(means, reverse=self.better > 0)[:2]
        return [first, second] if len(means) > 2 and first != second else [first]

    def cell(self, estimate: MeanStd, podium: Sequence[float] = (), mark: str = "") -> Cell:
        """Return the cell of a method, which is bold if its mean is the best."""
        if math.isnan(estimate.mean):
            return Cell(self.missing + mark)
        text = format_number(estimate.mean, self.digits) + mark
        mean = round(estimate.mean, self.digits)
        tone: Tone = "best" if mean in podium[:1] else ""
        small = format_std(estimate.std, estimate.n, self.digits)
        return Cell(text, small, tone, mean in podium[1:])


def column(
    title: str, value: Callable[[Run], float], better: int = 1, unit: str = "%", **options: Any
) -> Column:
    """Return a column with the mean and std over runs of a score that has one value per run."""
    shown = Score(title, better, unit).shown

    def estimate(method: Method) -> MeanStd:
        return method.over_seeds(lambda run: shown(value(run)))

    return Column(title, better, unit, estimate=estimate, **options)


def metric_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    groups: Iterable[tuple[str, Mapping[str, Method]]],
) -> Table:
    """Return a table of methods. ``groups`` has pairs of a heading and methods by name.

    The best value of each column in a group is bold. If a mark is used, the caption explains it.
    """
    filled = [Group(heading, _rows(methods, columns)) for heading, methods in groups]
    cells = (cell for group in filled for row in group.rows for cell in row.cells)
    if any(cell.text.endswith(MARK) for cell in cells):
        caption = (
            f"{caption.rstrip()} {MARK}: some domains or clients were not tested in these "
            "rounds, so the number is not compared."
        )
    return Table(title, caption, [column.title for column in columns], filled)


def group_comparable(
    comparison: Comparison, methods: Iterable[Method]
) -> list[tuple[str, dict[str, Method]]]:
    """Group comparable methods. If there are several groups, each has a heading."""
    by_setting: dict[Hashable, dict[str, Method]] = {}
    for method in methods:
        by_setting.setdefault(method.comparable, {})[method.name] = method
    if len(by_setting) == 1:
        return [("", members) for members in by_setting.values()]
    groups = []
    for members in by_setting.values():
        first = next(iter(members.values()))
        parts = [f"{key} = {values[first.name]}" for key, values in comparison.differing.items()]
        groups.append((", ".join([*parts, f"round {first.runs[0].reach}"]), members))
    return groups


def remark(method: Method) -> str:
    """Return the number of federations or seeds, and the progress of unfinished runs."""
    n, unit = len(method.runs), method.unit.split(" ")[0]
    seeds = f"{n} {unit}s" if n > 1 else f"seed {method.runs[0].seed}"
    unfinished = sorted({run.progress for run in method.runs if run.status != "completed"})
    return ", ".join([seeds, *unfinished])


def how_to_read(comparison: Comparison) -> str:
    """Explain the small print and bold type of a table; empty if the table has neither."""
    several = several_runs(comparison.methods)
    small = f"±: standard deviation over {comparison.replicates} (ddof 1). " if several else ""
    return f"{small}{bold(comparison)}".strip()


def bold(comparison: Comparison) -> str:
    """Explain the bold type of a table; empty if the table has none."""
    return "Bold: best comparable method." if len(comparison.methods) > 1 else ""


def _rows(methods: Mapping[str, Method], columns: Sequence[Column]) -> list[Row]:
    estimates = {name: [c.estimate(method) for c in columns] for name, method in methods.items()}
    lacking = {name: [not c.whole(method) for c in columns] for name, method in methods.items()}
    compared = [estimates[name] for name, lacks in lacking.items() if not any(lacks)]
    podiums = [column.podium([row[c] for row in compared]) for c, column in enumerate(columns)]
    rows = []
    for name, method in methods.items():
        beside = any(lacking[name])
        cells = [
            Cell(DASH)
            if beside and math.isnan(e.mean)
            else column.cell(e, [] if beside else podium, MARK * lacks)
            for column, e, podium, lacks in zip(
                columns, estimates[name], podiums, lacking[name], strict=True
            )
        ]
        rows.append(Row(name, remark(method), cells))
    return rows
