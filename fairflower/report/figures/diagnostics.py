"""Figures of diagnostics: clusters, consistency, and values per client, pair and round."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import binom

from fairflower.aggregation.consistency import BINS, histogram
from fairflower.numerics import Vector
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, LineStyles
from fairflower.report.methods import Comparison, Method, several_runs
from fairflower.report.reading import CLUSTER_SCORES, IDS, MAP, ClusterHistory, Run, as_float_array

_UNKNOWN = "unknown"


class DiagnosticSeries(NamedTuple):
    """A diagnostic over R rounds, with values [R], or [R, K] for K clients ordered by domain.

    A value is NaN if the client did not take part. For pairs of clients, the values are those of
    the last round, [K, K].
    """

    rounds: NDArray[np.int64]
    values: Vector
    domains: tuple[str, ...]


def recorded(run: Run, axes: int) -> dict[str, DiagnosticSeries]:
    """Return the diagnostics with a number (``axes`` 0), or one per client (1) or per pair (2)."""
    domain = {client.client_id: client.domain for client in run.clients}
    rank = {name: d for d, name in enumerate(run.domains)}
    ids = {client for record in run.diagnostics for client in record.get("client_ids", [])}
    order = sorted(ids, key=lambda i: (rank.get(domain.get(i, ""), len(rank)), i))
    place = {client: k for k, client in enumerate(order)}
    domains = tuple(domain.get(client, _UNKNOWN) for client in order)
    found: dict[str, list[tuple[int, list[int], Vector]]] = {}  # round, places and values
    for record in run.diagnostics:
        there = [place[client] for client in record.get("client_ids", [])]
        for name in [name for name in record if name not in ("round", "client_ids")]:
            array = as_float_array(record[name], (len(there),) * axes)
            if array is not None:
                found.setdefault(name, []).append((record["round"], there, array))
    series = {}
    for name, rows in found.items():
        rounds, owners = np.array([number for number, *_ in rows]), domains
        if axes == 2:  # only the last round is drawn
            _, there, array = rows[-1]
            k = np.argsort(there)
            rounds, values = rounds[-1:], array[np.ix_(k, k)]
            owners = tuple(domains[i] for i in sorted(there))
        else:
            values = np.full((len(rows), *(len(order),) * axes), np.nan)
            for i, (_, there, array) in enumerate(rows):
                cells: Any = (i, there)[: 1 + axes]
                values[cells] = array
        series[name] = DiagnosticSeries(rounds, values, owners)
    return series


# --- figures -----------------------------------------------------------------------------

_SEED = "Recorded by the strategy; first seed."


def sketches(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield the figures of all recorded diagnostics; references weigh no clients."""
    yield from _cluster_sketches(comparison, styles)
    yield from _consistency(comparison)
    first = {m.name: m.runs[0] for m in comparison.methods if not m.reference}
    drawn = _DRAWN if any(run.clusters for run in first.values()) else frozenset()
    domain_looks = canvas.line_styles([*comparison.domains, _UNKNOWN], canvas.DOMAIN_COLORS)
    for name, vectors in _by_name(1, first, drawn):
        yield _draw_vectors(name, vectors, domain_looks)
    for name, matrices in _by_name(2, first, drawn):
        yield _draw_matrices(name, matrices)
    for name, figures in _by_name(0, first, drawn):
        yield _draw_numbers(name, figures, styles)


def _by_name(
    axes: int, runs: Mapping[str, Run], drawn: Set[str]
) -> Iterator[tuple[str, dict[str, DiagnosticSeries]]]:
    """Yield the name of each diagnostic and {method: series}, beginning with ``weights``."""
    found = {method: recorded(run, axes) for method, run in runs.items()}
    names = dict.fromkeys(n for series in found.values() for n in series if n not in drawn)
    for name in sorted(names, key=lambda name: name != "weights"):
        yield name, {m: series[name] for m, series in found.items() if name in series}


def _draw_vectors(
    name: str, vectors: Mapping[str, DiagnosticSeries], domain_looks: LineStyles
) -> FigureDraft:
    """Draw a row per method: a line per client, and the mean per domain (for weights, the sum)."""
    total = "sum" if name == "weights" else "mean"
    rows = len(vectors)
    sheet, axes = canvas.panels(rows, 2, canvas.FULL, 2.2 * rows + 0.6, sharex=True, sharey="col")
    alt_parts = []
    for (left, right), (method, series) in zip(axes, vectors.items(), strict=True):
        left.set_title(f"{method}: {name} of each client")
        right.set_title(f"{method}: {total} per domain")
        ends = _draw_domains(left, right, series, domain_looks, total)
        alt_parts.append(f"{method}: {', '.join(ends)}")
    for axis in axes[:-1].flat:
        axis.set_xlabel("")
    canvas.legend(sheet, axes[0, 1])
    equal = (
        " Dotted: equal weights."
        if name == "weights"
        else " Band: ± standard deviation over the domain's clients (ddof 0)."
    )
    return FigureDraft(
        f"client-{canvas.slug(name)}",
        sheet,
        f"Client {name} over rounds",
        "Left: one line per client in the color of its domain, from dark to light by client id. "
        f"Right: {total} per domain.{equal} "
        f"{_SEED}",
        f"{name}, {total} per domain in the last round. {'; '.join(alt_parts)}.",
    )


def _draw_domains(
    left: Axes, right: Axes, series: DiagnosticSeries, styles: LineStyles, total: str
) -> list[str]:
    """Draw the lines of clients and domains, and return the domains' last values in words."""
    owners = np.array(series.domains)
    alt_parts = []
    for domain in dict.fromkeys(series.domains):
        style = styles[domain]
        clients = series.values[:, owners == domain]
        for client, color in zip(
            clients.T, canvas.shades(style.color, len(clients.T)), strict=True
        ):
            there = np.isfinite(client)
            gaps: dict[str, Any] = {} if there.all() else {"marker": ".", "markersize": 3}
            gaps |= {"linestyle": "-", "linewidth": 0.9}
            canvas.line(left, series.rounds[there], client[there], style, **gaps, color=color)
        frame = pd.DataFrame(clients)  # pandas skips clients that did not take part (NaN)
        values = frame.agg(total, axis=1).to_numpy()
        if total == "mean":
            spread = frame.std(axis=1, ddof=0).to_numpy()
            canvas.band(right, series.rounds, values, spread, style, alpha=0.15)
        canvas.line(right, series.rounds, values, style, label=domain)
        alt_parts.append(f"{domain} {values[-1]:.3g}")
    if total == "sum":  # weights: draw the values of equal weights
        sizes = {series.domains.count(domain) for domain in series.domains}
        for panel, clients_of in ((left, {1}), (right, sizes)):
            for k in clients_of:
                panel.axhline(k / len(owners), color=canvas.GRAY, linestyle=":", linewidth=1)
    return alt_parts


def _draw_matrices(name: str, matrices: Mapping[str, DiagnosticSeries]) -> FigureDraft:
    """Draw a heat map for each method, with clients ordered by domain."""
    sheet, axes = canvas.panel_grid(len(matrices), 3, 4.2, float(len(matrices) == 1))
    for panel, (method, series) in zip(axes.flat, matrices.items(), strict=False):
        low, high = float(np.nanmin(series.values)), float(np.nanmax(series.values))
        if low < 0 < high:
            high = max(-low, high)
            low = -high
        colors = "RdBu_r" if low < 0 < high else "viridis"
        image = panel.imshow(series.values, cmap=colors, vmin=low, vmax=high, interpolation="none")
        sheet.colorbar(image, ax=panel, shrink=0.85).outline.set_visible(False)
        panel.grid(visible=False)
        panel.set_title(f"{method}, round {series.rounds[-1]}")
        _label_domains(panel, series.domains)
    return FigureDraft(
        f"pairs-{canvas.slug(name)}",
        sheet,
        f"{name} between clients",
        f"One cell per pair of clients, ordered by domain, in the last round. {_SEED}",
        f"Heat map of {name} between clients in the last round, for {', '.join(matrices)}.",
    )


def _label_domains(panel: Axes, domains: Sequence[str]) -> None:
    """Label the block of each domain's clients, and draw lines between the blocks."""
    names = list(dict.fromkeys(domains))
    ends = np.cumsum([domains.count(name) for name in names])
    centers = [end - domains.count(name) / 2 - 0.5 for end, name in zip(ends, names, strict=True)]
    for end in ends[:-1]:
        panel.axhline(end - 0.5, color=canvas.GRAY, linewidth=0.8)
        panel.axvline(end - 0.5, color=canvas.GRAY, linewidth=0.8)
    panel.set_xticks(centers, names)
    panel.set_yticks(centers, names)
    panel.tick_params(length=0)


def _draw_numbers(
    name: str, figures: Mapping[str, DiagnosticSeries], styles: LineStyles
) -> FigureDraft:
    sheet, ((panel,),) = canvas.panels(1, 1, canvas.HALF, 3.0)
    for method, series in figures.items():
        canvas.line(panel, series.rounds, series.values, styles[method], label=method)
    every = np.concatenate([series.values for series in figures.values()])
    if every.min() > 0 and every.max() / every.min() > 1000:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:.0e}")
        panel.minorticks_off()
    panel.set_ylabel(name)
    canvas.legend(sheet, panel)
    last = [f"{method} {series.values[-1]:.4g}" for method, series in figures.items()]
    return FigureDraft(
        f"round-{canvas.slug(name)}",
        sheet,
        f"{name} over rounds",
        _SEED,
        f"{name} in the last round: {', '.join(last)}.",
    )


# --- consistency of parameter updates: FedHEAL's Fig. 2 -----------------------------------

_CONSISTENCY = "consistency_histogram"


def windows(run: Run) -> dict[int, dict[str, Vector]]:
    """Return the fraction of parameters in each bin, by the last round of a window and domain."""
    domain = {client.client_id: client.domain for client in run.clients}
    num_rounds = int(run.config["observe.window"])
    found = {}
    for record in run.diagnostics:
        ids = record.get("client_ids", [])
        rows = as_float_array(record.get(_CONSISTENCY), (len(ids), BINS))
        if rows is not None and 0 < num_rounds <= record["round"]:
            owners = np.array([domain.get(client, _UNKNOWN) for client in ids])
            seen = np.isfinite(rows).all(axis=1)
            shares = {d: rows[seen & (owners == d)] for d in run.domains}
            means = {d: part.mean(axis=0) for d, part in shares.items() if len(part)}
            found[int(record["round"])] = means
    return found


def _consistency(comparison: Comparison) -> Iterator[FigureDraft]:
    """Draw the first and last window of each method that recorded consistency."""
    first = {method.name: method.runs[0] for method in comparison.methods}
    observed = {name: found for name, run in first.items() if (found := windows(run))}
    if not observed:
        return
    styles = canvas.line_styles(comparison.domains, canvas.DOMAIN_COLORS)
    sheet, axes = canvas.panels(
        len(observed), 2, canvas.FULL, 2.4 * len(observed) + 0.6, sharex=True, sharey=True
    )
    alt_parts = []
    for row, (name, found) in zip(axes, observed.items(), strict=True):
        num_rounds = int(first[name].config["observe.window"])
        for panel, last_round in zip(row, (min(found), max(found)), strict=True):
            _draw_window(panel, found[last_round], num_rounds, styles)
            panel.set_title(f"{name}: rounds {last_round - num_rounds + 1} to {last_round}")
        row[0].set_ylabel("parameters, %")
        steady = {d: 100 * share[-1] for d, share in found[max(found)].items()}
        alt_parts.append(
            f"{name}: {', '.join(f'{d} {value:.0f} %' for d, value in steady.items())}"
        )
    for panel in axes[-1]:
        panel.set_xlabel("fraction of rounds with updates of the same sign")
    canvas.legend(sheet, axes[0, 0])
    yield FigureDraft(
        "consistency",
        sheet,
        "Consistency of parameter updates",
        "Fraction of parameters (y) against the fraction of a window's rounds in which their "
        "updates had the same sign (x). Mean over a domain's clients, first seed. Dotted: random "
        "signs.",
        f"Fraction of parameters in the highest bin, last window. {'; '.join(alt_parts)}.",
    )


def _draw_window(
    panel: Axes, shares: Mapping[str, Vector], num_rounds: int, styles: LineStyles
) -> None:
    edges = np.linspace(0.5, 1, BINS + 1)
    style: dict[str, Any] = {"baseline": None, "linewidth": 1.6}
    for domain, share in shares.items():
        panel.stairs(100 * share, edges, color=styles[domain].color, label=domain, **style)
    n = np.arange(num_rounds + 1)
    chance = histogram(n / num_rounds, binom.pmf(n, num_rounds, 0.5))
    panel.stairs(
        100 * chance, edges, color=canvas.GRAY, linestyle=":", label="random signs", **style
    )


# --- clusters of clients, and maps of their representations -------------------------

#: Diagnostics that the figures of clusters show.
_DRAWN = frozenset({IDS, *MAP, "num_clusters"})

#: Number of maps per run, in evenly spaced rounds.
_MAPS = 6
#: Markers of the clusters. They repeat if there are more clusters than markers.
_MARKERS = "os^DvPX*<>"


def _cluster_sketches(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield the figures of methods that recorded clusters."""
    methods = comparison.having(lambda run: run.clusters)
    if not methods:
        return
    yield _over_rounds(methods, styles, comparison.replicates)
    domains = canvas.line_styles(comparison.domains, canvas.DOMAIN_COLORS)
    for number, method in enumerate(methods, start=1):
        history = method.runs[0].clusters
        if history and np.isfinite(history.map).any():
            yield _maps(method, history, domains, f"-{number}" if len(methods) > 1 else "")


def _over_rounds(methods: list[Method], styles: LineStyles, replicates: str) -> FigureDraft:
    sheet, axes = canvas.panels(1, len(CLUSTER_SCORES), canvas.FULL, 3.4)
    alt_parts, lowest = [], 0.0
    for panel, (name, score) in zip(axes[0], CLUSTER_SCORES.items(), strict=True):
        for method in methods:
            histories = [run.clusters for run in method.runs if run.clusters]
            curve = canvas.common_curve(
                [(c.rounds, score.shown(c.metric(name))) for c in histories]
            )
            if not curve.rounds.size:
                continue
            if name == "rand":
                lowest = min(lowest, float((curve.mean - curve.spread).min()))
            canvas.curve(panel, curve, styles[method.name], method.name)
            alt_parts.append(f"{method.name} {score.axis} {curve.mean[-1]:.3g}")
        panel.set_ylabel(score.axis)
    types = {len(np.unique(c.types)) for m in methods for run in m.runs if (c := run.clusters)}
    for count in types:
        axes[0, 0].axhline(count, color=canvas.GRAY, linestyle=":", linewidth=1)
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 1].set_ylim(0, 104)
    axes[0, 2].set_ylim(lowest, 1.04)
    canvas.legend(sheet, axes[0, 0])
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
    sheet, axes = canvas.panel_grid(len(chosen), 3, 3.3, 1.0)
    number, accuracy = history.metric("number"), history.metric("accuracy")
    for panel, r in zip(axes.flat, chosen, strict=False):
        _draw_map(panel, history, r, domains, markers)
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

    def dot(color: str, marker: str) -> Line2D:
        return Line2D([], [], color=color, marker=marker, linestyle="", markersize=6)

    of_types = {domain: dot(domains[domain].color, "o") for domain in types}
    canvas.legend_of(sheet, of_types, "outside upper left", room=0.5)
    of_clusters = {f"cluster {name:.0f}": dot(canvas.GRAY, m) for name, m in markers.items()}
    canvas.legend_of(sheet, of_clusters, room=0.5)
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


def _draw_map(
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


def _said(history: ClusterHistory, r: int) -> str:
    """Describe the clusters in words: ``Cluster 0: 10 mnist. Cluster 3: 2 svhn, 1 syn.``"""
    parts = []
    for name in np.unique(history.ids[r][np.isfinite(history.ids[r])]):
        counts = Counter(history.types[history.ids[r] == name].tolist()).most_common()
        parts.append(f"Cluster {name:.0f}: {', '.join(f'{n} {domain}' for domain, n in counts)}.")
    return " ".join(parts)
