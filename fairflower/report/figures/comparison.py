"""The figures of a comparison: accuracy, grids, sweeps, groups of people and trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairflower.config.text import counted, unknown
from fairflower.errors import ConfigError
from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import DIFFERENCES
from fairflower.numerics.metrics import AVG, MIN, STD, Summary
from fairflower.numerics.scores import ACCURACY
from fairflower.report.figures import canvas, diagnostics
from fairflower.report.figures.canvas import (
    FigureDraft,
    LineStyle,
    LineStyles,
    PageFigure,
    legend,
    line,
    panels,
    slug,
)
from fairflower.report.grids import Sweep, largest_grid, sweeps
from fairflower.report.measures import by_attribute, fairness
from fairflower.report.methods import (
    BASELINES,
    Comparison,
    Curve,
    Method,
    methods_with_clusters,
    several_runs,
)
from fairflower.report.reading import Run
from fairflower.report.text import format_number
from fairflower.report.tuning import SHOWN, Tuned

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
    sketches = chain(_sketches(comparison), sketches_of_trials(tuned))
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
    yield from sketches_of_groups(comparison, styles)
    yield from sketches_of_products(comparison)
    yield from sketches_of_sweeps(comparison, styles)
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
        curve = method.curve(lambda accuracy: row.shown(row(accuracy)))
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
            curve = method.curve(lambda accuracy: ACCURACY.shown(float(accuracy[0])), [d])
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
            method.over_seeds(lambda run, d=d: ACCURACY.shown(float(run.final()[d])))  # type: ignore[misc]
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
                values.setdefault((client.domain, client.client_id), []).append(
                    ACCURACY.shown(accuracy)
                )
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


# --- grids and sweeps ---------------------------------------------------------------

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
            curve = method.curve(lambda accuracy: AVG.shown(AVG(accuracy)))
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
                (
                    "clustering accuracy, %",
                    lambda run: ACCURACY.shown(run.final_clusters("accuracy")),
                )
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


# --- groups of people ---------------------------------------------------------------


def sketches_of_groups(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield one figure per sensitive attribute, with one panel per difference."""
    for attribute, methods in by_attribute(comparison):
        sheet, axes = panels(1, len(DIFFERENCES), canvas.FULL, 3.0)
        alt_parts = []
        for panel, metric in zip(axes[0], DIFFERENCES, strict=True):
            for method in methods:
                series = [
                    (r.rounds, ACCURACY.shown(r.group_metrics[metric.name].accuracy[:, 0]))
                    for r in method.runs
                ]
                curve = canvas.common_curve(series)
                if curve.rounds.size:
                    canvas.curve(panel, curve, styles[method.name], method.name)
                    last = format_number(curve.mean[-1], 1)
                    alt_parts.append(f"{metric.phrase} of {method.name} {last}")
            panel.set_title(metric.phrase.removesuffix(" difference"))
            panel.set_xlabel("round")
            panel.set_ylim(bottom=0)  # a band of standard deviations would go below
        axes[0, 0].set_ylabel("difference, points")
        legend(sheet, axes[0, 0])
        yield FigureDraft(
            f"groups-{slug(attribute)}",
            sheet,
            f"Differences between groups by {attribute} over rounds",
            "Computed for all people, from counts summed over clients. 0 means equality. Line: "
            f"mean over {comparison.replicates}.",
            f"Differences between groups in the last round: {'; '.join(alt_parts)}.",
        )


# --- trials -------------------------------------------------------------------------

#: Line style of each summary in `SHOWN`, by label.
_LOOKS = canvas.line_styles([row.phrase for row in SHOWN], canvas.METHOD_COLORS)


def sketches_of_trials(tuned: Sequence[Tuned]) -> Iterator[FigureDraft]:
    """Yield one figure per tuned method, with one panel per argument."""
    for place, method in enumerate(tuned, start=1):
        if method.ranges and method.completed:
            yield _trials(method, place)


def _trials(method: Tuned, place: int) -> FigureDraft:
    best = method.chosen
    assert best is not None
    sheet, axes = canvas.panel_grid(len(method.ranges), 4, 2.9, 0.4, narrow=2, sharey=True)
    for panel, (key, search) in zip(axes.flat, method.ranges.items(), strict=False):
        for row, (label, style) in zip(SHOWN, _LOOKS.items(), strict=True):
            values = [trial.values[key] for trial in method.completed]
            y = [trial.percent(row) for trial in method.completed]
            panel.plot(values, y, style.marker, color=style.color, markersize=5, label=label)
        default = method.trials[0].values[key]
        panel.axvline(
            default, color=canvas.GRAY, linestyle="--", linewidth=1, label="paper's value"
        )
        x, y = [best.values[key]] * 2, [best.percent(row) for row in SHOWN]
        panel.scatter(x, y, 120, facecolors="none", edgecolors=canvas.INK, label="chosen")
        if search.log:
            panel.set_xscale("log")
        panel.set_xlabel(key)
    for panel in axes[:, 0]:
        panel.set_ylabel("on validation examples, %")
    legend(sheet, *axes.flat)
    left = len(method.trials) - len(method.completed)
    missing = f" Not shown: {counted(left, 'lost or unfinished trial')}." if left else ""
    return FigureDraft(
        f"tuning-{place}",
        sheet,
        f"{method.method}: {len(method.completed)} trials",
        "Accuracy on validation examples against the value of each argument. Trials differ in all "
        f"arguments at once. Dashed line: the paper's value. Ring: the chosen trial.{missing}",
        f"Worst domain and average of {len(method.completed)} trials of {method.method}; the "
        f"chosen trial has {' and '.join(f'{best.percent(row):.1f}' for row in SHOWN)}.",
    )
