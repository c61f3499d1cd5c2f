"""Figures of clusters of clients: their quality over rounds, and maps of the clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fairflower.numerics import Vector
from fairflower.report.clusters import (
    IDS,
    MAP,
    ClusterHistory,
    ClusterMetric,
)
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, LineStyles, legend, panels
from fairflower.report.methods import (
    Comparison,
    Curve,
    Method,
    methods_with_clusters,
    several_runs,
)

#: Diagnostics that this module draws for runs with clusters.
DRAWN = frozenset({IDS, *MAP, "num_clusters"})

#: Number of maps per run, in evenly spaced rounds.
_MAPS = 6
_COLUMNS = 3
#: Markers of the clusters. They repeat if there are more clusters than markers.
_MARKERS = "os^DvPX*<>"

_FIGURES: tuple[tuple[ClusterMetric, str, float], ...] = (
    ("number", "number of clusters", 1),
    ("accuracy", "clustering accuracy, %", 100),
    ("rand", "adjusted Rand index", 1),
)


def sketches(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield the figures of methods that recorded clusters."""
    methods = methods_with_clusters(comparison.methods)
    if not methods:
        return
    yield _over_rounds(methods, styles, comparison.replicates)
    domains = canvas.line_styles(comparison.domains, canvas.DOMAIN_COLORS)
    for number, method in enumerate(methods, start=1):
        history = method.runs[0].clusters
        if history and np.isfinite(history.map).any():
            yield _maps(method, history, domains, f"-{number}" if len(methods) > 1 else "")


def _over_rounds(methods: list[Method], styles: LineStyles, replicates: str) -> FigureDraft:
    sheet, axes = panels(1, len(_FIGURES), canvas.FULL, 3.4)
    alt_parts, lowest = [], 0.0
    for panel, (name, label, unit) in zip(axes[0], _FIGURES, strict=True):
        for method in methods:
            histories = [run.clusters for run in method.runs if run.clusters]
            rounds = reduce(np.intersect1d, [c.rounds for c in histories])
            if not rounds.size:
                continue
            values = [unit * c.metric(name)[np.isin(c.rounds, rounds)] for c in histories]
            curve = Curve.of(rounds, np.array(values))
            if name == "rand":
                lowest = min(lowest, float((curve.mean - curve.spread).min()))
            canvas.curve(panel, curve, styles[method.name], method.name)
            alt_parts.append(f"{method.name} {label} {curve.mean[-1]:.3g}")
        panel.set_ylabel(label)
    types = {len(np.unique(c.types)) for m in methods for run in m.runs if (c := run.clusters)}
    for count in types:
        axes[0, 0].axhline(count, color=canvas.GRAY, linestyle=":", linewidth=1)
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 1].set_ylim(0, 104)
    axes[0, 2].set_ylim(lowest, 1.04)
    legend(sheet, axes[0, 0])
    several = several_runs(methods)
    band = f" Band: ± sample standard deviation over {replicates}." * several
    return FigureDraft(
        "clusters",
        sheet,
        "Clusters of clients over rounds",
        "Clusters compared with the clients' true types (domains). Dotted: number of types. "
        "Clustering accuracy: fraction of the round's clients whose type is the most common in "
        f"their cluster. Adjusted Rand index: 1 if clusters match types, 0 at chance level.{band}",
        f"In the last round: {'; '.join(alt_parts)}.",
    )


def _maps(method: Method, history: ClusterHistory, domains: LineStyles, suffix: str) -> FigureDraft:
    """Draw a map for each chosen round. The color shows the type, and the marker the cluster."""
    history = history._replace(map=aligned(history.map))
    mapped = np.flatnonzero(np.isfinite(history.map).any(axis=(1, 2)))
    chosen = mapped[np.unique(np.linspace(0, len(mapped) - 1, _MAPS).round().astype(int))]
    names = np.unique(history.ids[chosen][np.isfinite(history.ids[chosen])])
    markers = {name: _MARKERS[i % len(_MARKERS)] for i, name in enumerate(names)}
    sheet, axes = canvas.panel_grid(len(chosen), _COLUMNS, 3.3, 1.0)
    number, accuracy = history.metric("number"), history.metric("accuracy")
    for panel, r in zip(axes.flat, chosen, strict=False):
        _map(panel, history, r, domains, markers)
        noun = "cluster" if number[r] == 1 else "clusters"
        panel.set_title(
            f"round {history.rounds[r]}: {number[r]:.0f} {noun}, "
            f"clustering accuracy {100 * accuracy[r]:.0f} %"
        )
    for panel in axes[:, 0]:
        panel.set_ylabel("second principal axis")
    for column in axes.T:
        lowest = [panel for panel in column if panel.get_visible()][-1]
        lowest.set_xlabel("first principal axis")
    types = dict.fromkeys(history.types.tolist())
    _key(sheet, "outside upper left", [_dot(domains[d].color, "o", d) for d in types])
    dots = [_dot(canvas.GRAY, marker, f"cluster {name:.0f}") for name, marker in markers.items()]
    _key(sheet, "outside lower center", dots)
    end = chosen[-1]
    return FigureDraft(
        f"clients-map{suffix}",
        sheet,
        f"{method.name}: maps of the clients' representations",
        "Clients on the first two principal axes of the round's representations. The axes differ "
        "between rounds, but their signs are chosen so that consecutive maps agree. Color: the "
        "client's true type (domain). Marker: the client's cluster, with a thin line to its "
        f"center. Seed {method.runs[0].seed}.",
        f"Clusters in round {history.rounds[end]}. {_said(history, int(end))}",
    )


def aligned(maps: Vector) -> Vector:
    """Flip the axes of maps, [R, K, 2], where needed to match the previous map.

    The sign of a principal axis is arbitrary. The chosen sign minimizes the sum of
    squared distances between the clients' positions on consecutive maps.
    """
    turned = maps.copy()
    before = np.zeros_like(maps[0])
    for r in np.flatnonzero(np.isfinite(maps).any(axis=(1, 2))):
        turned[r] *= np.where(np.nansum(before * turned[r], axis=0) < 0, -1, 1)
        before = turned[r]
    return turned


def _map(
    panel: Axes, history: ClusterHistory, r: int, domains: LineStyles, markers: Mapping[float, str]
) -> None:
    there = np.isfinite(history.map[r]).all(axis=1)
    for name in np.unique(history.ids[r, there]):
        inside = there & (history.ids[r] == name)
        places = history.map[r, inside]
        middle = places.mean(axis=0)
        thin: dict[str, Any] = {"color": canvas.GRAY, "linewidth": 0.7, "alpha": 0.8, "zorder": 1}
        for x, y in places:
            panel.plot([middle[0], x], [middle[1], y], **thin)
        panel.scatter(
            places[:, 0],
            places[:, 1],
            s=38,
            marker=markers[name],
            c=[domains[domain].color for domain in history.types[inside]],
            edgecolors=canvas.INK,
            linewidths=0.4,
            alpha=0.85,
            zorder=2,
        )
    panel.set_aspect("equal", adjustable="datalim")  # distances are meaningful in all directions
    panel.margins(0.08)
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.yaxis.set_major_locator(MaxNLocator(5))


def _key(
    sheet: Figure, place: Literal["outside upper left", "outside lower center"], dots: list[Line2D]
) -> None:
    columns = canvas.legend_columns(sheet, [str(dot.get_label()) for dot in dots], 0.5)
    sheet.legend(handles=dots, loc=place, ncols=columns)


def _dot(color: str, marker: str, label: str) -> Line2D:
    return Line2D([], [], color=color, marker=marker, linestyle="", markersize=6, label=label)


def _said(history: ClusterHistory, r: int) -> str:
    """Describe the clusters in words: ``Cluster 0: 10 mnist. Cluster 3: 2 svhn, 1 syn.``"""
    parts = []
    for name in np.unique(history.ids[r][np.isfinite(history.ids[r])]):
        counts = Counter(history.types[history.ids[r] == name].tolist()).most_common()
        parts.append(f"Cluster {name:.0f}: {', '.join(f'{n} {domain}' for domain, n in counts)}.")
    return " ".join(parts)
