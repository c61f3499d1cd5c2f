"""Tables of differences between methods and baselines, and between methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fairflower.report.contrasts import (
    TITLES,
    ByBaseline,
    Contrast,
    ContrastGroup,
    Contrasts,
    MetricDifference,
)
from fairflower.report.measures import Measure
from fairflower.report.methods import Comparison
from fairflower.report.tables.cells import Cell, Group, Row, Table, group_comparable, judged_cell
from fairflower.report.text import DASH, format_interval, format_number, within_range
from fairflower.report.verdicts import pairs_text
from fairflower.statistics.differences import MIN_PAIRS


def difference_tables(comparison: Comparison, contrasts: Contrasts) -> list[Table]:
    """Return the tables of differences from the baselines, and of other contrasts, by measure."""
    measures = contrasts.measures
    return [
        *(
            _baselines_table(comparison, *pair)
            for pair in zip(measures, contrasts.against_baselines, strict=True)
            if pair[0].metrics  # none if all are undefined, as with one group of people
        ),
        *(
            _groups_table(comparison, title, *pair)
            for title, groups in contrasts.further.items()
            for pair in zip(measures, groups, strict=True)
            if pair[0].metrics
        ),
    ]


def _baselines_table(comparison: Comparison, measure: Measure, against: ByBaseline) -> Table:
    """Return a table of differences from the baselines; it has no groups if no baseline ran."""
    baselines = [name for name in TITLES.values() if any(name in row for row in against.values())]
    kind = "" if measure.metrics[0].title == "MIN" else f", {measure.name}"
    return Table(
        title=f"Difference from the baselines{kind}, {comparison.span()}",
        caption=_caption(measure),
        columns=[f"{f.title} vs {name}" for name in baselines for f in measure.metrics],
        groups=[
            Group(heading, [_row(name, against[name], measure, baselines) for name in members])
            for heading, members in group_comparable(comparison, measure.methods)
            if baselines
        ],
    )


def _groups_table(
    comparison: Comparison, title: str, measure: Measure, groups: Sequence[ContrastGroup]
) -> Table:
    """Return a table of differences from the method in the heading."""
    return Table(
        title=f"{title}, {measure.name}, {comparison.span()}",
        caption=_caption(measure),
        columns=[metric.title for metric in measure.metrics],
        groups=[
            Group(
                f"{group.heading} against {group.other}",
                [
                    _row(name, {group.other: contrast}, measure, [group.other])
                    for name, contrast in group.contrasts.items()
                ],
            )
            for group in groups
        ],
    )


def _row(
    name: str, contrasts: Mapping[str, Contrast], measure: Measure, others: Sequence[str]
) -> Row:
    cells: list[Cell] = []
    for other in others:
        if other in contrasts:
            cells += [_cell(one) for one in contrasts[other].by_metric]
        else:
            cells += [Cell(DASH)] * len(measure.metrics)
    paired = pairs_text(contrasts.values()) if contrasts else "nothing to compare with"
    return Row(name, paired, cells)


def _cell(one: MetricDifference) -> Cell:
    """Return a cell with the mean and, below it, the interval and the detectable difference."""
    metric, difference, sign = one
    cell = judged_cell(difference, sign, signed=True)
    if math.isnan(difference.low):
        return cell
    parts = [format_interval(difference.low, difference.high, metric.largest)]
    if least := difference.detectable:
        parts.append(within_range(least, format_number(least), metric.largest))
    return replace(cell, spread="; ".join(dict.fromkeys(parts)))


def _caption(measure: Measure) -> str:
    std = " STD: ddof 1." if any(f.title.split()[0] == "STD" for f in measure.metrics) else ""
    less = " Lower is better." if all(f.better < 0 for f in measure.metrics) else ""
    return (
        "In points: mean over pairs, [95 % interval]; difference detectable with 80 % power. ▲ "
        f"better, ▼ worse: p < 0.05 (corrected), with at least {MIN_PAIRS} pairs.{less}{std}"
    )
