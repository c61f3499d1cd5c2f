"""What tables are made of, however they are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fairflower.report.methods import Comparison, MeanStd, Method
from fairflower.report.text import DASH, MARK, format_number, format_std

Tone = Literal["", "better", "worse"]

#: What follows a figure, and its tone, by whether it is better than another (1), worse or neither.
MARKS: dict[int, tuple[str, Tone]] = {0: ("", ""), 1: (" ▲", "better"), -1: (" ▼", "worse")}


@dataclass(frozen=True)
class Cell:
    """One figure: its mean over seeds, the spread under it, and how it stands out."""

    text: str
    spread: str = ""
    tone: Tone = ""
    second: bool = False  # whether only one is better, of three or more
    link: str = ""  # anchor of the row with its settings, on a page


def judged_cell(estimate: MeanStd, judgement: int, *, signed: bool = False, link: str = "") -> Cell:
    """A figure that is better (1) than another, worse (-1) or neither (0), with its mark."""
    mark, tone = MARKS[judgement]
    text = format_number(estimate.mean, signed=signed) + mark
    return Cell(text, format_std(estimate.std, estimate.n), tone, link=link)


@dataclass(frozen=True)
class Row:
    """A method with its figures; ``remark`` is small print under the name."""

    name: str
    remark: str
    cells: Sequence[Cell]
    anchor: str = ""


@dataclass(frozen=True)
class Group:
    """Rows whose figures may be compared; the heading says what sets them apart."""

    heading: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    """A title, a caption that says how to read it, columns and groups of rows.

    ``footers`` are lines of their own under the table.
    """

    title: str
    caption: str
    columns: Sequence[str]
    groups: Sequence[Group]
    footers: Sequence[str] = ()


@dataclass(frozen=True)
class Column:
    """One figure of a method: ``better`` is 1 if more is, -1 if less is, 0 if neither.

    ``whole`` says of what methods it lacks no domain in any round. Elsewhere it is marked,
    and the method is in no contest with others.
    """

    title: str
    estimate: Callable[[Method], MeanStd]
    better: int
    digits: int = 2
    whole: Callable[[Method], bool] = lambda method: True

    def podium(self, estimates: Sequence[MeanStd]) -> list[float]:
        """The best mean to the digits shown, and of three or more the next; none without a contest.

        Where several are the best there is no next.
        """
        means = [round(estimate.mean, self.digits) for estimate in estimates]
        if self.better == 0 or len(means) < 2 or any(map(math.isnan, means)):
            return []
        first, second = sorted(means, reverse=self.better > 0)[:2]
        return [first, second] if len(means) > 2 and first != second else [first]

    def cell(self, estimate: MeanStd, podium: Sequence[float] = (), mark: str = "") -> Cell:
        """The figure of one method; bold if it is the best."""
        text = format_number(estimate.mean, self.digits) + mark
        mean = round(estimate.mean, self.digits)
        tone: Tone = "better" if mean in podium[:1] else ""
        small = format_std(estimate.std, estimate.n, self.digits)
        return Cell(text, small, tone, mean in podium[1:])


def metric_table(
    title: str,
    caption: str,
    columns: Sequence[Column],
    groups: Iterable[tuple[str, Mapping[str, Method]]],
) -> Table:
    """Fill a table with the figures of methods, by heading and name.

    The best of each group's column is bold. The caption gets a word on marks, if there are any.
    """
    filled = [Group(heading, _rows(methods, columns)) for heading, methods in groups]
    cells = (cell for group in filled for row in group.rows for cell in row.cells)
    if any(cell.text.endswith(MARK) for cell in cells):
        caption = (
            f"{caption.rstrip()} {MARK}: not every domain was tested in all of these rounds, as "
            "the notes say, and so compared with nothing."
        )
    return Table(title, caption, [column.title for column in columns], filled)


def group_comparable(
    comparison: Comparison, methods: Iterable[Method]
) -> list[tuple[str, dict[str, Method]]]:
    """Methods by what they may be compared with, each with a heading if there are several."""
    found: dict[Hashable, dict[str, Method]] = {}
    for method in methods:
        found.setdefault(method.comparable, {})[method.name] = method
    if len(found) == 1:
        return [("", members) for members in found.values()]
    groups = []
    for members in found.values():
        first = next(iter(members.values()))
        parts = [f"{key} = {values[first.name]}" for key, values in comparison.differing.items()]
        groups.append((", ".join([*parts, f"round {first.runs[0].reach}"]), members))
    return groups


def remark(method: Method) -> str:
    """Number of federations or seeds, and how far runs came that did not finish."""
    n, unit = len(method.runs), method.unit.split(" ")[0]
    seeds = f"{n} {unit}s" if n > 1 else f"seed {method.runs[0].seed}"
    unfinished = sorted({run.progress for run in method.runs if run.status != "completed"})
    return ", ".join([seeds, *unfinished])


def how_to_read(comparison: Comparison) -> str:
    """What the small print and the bold type of a table mean, if it has any."""
    several = any(len(method.runs) > 1 for method in comparison.methods)
    small = (
        "Every figure is computed per seed; shown is the mean over seeds, and under it "
        "± their sample standard deviation (ddof 1). "
    )
    return f"{small if several else ''}{bold(comparison)}".strip()


def bold(comparison: Comparison) -> str:
    """What the bold type of a table means, if it has any."""
    if len(comparison.methods) == 1:
        return ""
    return "Bold: best of the methods that may be compared, to the digits shown."


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
