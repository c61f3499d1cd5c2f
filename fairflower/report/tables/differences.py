"""Tables of differences: methods against the baselines and against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fairflower.report.measures import Measure, measures
from fairflower.report.methods import Comparison
from fairflower.report.tables.cells import Cell, Group, Row, Table, group_comparable, judged_cell
from fairflower.report.text import DASH, format_number, join_words
from fairflower.report.verdicts import (
    FURTHER,
    TITLES,
    Against,
    Contrast,
    against_baselines,
    seeds_text,
)
from fairflower.statistics.differences import MIN_PAIRS, Difference


def difference_tables(comparison: Comparison) -> list[Table]:
    """By every measure: against the baselines, and what else may be compared."""
    found = measures(comparison)
    tables = [_baselines_table(comparison, measure) for measure in found]
    return tables + [_table(comparison, *kind, measure) for kind in FURTHER for measure in found]


def _baselines_table(comparison: Comparison, measure: Measure) -> Table:
    """The figures of a measure against the baselines; no groups where there is none."""
    found = against_baselines(comparison, measure)
    baselines = [name for name in TITLES.values() if any(name in row for row in found.values())]
    kind = "" if measure.figures[0].title == "MIN" else f", {measure.name}"
    return Table(
        title=f"Difference to the baselines{kind}, {comparison.span()}",
        caption=_caption(measure),
        columns=[f"{f.title} vs {name}" for name in baselines for f in measure.figures],
        groups=[
            Group(heading, [_row(name, found[name], measure, baselines) for name in members])
            for heading, members in group_comparable(comparison, measure.of)
            if baselines
        ],
    )


def _table(comparison: Comparison, title: str, against: Against, measure: Measure) -> Table:
    """Methods of which each is compared with one other, which the heading names."""
    return Table(
        title=f"{title}, {measure.name}, {comparison.span()}",
        caption=_caption(measure),
        columns=[figure.title for figure in measure.figures],
        groups=[
            Group(
                f"{block.heading} against {block.other}",
                [
                    _row(name, {block.other: one}, measure, [block.other])
                    for name, one in block.contrasts.items()
                ],
            )
            for block in against(comparison, measure)
        ],
    )


def _row(
    name: str, contrasts: Mapping[str, Contrast], measure: Measure, others: Sequence[str]
) -> Row:
    cells: list[Cell] = []
    for other in others:
        if other in contrasts:
            cells += [_cell(one, better) for _, one, better in contrasts[other].by_figure]
        else:
            cells += [Cell(DASH)] * len(measure.figures)
    paired = seeds_text(contrasts.values()) if contrasts else "nothing to compare with"
    return Row(name, paired, cells)


def _cell(one: Difference, better: int) -> Cell:
    """The mean, and under it the interval and what could have been seen."""
    cell = judged_cell(one, better, signed=True)
    if math.isnan(one.low):
        return cell
    seen = f"; {format_number(one.detectable)}" if one.detectable else ""
    return replace(cell, spread=f"[{format_number(one.low)}, {format_number(one.high)}]{seen}")


def _caption(measure: Measure) -> str:
    more, less = (
        join_words([f.title for f in measure.figures if f.better == better]) for better in (1, -1)
    )
    lessened = f"; {less}: less is".replace("STD", "STD (ddof 1)") if less else ""
    return (
        "Percentage points: mean of the pairs, and under it the simultaneous 95 % interval and the "
        "smallest difference that would have been found with 80 % power. "
        f"{more}: more is better{lessened}. Bold with ▲ (better) or ▼ (worse): p < 0.05 by Holm's "
        f"correction over all methods and figures of the table, from {MIN_PAIRS} pairs on."
    )
