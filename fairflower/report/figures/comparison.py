"""The figures of a comparison: the primary score, grids, sweeps, groups of people and trials."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairflower.config.text import counted, grouped, unknown
from fairflower.errors import ConfigError
from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import DIFFERENCES
from fairflower.numerics.metrics import AVG, Summary, over_domains
from fairflower.numerics.scores import ACCURACY
from fairflower.report.cells import capitalized, column, format_number
from fairflower.report.contrasts import Contrasts, contrasts_of, over, signed
from fairflower.report.figures import canvas, diagnostics, examples
from fairflower.report.figures.canvas import FigureDraft, LineStyles, PageFigure
from fairflower.report.gains import cross_tested, elsewhere
from fairflower.report.methods import (
    BASELINES,
    Comparison,
    Curve,
    Method,
    Sweep,
    client_strategy_grids,
    several_runs,
    sweeps,
)
from fairflower.report.reading import CLUSTER_SCORES, Run
from fairflower.report.tables import columns
from fairflower.report.tuning import Tuned, shown_rows
from fairflower.statistics import MIN_PAIRS, MeanStd

_ZOOM = "Right: the second half of the rounds, enlarged."

#: Minimum number of tested rounds for a second panel that enlarges the second half.
_MIN_ROUNDS_TO_ZOOM = 8


def draw(
    comparison: Comparison,
    contrasts: Sequence[Contrasts],
    folder: Path,
    prefix: str = "",
    tuned: Sequence[Tuned] = (),
    pdf: bool = False,
) -> list[PageFigure]:
    """Draw every figure and save it as ``folder/<prefix><name>.png``, ``.svg`` and maybe PDF."""
    sketches = chain(_sketches(comparison, contrasts), sketches_of_trials(tuned))
    return canvas.save(sketches, folder, prefix, pdf)


def plot(comparison: Comparison, name: str) -> Figure:
    """Return a figure by name. Raises ``ConfigError`` if `draw` saves no figure with this name."""
    names = []
    with canvas.styled():
        for sketch in _sketches(comparison, contrasts_of(comparison)):
            if sketch.name == name:
                return sketch.figure
            names.append(sketch.name)
    raise ConfigError(unknown("figure", name, names))


def _sketches(comparison: Comparison, contrasts: Sequence[Contrasts]) -> Iterator[FigureDraft]:
    fedavg = next((m.name for m in comparison.methods if m.strategy == "fedavg"), None)
    styles = canvas.line_styles([m.name for m in comparison.methods], canvas.METHOD_COLORS, fedavg)
    average, worst, spread, _ = over_domains(comparison.score)
    over_rounds = (
        ("average", f"Average {comparison.score.title} over rounds", average),
        ("worst", "Worst domain over rounds", worst),
        ("std", "Spread across domains over rounds", spread),
    )
    yield from _differences(comparison, contrasts[0])
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
    yield from sketches_of_own_models(comparison)
    yield from examples.sketches(comparison, styles)
    yield from sketches_of_groups(comparison, styles)
    yield from sketches_of_products(comparison)
    yield from sketches_of_sweeps(comparison, styles)
    yield from diagnostics.sketches(comparison, styles)


def _differences(comparison: Comparison, contrasts: Contrasts) -> Iterator[FigureDraft]:
    """Draw differences from uniform weights (or FedAvg) that have enough pairs for a verdict."""
    by_method = {
        name: {heading: one for heading, one in of.items() if one.n >= MIN_PAIRS}
        for name, of in contrasts.against_baselines.items()
    }
    headings = [heading for of_method in by_method.values() for heading in of_method]
    if not headings:
        return
    reference = max(headings, key=[*BASELINES.values()].index)
    found = {name: of[reference] for name, of in by_method.items() if reference in of}
    titles = [m.title for m in contrasts.measure.metrics if len(comparison.domains) > 1] or [
        AVG.title
    ]
    height = len(titles) * (0.55 + 0.22 * len(found))
    sheet, axes = canvas.panels(len(titles), 1, canvas.NARROW, height, sharey=True)
    alt_parts, lines = [], {"Dot: mean over pairs": None}
    for panel, title in zip(axes.flat, titles, strict=True):
        for place, (name, contrast) in enumerate(found.items()):
            one = contrast[title]
            mean, low, high = one.difference.mean, one.difference.low, one.difference.high
            ends = [[mean - low], [high - mean]] if high - low < one.metric.largest else None
            lines |= {"line: simultaneous 95 % interval": None} if ends else {}
            style = {"color": canvas.INK, "capsize": 3, "markersize": 5}
            panel.errorbar([mean], [place], xerr=ends, fmt="o", **style)
            alt_parts.append(f"{name} {title} {signed(one.difference)}")
        panel.axvline(0, color=canvas.INK, linewidth=0.8)
        if margin := one.metric.judged * np.nan_to_num(one.difference.margin):
            lines |= {"gray: margin of equivalence": None}
            panel.axvspan(-margin, margin, color=canvas.GRAY, alpha=0.15, linewidth=0)
        unit = f", {one.metric.points}" if one.metric.points else ""
        better = "right" if one.metric.better > 0 else "left"
        panel.set_xlabel(f"{title} minus {reference}'s{unit} ({better} is better)")
    axes[0, 0].set_yticks(range(len(found)), list(found))
    axes[0, 0].set_ylim(len(found) - 0.4, -0.6)
    yield FigureDraft(
        "differences",
        sheet,
        f"Differences from {reference}, {comparison.span()}",
        f"{'; '.join(lines)}.",
        f"Differences from {reference}: {'; '.join(alt_parts)}.",
        first=True,
    )


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
    sheet, axes = canvas.panels(1, 1 + zooms, canvas.FULL if zooms else canvas.HALF, 3.4)
    alt_parts = []
    for method in comparison.methods:
        curve = method.curve(lambda values: row.shown(row(values)))
        if not curve.rounds.size:
            continue  # runs that were read from a summary have no rounds in common
        canvas.curve(axes[0, 0], curve, styles[method.name], method.name)
        late = curve.rounds >= (half or 0)
        if zooms and late.any():
            canvas.curve(axes[0, 1], Curve._make(v[late] for v in curve), styles[method.name])
        mark = "" if curve.whole[-1] else " (not of all domains)"
        last = format_number(curve.mean[-1], row.digits - 1)
        alt_parts.append(f"{method.name} {last} at round {curve.rounds[-1]}{mark}")
    axes[0, 0].set_ylabel(row.axis)
    canvas.legend(sheet, axes[0, 0])
    caption = _curve_caption(comparison, canvas.DOTTED, zooms * _ZOOM)
    return FigureDraft(
        name, sheet, title, caption, f"{row.axis}, by round: {'; '.join(alt_parts)}."
    )


def _curve_caption(comparison: Comparison, gaps: str, further: str = "") -> str:
    line = f"Line: mean over {comparison.replicates}; band: ± their sample standard deviation."
    parts = (several_runs(comparison.methods) * line, comparison.gaps * gaps, further)
    return " ".join(filter(None, parts))


def _domains(comparison: Comparison, styles: LineStyles) -> FigureDraft:
    score = comparison.score
    curves = {
        domain: {
            method.name: method.curve(lambda values: score.shown(float(values[0])), [d])
            for method in comparison.methods
        }
        for d, domain in enumerate(comparison.domains)
    }
    return FigureDraft(
        "domains",
        canvas.curve_panels(curves, styles, score.axis, narrow=2),
        f"{comparison.heading} per domain over rounds",
        _curve_caption(comparison, "Thin dotted line: rounds in which the domain was not tested."),
        f"{comparison.heading} over rounds in {len(curves)} panels, one for each domain.",
    )


def _bars(comparison: Comparison, styles: LineStyles, width: float) -> FigureDraft:
    methods, score, span = comparison.methods, comparison.score, comparison.span()
    sheet, panel, places = _by_domain(comparison, methods, width)
    thick = 0.8 / len(methods)
    of_domains = columns(comparison)[: len(comparison.domains)]
    alt_parts = []
    for method, centers in zip(methods, places, strict=True):
        estimates = [domain.estimate(method) for domain in of_domains]
        means = [estimate.mean for estimate in estimates]
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
            style: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 8}
            floor = panel.get_xaxis_transform()
            panel.text(centers[d], 0.02, "not tested", transform=floor, **style)
        values = zip(comparison.domains, means, strict=True)
        digits = score.digits - 1
        shown = ", ".join(f"{name} {format_number(mean, digits)}" for name, mean in values)
        alt_parts.append(f"{method.name}: {shown}")
    if score.low == 0:  # bars begin at 0
        panel.set_ylim(0, score.shown(score.high) if math.isfinite(score.high) else None)
    over = f"over {comparison.replicates}"
    several = f" and {over}; error bars: ± sample standard deviation {over}"
    canvas.legend(sheet, panel)
    return FigureDraft(
        "bars",
        sheet,
        f"{comparison.heading} per domain, {span}",
        f"{span.capitalize()}{several_runs(methods) * several}.",
        f"{capitalized(score.stated.replace('in %', 'in percent'))}, {span}. "
        f"{'; '.join(alt_parts)}.",
    )


def _clients(comparison: Comparison, methods: Sequence[Method], styles: LineStyles) -> FigureDraft:
    sheet, panel, places = _by_domain(comparison, methods, canvas.HALF)
    for method, centers in zip(methods, places, strict=True):
        style = styles[method.name]
        values = grouped(
            ((client.domain, client.client_id), value)
            for run in method.runs
            if run.by_client.rounds.size
            for client, value in zip(run.clients, run.by_client.final(), strict=True)
        )
        panel.scatter(
            [centers[comparison.domains.index(domain)] for domain, _ in values],
            [np.mean(comparison.score.shown(np.array(of))) for of in values.values()],
            s=22,
            marker=style.marker,
            color=style.color,
            alpha=0.75,
            linewidths=0,
            label=method.name,
        )
    canvas.legend(sheet, panel)
    name, span = comparison.score.title, comparison.span()
    over_runs = several_runs(methods) * f" and over {comparison.replicates}"
    return FigureDraft(
        "clients",
        sheet,
        f"{comparison.heading} per client, {span}",
        f"Each point is the {name} of a client on its own {comparison.examples} data, {span}"
        f"{over_runs}.",
        f"{comparison.heading} of every client, grouped by domain and method.",
    )


def _by_domain(
    comparison: Comparison, methods: Sequence[Method], width: float
) -> tuple[Figure, Axes, Vector]:
    """Return a figure, its panel with the domains on the x axis, and places [methods, D] on it."""
    sheet, ((panel,),) = canvas.panels(1, 1, width, 3.4)
    panel.set_xticks(range(len(comparison.domains)), comparison.domains)
    panel.set_xlim(-0.5, len(comparison.domains) - 0.5)
    panel.grid(visible=False, axis="x")
    panel.set_ylabel(comparison.score.axis)
    beside = 0.8 * ((np.arange(len(methods)) + 0.5) / len(methods) - 0.5)
    return sheet, panel, np.arange(len(comparison.domains), dtype=np.float64) + beside[:, None]


# --- grids and sweeps ---------------------------------------------------------------

Grid = Mapping[str, Mapping[str, Method]]

_BLANK = " Blank: not run, or not tested on every domain in all of these rounds."


def sketches_of_products(comparison: Comparison) -> Iterator[FigureDraft]:
    """Yield heat maps and a convergence figure of the largest grid; nothing if there is no grid.

    The latter has one panel per client, with one line per strategy (FedHEAL's Fig. 7).
    """
    grid = next(iter(client_strategy_grids(comparison)), None)
    if grid is None:
        return
    strategies = list(dict.fromkeys(strategy for row in grid.values() for strategy in row))
    if any(method.fully_tested() for row in grid.values() for method in row.values()):
        yield _heat_maps(comparison, grid, strategies)

    row = over_domains(comparison.score).average

    def average(method: Method) -> Curve:
        curve = method.curve(lambda values: row.shown(row(values)))
        return curve._replace(spread=np.zeros(len(curve.rounds)))

    curves = {client: {s: average(m) for s, m in under.items()} for client, under in grid.items()}
    styles = canvas.line_styles(strategies, canvas.METHOD_COLORS, "fedavg")
    yield FigureDraft(
        "convergence",
        canvas.curve_panels(curves, styles, row.axis),
        "Convergence of each kind of local training, by strategy",
        f"Average {comparison.score.title} over domains, mean over {comparison.replicates}."
        f"{comparison.gaps * f' {canvas.DOTTED}'}",
        f"Average {comparison.score.title} over rounds in {len(grid)} panels, one for each kind of "
        "local training.",
    )


def _heat_maps(comparison: Comparison, grid: Grid, columns: list[str]) -> FigureDraft:
    """Draw heat maps of STD and worst domain, with a row per client and a column per strategy."""
    sheet, axes = canvas.panels(1, 2, canvas.FULL, 0.42 * len(grid) + 1.9)
    alt_parts = []
    _, worst, spread, _ = over_domains(comparison.score)
    for panel, summary in zip(axes[0], (spread, worst), strict=True):
        estimate, less = over(summary, comparison), summary.better < 0
        values = np.full((len(grid), len(columns)), np.nan)
        for r, row in enumerate(grid.values()):
            for strategy, method in row.items():
                if method.fully_tested():
                    values[r, columns.index(strategy)] = estimate(method).mean
        if not np.isfinite(values).any():
            panel.set_visible(False)
            continue
        _heat_map(sheet, panel, values, (list(grid), columns), summary.digits - 1, less)
        panel.set_title(f"{summary.axis}: {'lower' if less else 'higher'} is fairer")
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


def _heat_map(
    sheet: Figure,
    panel: Axes,
    values: Vector,
    names: tuple[Sequence[str], Sequence[str]],
    digits: int,
    less: bool,
) -> None:
    """Draw a heat map of values [R, C], with ``names`` of rows and columns; bright is better."""
    image = panel.imshow(values, cmap="viridis_r" if less else "viridis", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for r, c in np.ndindex(values.shape):
        if np.isfinite(values[r, c]):
            light = (values[r, c] > middle) != less
            style: dict[str, Any] = {"color": "black" if light else "white", "fontsize": 8.5}
            panel.text(c, r, f"{values[r, c]:.{digits}f}", ha="center", va="center", **style)
    panel.set_xticks(range(len(names[1])), names[1], rotation=30, ha="right")
    panel.set_yticks(range(len(names[0])), names[0])
    panel.grid(visible=False)
    panel.tick_params(length=0)
    sheet.colorbar(image, ax=panel)


def sketches_of_own_models(comparison: Comparison) -> Iterator[FigureDraft]:
    """Yield a heat map of models that were trained alone: trained at a domain, tested on each."""
    score = comparison.score
    for number, method in enumerate(cross_tested(comparison), start=1):
        of_runs, *places = elsewhere(method)
        means = score.shown(np.ma.masked_invalid(of_runs).mean(axis=0).filled(np.nan))
        rows, columns = ([comparison.domains[d] for d in of] for of in places)
        values = means[np.ix_(*places)]
        sheet, axes = canvas.panels(1, 1, canvas.HALF, 0.42 * len(values) + 1.9)
        _heat_map(sheet, axes[0, 0], values, (rows, columns), score.digits - 1, score.better < 0)
        axes[0, 0].set_ylabel("trained at")
        axes[0, 0].set_xlabel("tested on")
        yield FigureDraft(
            f"{method.strategy}{f'-{number}' if number > 1 else ''}",
            sheet,
            f"Models trained alone, on every domain: {method.name}",
            f"{capitalized(score.stated.replace('in %', 'in percent'))}, last round, mean over the "
            f"domain's clients and over {comparison.replicates}.",
            f"{comparison.heading} of models trained at one domain and tested on each.",
        )


def sketches_of_sweeps(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield a figure per sweep: average, worst domain and spread against the argument's value."""
    for number, sweep in enumerate(sweeps(comparison), start=1):
        average, worst, spread, _ = over_domains(comparison.score)
        metrics = {row.axis: over(row, comparison) for row in (average, worst, spread)}
        methods = [*sweep.methods, *sweep.others.values()]
        if all(run.clusters for method in methods for run in method.runs):
            score = CLUSTER_SCORES["accuracy"]
            of_clusters = column(score.title, partial(Run.final_clusters, name="accuracy"), score)
            metrics[score.axis] = of_clusters.estimate
        sheet, axes = canvas.panels(1, len(metrics), canvas.FULL, 3.4)
        for panel, (label, estimate) in zip(axes[0], metrics.items(), strict=True):
            _draw_sweep_panel(panel, comparison, sweep, estimate, styles)
            panel.set_ylabel(label)
        canvas.legend(sheet, axes[0, 0])
        several = several_runs(sweep.methods)
        bars = f"; bars: ± sample standard deviation over {comparison.replicates}" * several
        name = sweep.methods[0].strategy
        least = metrics[worst.axis]
        best = max(sweep.methods, key=lambda method: worst.better * least(method).mean)
        place = "highest" if worst.better > 0 else "lowest"
        yield FigureDraft(
            f"sweep-{sweep.key.replace('.', '-')}{f'-{number}' if number > 1 else ''}",
            sheet,
            f"{name}: {sweep.key} from {sweep.values[0]:g} to {sweep.values[-1]:g}",
            f"{comparison.span().capitalize()}{bars}.",
            f"Average, worst domain and spread of {name} for {len(sweep.values)} values of "
            f"{sweep.key}; the worst domain is {place} for {best.name}.",
        )


def _draw_sweep_panel(
    panel: Axes,
    comparison: Comparison,
    sweep: Sweep,
    estimate: Callable[[Method], MeanStd],
    styles: LineStyles,
) -> None:
    """Draw a metric against the argument's value, with lines for other values and baselines."""
    leaf = sweep.key.partition(".")[2]
    estimates = [*map(estimate, sweep.methods)]
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
    levels: list[tuple[Method, str, Any, str]] = []
    for i, (value, method) in enumerate(sweep.others.items()):
        dash = canvas.DASHES[1 + i % (len(canvas.DASHES) - 1)]
        levels.append((method, canvas.INK, dash, f"{leaf} = {value}"))
    for name in BASELINES:
        baseline = comparison.baseline(sweep.methods[0], name)
        if baseline is not None and baseline.fully_tested():
            dash = "--" if name == "fedavg" else (0, (1.5, 2.5))
            levels.append((baseline, styles[baseline.name].color, dash, baseline.name))
    for method, color, dash, label in levels:
        mean = estimate(method).mean
        panel.axhline(mean, color=color, linestyle=dash, linewidth=1.4, label=label)
    if np.all(sweep.values % 1 == 0):
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    panel.set_xlabel(leaf)


# --- groups of people ---------------------------------------------------------------


def sketches_of_groups(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield one figure per sensitive attribute, with one panel per difference."""
    for attribute, methods in comparison.attributes():
        curves = {
            metric.phrase.removesuffix(" difference"): {
                method.name: canvas.common_curve(
                    [
                        (run.rounds, ACCURACY.shown(run.group_metrics[metric.name].values[:, 0]))
                        for run in method.runs
                    ]
                )
                for method in methods
            }
            for metric in DIFFERENCES
        }
        sheet = canvas.curve_panels(curves, styles, "difference, points")
        for panel in sheet.axes:
            panel.set_ylim(bottom=0)  # a band of standard deviations would go below
        last = [
            f"{what} of {name} {format_number(curve.mean[-1], 1)}"
            for what, of in curves.items()
            for name, curve in of.items()
            if curve.rounds.size
        ]
        yield FigureDraft(
            f"groups-{canvas.slug(attribute)}",
            sheet,
            f"Differences between groups by {attribute} over rounds",
            "Computed for all people, from counts summed over clients. 0 means equality. Line: "
            f"mean over {comparison.replicates}.",
            f"Differences between groups in the last round: {'; '.join(last)}.",
        )


# --- trials -------------------------------------------------------------------------


def sketches_of_trials(tuned: Sequence[Tuned]) -> Iterator[FigureDraft]:
    """Yield one figure per tuned method with a completed trial, with one panel per argument."""
    for place, method in enumerate(tuned, start=1):
        best, count, rows = method.chosen, len(method.completed), shown_rows(method.metric)
        unit = method.metric.unit
        looks = canvas.line_styles([row.phrase for row in rows], canvas.METHOD_COLORS)
        if best is None or not method.ranges:
            continue
        sheet, axes = canvas.panel_grid(len(method.ranges), 4, 2.9, 0.4, narrow=2, sharey=True)
        for panel, (key, search) in zip(axes.flat, method.ranges.items(), strict=False):
            for row, (label, style) in zip(rows, looks.items(), strict=True):
                x = [trial.values[key] for trial in method.completed]
                y = [trial.shown(row) for trial in method.completed]
                panel.plot(x, y, style.marker, color=style.color, markersize=5, label=label)
            default = method.trials[0].values[key]
            dashes: dict[str, Any] = {"color": canvas.GRAY, "linestyle": "--", "linewidth": 1}
            panel.axvline(default, label="paper's value", **dashes)
            x, y = [best.values[key]] * 2, [best.shown(row) for row in rows]
            panel.scatter(x, y, 120, facecolors="none", edgecolors=canvas.INK, label="chosen")
            if search.log:
                panel.set_xscale("log")
            panel.set_xlabel(key)
        for panel in axes[:, 0]:
            panel.set_ylabel(f"on validation examples{unit and f', {unit}'}")
        canvas.legend(sheet, *axes.flat)
        left = len(method.trials) - count
        missing = f" Not shown: {counted(left, 'lost or unfinished trial')}." if left else ""
        yield FigureDraft(
            f"tuning-{place}",
            sheet,
            f"{method.method}: {count} trials",
            f"{capitalized(method.metric.phrase)} on validation examples against the value of each "
            "argument. Trials differ in all arguments at once. Dashed line: the paper's value. "
            f"Ring: the chosen trial.{missing}",
            f"Worst domain and average of {count} trials of {method.method}; the "
            f"chosen trial has {' and '.join(row.text(row(best.scores)) for row in rows)}.",
        )
