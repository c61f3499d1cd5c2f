"""Tables of differences: methods against the baselines and against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairflower.report.measures import Measure, measures
from fairflower.report.methods import FEWEST_SEEDS, Comparison
from fairflower.report.tables.cells import Cell, Group, Row, Table, comparable, judged
from fairflower.report.text import DASH, listed
from fairflower.report.verdicts import (
    FURTHER,
    TITLES,
    Against,
    Contrast,
    against_baselines,
    counts,
)


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
            for heading, members in comparable(comparison, measure.of)
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
            found = contrasts[other].by_figure
            cells += [judged(difference, better, signed=True) for _, difference, better in found]
        else:
            cells += [Cell(DASH)] * len(measure.figures)
    seeds = counts(contrasts.values())
    return Row(name, f"{seeds} paired" if seeds else "nothing to compare with", cells)


def _caption(measure: Measure) -> str:
    more, less = (
        listed([f.title for f in measure.figures if f.better == better]) for better in (1, -1)
    )
    lessened = f"; {less}: less is".replace("STD", "STD (ddof 1)") if less else ""
    return (
        "Percentage points, paired by seed: mean over seeds, and under it ± their sample "
        f"standard deviation (ddof 1). {more}: more is better{lessened}. Bold with ▲ "
        "(better) or ▼ (worse): p < 0.05, Student's t with Holm's correction over the methods "
        f"compared (≥ {FEWEST_SEEDS} seeds)."
    )
