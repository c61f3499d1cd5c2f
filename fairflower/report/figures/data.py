"""Figures of data before training: classes, means and missing cells of each place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

from fairflower.data import Federation
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, PageFigure
from fairflower.tables.encoding import ColumnSums, joined

#: Most rows of a figure; more columns are in the tables.
MOST_ROWS = 30


def draw_data(
    sites: Mapping[str, Federation],
    sums: Mapping[str, Mapping[str, ColumnSums]],
    least: int,
    folder: Path,
) -> list[PageFigure]:
    """Draw what there is of classes, means and missing cells; ``sums`` are by column and place."""
    classes: dict[str, dict[str, float]] = {}
    for place, site in sites.items():
        (client,) = site.clients
        for name, count in zip(site.class_names, client.class_counts, strict=False):
            if count >= least:
                classes.setdefault(name, {})[place] = 100 * count / client.num_examples
    means: dict[str, dict[str, float]] = {}
    missing: dict[str, dict[str, float]] = {}
    for name, own in sums.items():
        numbers = {p: s for p, s in own.items() if s.column.kind == "number" and s.known >= least}
        if len(numbers) > 1:
            whole = reduce(joined, numbers.values())
            if std := math.sqrt(whole.m2 / whole.known):
                means[name] = {p: (s.mean - whole.mean) / std for p, s in numbers.items()}
        sizes = {p: s.known + s.missing for p, s in own.items()}
        lacking = {p: s.missing for p, s in own.items() if s.missing == 0 or s.missing >= least}
        if any(lacking.values()):
            missing[name] = {p: 100 * n / sizes[p] for p, n in lacking.items() if sizes[p]}
    share, apart = "% of training rows", "distance from the common mean, in common STD (ddof 0)"
    drawn = {
        "classes": ("Classes", "The share of each class.", share, classes),
        "means": ("Means", "A place far from the others may use another unit.", apart, means),
        "missing": ("Missing cells", "Columns with missing cells.", share, missing),
    }
    drafts = (_dots([*sites], name, *of) for name, of in drawn.items() if of[-1])
    return canvas.save(drafts, folder, "")


def _dots(
    places: Sequence[str],
    name: str,
    title: str,
    caption: str,
    label: str,
    values: Mapping[str, Mapping[str, float]],
) -> FigureDraft:
    """Return a figure with a row for each name in ``values``, and in it a dot for each place."""
    rows = [*values][:MOST_ROWS]
    figure, axes = canvas.panels(1, 1, canvas.HALF, 1.2 + 0.28 * len(rows))
    panel, styles = axes[0, 0], canvas.line_styles(places, canvas.DOMAIN_COLORS)
    for place in places:
        there = [k for k, row in enumerate(rows) if place in values[row]]
        x = [values[rows[k]][place] for k in there]
        style = styles[place]
        panel.plot(x, there, linestyle="", marker=style.marker, color=style.color, label=place)
    panel.set_yticks(range(len(rows)), [row[:24] for row in rows], parse_math=False)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlabel(label)
    panel.grid(axis="y", alpha=0.3)
    canvas.legend(figure, panel)
    more = f" The first {MOST_ROWS} of {len(values)}." if len(values) > MOST_ROWS else ""
    alt = f"{title}: {len(rows)} rows with a dot for each of {len(places)} places"
    return FigureDraft(name, figure, title, caption + more, alt)
