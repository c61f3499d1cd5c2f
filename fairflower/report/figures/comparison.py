"""All figures of a comparison. Accuracy over rounds, per domain and per client is drawn here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairflower.config.text import unknown
from fairflower.errors import ConfigError
from fairflower.numerics import Vector
from fairflower.numerics.metrics import AVG, MIN, STD, Summary
from fairflower.report.figures import canvas, clusters, diagnostics, grids, groups, tuning
from fairflower.report.figures.canvas import FigureDraft, LineStyles, PageFigure, legend, panels
from fairflower.report.methods import Comparison, Curve, Method, several_runs
from fairflower.report.text import format_number
from fairflower.report.tuning import Tuned

_ZOOM = "Right: the second half of the rounds, enlarged."

#: Minimum number of tested rounds for a second panel that enlarges the second half.
_MIN_ROUNDS_TO_ZOOM = 8


def draw(
    comparison: Comparison,
    folder: Path,
    prefix: str = "",
    tuned: Sequence[Tuned] = (),
    pdf: bool = False,
) -> list[PageFigure]:
    """Draw every figure and save it as ``folder/<prefix><name>.png``, ``.svg`` and maybe PDF."""
    sketches = chain(_sketches(comparison), tuning.sketches(tuned))
    return canvas.save(sketches, folder, prefix, pdf)


def plot(comparison: Comparison, name: str) -> Figure:
    """Return a figure by name. Raises ``ConfigError`` if `draw` saves no figure with this name."""
    names = []
    with canvas.styled():
        for sketch in _sketches(comparison):
            if sketch.name == name:
                return sketch.figure
            names.append(sketch.name)
    raise ConfigError(unknown("figure", name, names))


def _sketches(comparison: Comparison) -> Iterator[FigureDraft]:
    fedavg = next((m.name for m in comparison.methods if m.strategy == "fedavg"), None)
    styles = canvas.line_styles([m.name for m in comparison.methods], canvas.METHOD_COLORS, fedavg)
    over_rounds = (
        ("average", "Average accuracy over rounds", AVG),
        ("worst", "Worst domain over rounds", MIN),
        ("std", "Spread across domains over rounds", STD),
    )
    furthest = max(comparison.methods, key=lambda m: m.runs[0].last_round).runs[0].rounds
    half = furthest[-1] / 2 if len(furthest) >= _MIN_ROUNDS_TO_ZOOM else None
    for name, title, row in over_rounds:
        if len(comparison.domains) > 1 or name == "average":
            yield _over_rounds(comparison, styles, name, title, row, half)
    tested = [m for m in comparison.methods if m.runs[0].by_client.rounds.size]
    yield _bars(comparison, styles, canvas.HALF if tested or half is None else canvas.FULL)
    if tested:
        yield _clients(comparison, tested, styles)
    yield _domains(comparison, styles)
    yield from groups.sketches(comparison, styles)
    yield from grids.sketches_of_products(comparison)
    yield from grids.sketches_of_sweeps(comparison, styles)
    yield from clusters.sketches(comparison, styles)
    yield from diagnostics.sketches(comparison, styles)


def _over_rounds(
    comparison: Comparison,
    styles: LineStyles,
    name: str,
    title: str,
    row: Summary,
    half: float | None,
) -> FigureDraft:
    """Draw a summary over rounds, with a second panel that enlarges the rounds from ``half`` on."""
    zooms = 0 if half is None else 1
    sheet, axes = panels(1, 1 + zooms, canvas.FULL if zooms else canvas.HALF, 3.4)
    alt_parts = []
    for method in comparison.methods:
        curve = method.curve(lambda accuracy: 100 * row(accuracy))
        if not curve.rounds.size:
            continue  # runs that were read from a summary have no rounds in common
        canvas.curve(axes[0, 0], curve, styles[method.name], method.name)
        late = curve.rounds >= (half or 0)
        if zooms and late.any():
            canvas.curve(axes[0, 1], Curve._make(v[late] for v in curve), styles[method.name])
        mark = "" if curve.whole[-1] else " (not of all domains)"
        alt_parts.append(
            f"{method.name} {format_number(curve.mean[-1], 1)} at round {curve.rounds[-1]}{mark}"
        )
    axes[0, 0].set_ylabel(row.axis)
    legend(sheet, axes[0, 0])
    caption = " ".join(
        [*_band_caption(comparison), *comparison.gaps * [canvas.DOTTED], *zooms * [_ZOOM]]
    )
    return FigureDraft(
        name, sheet, title, caption, f"{row.axis}, by round: {'; '.join(alt_parts)}."
    )


def _band_caption(comparison: Comparison) -> list[str]:
    several = several_runs(comparison.methods)
    line = f"Line: mean over {comparison.replicates}; band: ± their sample standard deviation."
    return [line] if several else []


def _domains(comparison: Comparison, styles: LineStyles) -> FigureDraft:
    count = len(comparison.domains)
    sheet, axes = canvas.panel_grid(count, 4, 2.7, 0.4, narrow=2, sharex=True, sharey=True)
    for d, (panel, domain) in enumerate(zip(axes.flat, comparison.domains, strict=False)):
        for method in comparison.methods:
            curve = method.curve(lambda accuracy: 100 * float(accuracy[0]), [d])
            canvas.curve(panel, curve, styles[method.name], method.name)
        panel.set_title(domain)
    for panel in axes[:, 0]:
        panel.set_ylabel("accuracy, %")
    legend(sheet, axes[0, 0])
    gaps = comparison.gaps * ["Thin dotted line: rounds in which the domain was not tested."]
    caption = " ".join([*_band_caption(comparison), *gaps])
    alt = f"Accuracy over rounds in {count} panels, one for each domain."
    return FigureDraft("domains", sheet, "Accuracy per domain over rounds", caption, alt)


def _bars(comparison: Comparison, styles: LineStyles, width: float) -> FigureDraft:
    sheet, panel = _grouped(comparison.domains, width)
    methods = comparison.methods
    thick = 0.8 / len(methods)
    alt_parts = []
    for place, method in enumerate(methods):
        estimates = [
            method.over_seeds(lambda run, d=d: 100 * float(run.final()[d]))  # type: ignore[misc]
            for d in range(len(comparison.domains))
        ]
        means = [estimate.mean for estimate in estimates]
        centers = _offsets(place, methods, len(comparison.domains))
        panel.bar(
            centers,
            means,
            thick * 0.92,
            color=styles[method.name].color,
            hatch=styles[method.name].hatch,
            label=method.name,
            yerr=[e.std for e in estimates] if len(method.runs) > 1 else None,
            error_kw={"ecolor": canvas.INK, "elinewidth": 0.9, "capsize": min(3, 12 * thick)},
        )
        for d in np.flatnonzero(np.isnan(means)):
            x = centers[d]
            panel.text(x, 2, "not tested", ha="center", va="bottom", rotation=90, fontsize=8)
        values = zip(comparison.domains, means, strict=True)
        alt_parts.append(
            f"{method.name}: "
            f"{', '.join(f'{name} {format_number(mean, 1)}' for name, mean in values)}"
        )
    panel.set_ylim(0, 100)
    over_runs = ""
    if several_runs(methods):
        over = f"over {comparison.replicates}"
        over_runs = f" and {over}; error bars: ± sample standard deviation {over}"
    legend(sheet, panel)
    return FigureDraft(
        "bars",
        sheet,
        f"Accuracy per domain, {comparison.span()}",
        f"{comparison.span().capitalize()}{over_runs}.",
        f"Accuracy in percent, {comparison.span()}. {'; '.join(alt_parts)}.",
    )


def _clients(comparison: Comparison, methods: Sequence[Method], styles: LineStyles) -> FigureDraft:
    domains = comparison.domains
    sheet, panel = _grouped(domains, canvas.HALF)
    for place, method in enumerate(methods):
        style = styles[method.name]
        centers = _offsets(place, methods, len(domains))
        values: dict[tuple[str, int], list[float]] = {}
        for run in (run for run in method.runs if run.by_client.rounds.size):
            for client, accuracy in zip(run.clients, run.by_client.final(), strict=True):
                values.setdefault((client.domain, client.client_id), []).append(100 * accuracy)
        panel.scatter(
            [centers[domains.index(domain)] for domain, _ in values],
            [np.mean(of_client) for of_client in values.values()],
            s=22,
            marker=style.marker,
            color=style.color,
            alpha=0.75,
            linewidths=0,
            label=method.name,
        )
    legend(sheet, panel)
    several = several_runs(methods)
    over_runs = f" and over {comparison.replicates}" if several else ""
    return FigureDraft(
        "clients",
        sheet,
        f"Accuracy per client, {comparison.span()}",
        f"Each point is the accuracy of a client on its own {comparison.examples} data, "
        f"{comparison.span()}{over_runs}.",
        "Accuracy of every client, grouped by domain and method.",
    )


def _grouped(domains: Sequence[str], width: float) -> tuple[Figure, Axes]:
    """Return a figure and its panel, with the domains on the x axis."""
    sheet, axes = panels(1, 1, width, 3.4)
    axes[0, 0].set_xticks(range(len(domains)), domains)
    axes[0, 0].set_xlim(-0.5, len(domains) - 0.5)
    axes[0, 0].grid(visible=False, axis="x")
    axes[0, 0].set_ylabel("accuracy, %")
    return sheet, axes[0, 0]


def _offsets(place: int, methods: Sequence[Method], groups: int) -> Vector:
    """Return the x position of a method in each group, next to the other methods."""
    return np.arange(groups, dtype=np.float64) + 0.8 * ((place + 0.5) / len(methods) - 0.5)
