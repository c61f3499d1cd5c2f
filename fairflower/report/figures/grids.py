"""Figures of grids (every client with every strategy) and of sweeps over an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fairflower.numerics.metrics import AVG, MIN, STD
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import (
    FigureDraft,
    LineStyle,
    LineStyles,
    legend,
    line,
    panels,
)
from fairflower.report.grids import Sweep, largest_grid, sweeps
from fairflower.report.measures import fairness
from fairflower.report.methods import (
    BASELINES,
    Comparison,
    Method,
    methods_with_clusters,
    several_runs,
)
from fairflower.report.reading import Run

Grid = Mapping[str, Mapping[str, Method]]

_BLANK = " Blank: not run, or not tested on every domain in all of these rounds."


def sketches_of_products(comparison: Comparison) -> Iterator[FigureDraft]:
    """Yield heat maps and a convergence figure of the largest grid; nothing if there is no grid."""
    grid = largest_grid(comparison)
    if grid:
        strategies = list(dict.fromkeys(strategy for row in grid.values() for strategy in row))
        if any(method.fully_tested() for row in grid.values() for method in row.values()):
            yield _heat_maps(comparison, grid, strategies)
        yield _convergence(comparison, grid, strategies)


def _convergence(comparison: Comparison, grid: Grid, strategies: list[str]) -> FigureDraft:
    """Draw one panel per client, with one line per strategy (FedHEAL's Fig. 7)."""
    styles = canvas.line_styles(strategies, canvas.METHOD_COLORS, "fedavg")
    sheet, axes = canvas.panel_grid(len(grid), 4, 2.7, 0.4, sharex=True, sharey=True)
    for panel, (client, row) in zip(axes.flat, grid.items(), strict=False):
        for strategy, method in row.items():
            curve = method.curve(lambda accuracy: 100 * AVG(accuracy))
            line(panel, curve.rounds, curve.mean, styles[strategy], curve.whole, label=strategy)
        panel.set_title(client)
    for panel in axes[:, 0]:
        panel.set_ylabel(AVG.axis)
    legend(sheet, *axes.flat)
    return FigureDraft(
        "convergence",
        sheet,
        "Convergence of each kind of local training, by strategy",
        f"Average accuracy over domains, mean over {comparison.replicates}."
        f"{comparison.gaps * f' {canvas.DOTTED}'}",
        f"Average accuracy over rounds in {len(grid)} panels, one for each kind of local training.",
    )


def _heat_maps(comparison: Comparison, grid: Grid, columns: list[str]) -> FigureDraft:
    """Draw heat maps of STD and worst domain, with a row per client and a column per strategy."""
    sheet, axes = panels(1, 2, canvas.FULL, 0.42 * len(grid) + 1.9)
    alt_parts = []
    for panel, summary in zip(axes[0], (STD, MIN), strict=True):
        figure = fairness(comparison)[summary.title]
        less = figure.better < 0
        values = np.full((len(grid), len(columns)), np.nan)
        for r, row in enumerate(grid.values()):
            for strategy, method in row.items():
                if method.fully_tested():
                    values[r, columns.index(strategy)] = method.over_seeds(figure.value).mean
        if not np.isfinite(values).any():
            panel.set_visible(False)
            continue
        image = panel.imshow(values, cmap="viridis_r" if less else "viridis", aspect="auto")
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for r, c in np.ndindex(values.shape):
            if np.isfinite(values[r, c]):
                light = (values[r, c] > middle) != less
                style = {"color": "black" if light else "white", "fontsize": 8.5}
                panel.text(c, r, f"{values[r, c]:.1f}", ha="center", va="center", **style)
        panel.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
        panel.set_yticks(range(len(grid)), list(grid))
        panel.grid(visible=False)
        panel.tick_params(length=0)
        panel.set_title(f"{summary.axis}: {'lower' if less else 'higher'} is fairer")
        sheet.colorbar(image, ax=panel)
        best = np.nanargmin(values) if less else np.nanargmax(values)
        row_of, column_of = divmod(int(best), len(columns))
        alt_parts.append(f"best {summary.title}: {list(grid)[row_of]} with {columns[column_of]}")
    return FigureDraft(
        "product",
        sheet,
        "Local training and aggregation",
        f"{comparison.span().capitalize()}, mean over {comparison.replicates}."
        f"{comparison.gaps * _BLANK}",
        f"Spread and worst domain for every client and strategy; {'; '.join(alt_parts)}.",
    )


def sketches_of_sweeps(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield a figure per sweep: average, worst domain and spread against the argument's value."""
    for number, sweep in enumerate(sweeps(comparison), start=1):
        fair = fairness(comparison)
        figures = [(row.axis, fair[row.title].value) for row in (AVG, MIN, STD)]
        methods = [*sweep.methods, *sweep.others.values()]
        if methods_with_clusters(methods) == methods:
            figures.append(
                ("clustering accuracy, %", lambda run: 100 * run.final_clusters("accuracy"))
            )
        sheet, axes = panels(1, len(figures), canvas.FULL, 3.4)
        for panel, (label, figure) in zip(axes[0], figures, strict=True):
            _draw_sweep_panel(panel, comparison, sweep, figure, styles)
            panel.set_ylabel(label)
        legend(sheet, axes[0, 0])
        several = several_runs(sweep.methods)
        bars = f"; bars: ± sample standard deviation over {comparison.replicates}" * several
        name = sweep.methods[0].strategy
        best = max(sweep.methods, key=lambda method: method.over_seeds(fair[MIN.title].value).mean)
        yield FigureDraft(
            f"sweep-{sweep.key.replace('.', '-')}{f'-{number}' if number > 1 else ''}",
            sheet,
            f"{name}: {sweep.key} from {sweep.values[0]:g} to {sweep.values[-1]:g}",
            f"{comparison.span().capitalize()}{bars}.",
            f"Average, worst domain and spread of {name} for {len(sweep.values)} values of "
            f"{sweep.key}; the worst domain is highest for {best.name}.",
        )


def _draw_sweep_panel(
    panel: Axes,
    comparison: Comparison,
    sweep: Sweep,
    figure: Callable[[Run], float],
    styles: LineStyles,
) -> None:
    """Draw a metric against the argument's value, with lines for other values and baselines."""
    leaf = sweep.key.partition(".")[2]
    estimates = [method.over_seeds(figure) for method in sweep.methods]
    panel.errorbar(
        sweep.values,
        [e.mean for e in estimates],
        yerr=[0 if math.isnan(e.std) else e.std for e in estimates],
        color=canvas.INK,
        marker="o",
        markersize=4,
        capsize=2.5,
        elinewidth=0.9,
        label=sweep.methods[0].strategy,
    )
    for i, (value, method) in enumerate(sweep.others.items()):
        style = LineStyle(canvas.INK, canvas.DASHES[1 + i % (len(canvas.DASHES) - 1)], "")
        _level(panel, method, figure, style, f"{leaf} = {value}")
    for name in BASELINES:
        baseline = comparison.baseline(sweep.methods[0], name)
        if baseline is not None and baseline.fully_tested():
            dash = "--" if name == "fedavg" else (0, (1.5, 2.5))
            style = styles[baseline.name]._replace(dash=dash)
            _level(panel, baseline, figure, style, baseline.name)
    if np.all(sweep.values % 1 == 0):
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    panel.set_xlabel(leaf)


def _level(
    panel: Axes, method: Method, figure: Callable[[Run], float], style: LineStyle, label: str
) -> None:
    level = method.over_seeds(figure).mean
    panel.axhline(level, color=style.color, linestyle=style.dash, linewidth=1.4, label=label)
