"""The figures of a report: PNG and SVG files, and SVG to put into the page.

The only module that imports matplotlib. Colours read on light and dark paper and stay
apart for colour-blind readers; line styles repeat what colours say.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fairflower import metrics
from fairflower.report.diagnostics import Series, matrices, scalars, series
from fairflower.report.methods import WINDOW, Comparison, Method

Vector = NDArray[np.float64]

_INK = "#24292f"
_GREY = "#7d8590"
_METHOD_COLOURS = ("#19a3ff", "#e58a00", "#7a52ff", "#00a866", "#b23819", "#16679c")
_DOMAIN_COLOURS = ("#10705c", "#6f4dff", "#39aac6", "#6bb200", "#9c4c16", "#e58a00")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_MARKERS = "osD^vPX*"
_WIDTH = 6.4  # inches; a column of the page

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.alpha": 0.35,
    "grid.color": _GREY,
    "grid.linewidth": 0.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "fairflower",
    "text.color": _INK,
    # Labels are anybody's text; a dollar sign in one is no formula.
    "text.parse_math": False,
    "xtick.color": _INK,
    "xtick.labelsize": 8.5,
    "ytick.color": _INK,
    "ytick.labelsize": 8.5,
}


class Drawn(NamedTuple):
    """A figure for the page: heading, caption, text for who cannot see it, inline SVG."""

    title: str
    caption: str
    alt: str
    svg: str
    wide: bool


class _Look(NamedTuple):
    colour: str
    dash: Any
    marker: str


def draw(comparison: Comparison, folder: Path, prefix: str = "") -> list[Drawn]:
    """Draw all figures of a comparison and save them as ``folder/<prefix><name>.png|svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    looks = _looks([method.name for method in comparison.methods])
    drawn = []
    with mpl.rc_context({**mpl.rcParamsDefault, **_STYLE}):  # type: ignore[arg-type]
        for name, figure, title, caption, alt in _figures(comparison, looks):
            wide = figure.get_figwidth() > _WIDTH
            svg = _save(figure, folder, prefix + name)
            drawn.append(Drawn(title, caption, alt, svg, wide))
    return drawn
