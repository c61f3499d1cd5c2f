"""Contour plots of a loss landscape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.contour import ContourSet
from matplotlib.ticker import MaxNLocator

from fairflower.numerics import Vector
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, PageFigure

if TYPE_CHECKING:
    from fairflower.final_model.landscape import Landscape, Surface

#: Largest and smallest number of contour lines.
_LINES = 18
_FEW = 5
_COLORS = "viridis"


def draw(landscape: Landscape, levels: Vector, folder: Path, prefix: str = "") -> PageFigure:
    """Draw a landscape and save it as ``folder/<prefix>landscape.png`` and ``.svg``.

    The figure has a row for training images, a row for test images and a column for each domain.
    ``levels`` are the losses of the contours in all panels (`levels_of`).
    """
    (drawn,) = canvas.save(_sketch(landscape, levels), folder, prefix)
    return drawn


def levels_of(landscapes: Sequence[Landscape]) -> Vector:
    """Return contour levels for several landscapes: rounded losses in a geometric sequence."""
    every = np.concatenate([s.loss.ravel() for landscape in landscapes for s in landscape.surfaces])
    losses = every[np.isfinite(every) & (every > 0)]
    if not losses.size:
        return np.array([0.0, 1.0])
    low, high = float(losses.min()), float(losses.max())
    ends = _rounded(low, math.floor), _rounded(high, math.ceil)
    levels = np.unique([_rounded(level, round) for level in np.geomspace(*ends, _LINES)])
    if len(levels) < _FEW:  # the losses agree to two digits
        return np.linspace(low * (1 - 1e-6), high * (1 + 1e-6), _FEW)
    return levels


def _rounded(value: float, rule: Callable[[float], int]) -> float:
    """Round a number to two significant digits.

    >>> _rounded(0.03479, round), _rounded(0.03479, math.floor), _rounded(312.4, math.ceil)
    (0.035, 0.034, 320.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{rule(value / unit) * unit:.2g}")


def _sketch(landscape: Landscape, levels: Vector) -> Iterator[FigureDraft]:
    splits = list(dict.fromkeys(surface.split for surface in landscape.surfaces))
    domains = list(dict.fromkeys(surface.domain for surface in landscape.surfaces))
    sheet, axes = canvas.panels(
        len(splits), len(domains), 2.6 * len(domains) + 1.4, 2.55 * len(splits) + 0.8,
        sharex=True, sharey=True,
    )  # fmt: skip
    title = f"Loss around the model trained with {landscape.label}"
    # The figure may be used without its caption.
    sheet.suptitle(title, x=0.01, ha="left", size=10.5)
    norm = BoundaryNorm(levels, 256)
    for surface in landscape.surfaces:
        panel = axes[splits.index(surface.split), domains.index(surface.domain)]
        filled = _panel(panel, landscape.steps, surface, levels, norm)
    for panel in axes[-1]:
        panel.set_xlabel("x")
    for panel in axes[:, 0]:
        panel.set_ylabel("y")
    bar = sheet.colorbar(filled, ax=axes, label="loss", shrink=0.9, pad=0.02)
    bar.outline.set_linewidth(0.6)
    bar.set_ticks(levels.tolist(), labels=[f"{level:.3g}" for level in levels])
    bar.minorticks_off()
    alt_parts = (f"{s.domain}, {s.split}: {s.center:.3g}" for s in landscape.surfaces)
    yield FigureDraft(
        "landscape",
        sheet,
        title,
        "Loss along two random directions whose filters have the same norms as the model's; + "
        "marks the model.",
        f"Contour plots of the loss. Loss of the model itself: {'; '.join(alt_parts)}.",
    )


def _panel(
    panel: Axes, steps: Vector, surface: Surface, levels: Vector, norm: BoundaryNorm
) -> ContourSet:
    loss = np.ma.masked_invalid(np.clip(surface.loss, levels[0], levels[-1]))
    filled = panel.contourf(steps, steps, loss, levels, norm=norm, cmap=_COLORS)
    panel.contour(steps, steps, loss, levels, colors="white", linewidths=0.5, alpha=0.6)
    panel.plot(0, 0, "+", color="white", markersize=8, markeredgewidth=1.4)
    panel.set_title(f"{surface.domain}, {surface.split}: {surface.center:.3g} at +")
    panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.yaxis.set_major_locator(MaxNLocator(4))
    panel.set_aspect("equal")
    panel.grid(visible=False)
    return filled
