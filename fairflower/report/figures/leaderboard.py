"""Figures of the leaderboard: differences to uniform weights, ranks, and every domain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import Drawn, Sketch
from fairflower.report.leaderboard import REFERENCE, WORST, Board
from fairflower.report.statistics import Difference, Ranks
from fairflower.report.text import listed

#: By sign of a difference: worse, none, better.
_COLOURS = {-1: "#b23819", 0: canvas.GREY, 1: "#00a866"}


def draw(board: Board, folder: Path, prefix: str) -> list[Drawn]:
    """Draw all figures into a folder."""
    return canvas.save(_sketches(board), folder, prefix)


def _sketches(board: Board) -> Iterator[Sketch]:
    differences = {name: board.against_reference(name, WORST) for name in board.benchmarks}
    if any(differences.values()):
        yield _differences(differences)
    if board.ranks:
        yield _ranks(board.ranks)
    for benchmark in board.benchmarks:
        yield _domains(board, benchmark)


def _differences(found: Mapping[str, Mapping[str, Difference]]) -> Sketch:
    longest = max(map(len, found.values()))
    sheet, axes = canvas.tiles(len(found), 2, 0.21 * longest + 0.6, 0.2)
    for panel, (benchmark, differences) in zip(axes.flat, found.items(), strict=False):
        ordered = sorted(differences.items(), key=lambda item: item[1].mean)
        for place, (_, one) in enumerate(ordered):
            colour = _COLOURS[one.sign]
            panel.plot([one.low, one.high], [place, place], color=colour, linewidth=1.5)
            panel.plot(one.mean, place, "o", color=colour, markersize=4.5)
        panel.axvline(0.0, color=canvas.INK, linewidth=0.8)
        panel.set_yticks(range(len(ordered)), [name for name, _ in ordered])
        panel.set_title(benchmark)
        panel.set_xlabel(f"worst domain minus that of {REFERENCE}, points")
    told = {b: [n for n, one in d.items() if one.sign > 0] for b, d in found.items()}
    return Sketch(
        "differences",
        sheet,
        f"Worst domain of tuned methods against {REFERENCE}",
        "Mean over seeds and 95 % interval, paired by seed. Coloured: Holm's p below 0.05 over all "
        "methods of the benchmark.",
        "; ".join(f"{b}, better: {listed(names) or 'none'}" for b, names in told.items()),
    )


def _ranks(found: Ranks) -> Sketch:
    ordered = sorted(found.mean.items(), key=lambda item: -item[1])
    sheet, axes = canvas.panels(1, 1, canvas.HALF, 0.21 * len(ordered) + 0.8)
    panel = axes[0, 0]
    best = found.lowest
    for place, (_, rank) in enumerate(ordered):
        apart = rank - best > found.critical
        panel.plot(rank, place, "o", color=canvas.GREY if apart else canvas.INK, markersize=5)
    panel.axvspan(best, best + found.critical, color=canvas.GREY, alpha=0.15, linewidth=0)
    panel.set_yticks(range(len(ordered)), [name for name, _ in ordered])
    panel.set_xlabel("mean rank of the worst domain over benchmarks")
    return Sketch(
        "ranks",
        sheet,
        "Ranks over benchmarks",
        f"1 is best. Grey: Nemenyi's critical difference, {found.critical:.1f}, from the best. "
        f"Friedman's p = {found.p:.3g}.",
        f"The lowest mean rank, {best:.1f}, is that of {listed(found.best)}.",
    )


def _domains(board: Board, benchmark: str) -> Sketch:
    found = board.by_domain(benchmark)
    order = board.figures(benchmark, WORST).mean(axis=1).sort_values(kind="stable").index
    sheet, axes = canvas.panels(1, len(found), canvas.FULL, 0.21 * len(order) + 0.8, sharey=True)
    for panel, (domain, figures) in zip(axes.flat, found.items(), strict=True):
        for place, name in enumerate(order):
            seeds = figures.loc[name].dropna()
            panel.plot(seeds, [place] * len(seeds), "|", color=canvas.GREY, markersize=6)
            panel.plot(seeds.mean(), place, "o", color=canvas.INK, markersize=4.5)
        if REFERENCE in order:
            mean = figures.loc[REFERENCE].mean()
            panel.axvline(mean, color=canvas.GREY, linestyle="--", linewidth=1)
        panel.set_yticks(range(len(order)), order)
        panel.set_title(domain)
        panel.set_xlabel("%")
    hardest = min(found, key=lambda domain: float(found[domain].mean(axis=1).mean()))
    return Sketch(
        f"domains-{benchmark}",
        sheet,
        f"{benchmark}: every domain",
        "Tuned methods, the best worst domain on top. Dots: means over seeds, which are the "
        f"strokes. Dashed: {REFERENCE}.",
        f"{len(order)} methods on {listed([*found])}; on average they are worst on {hardest}.",
    )
