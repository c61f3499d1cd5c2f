"""The document of a leaderboard, with sentences, tables and a figure."""

from __future__ import annotations

from pathlib import Path

from experiments.leaderboard.analysis import Findings, primary
from experiments.leaderboard.sentences import (
    BETTER,
    EQUIVALENT,
    WORSE,
    conclusion,
    kind,
    left,
    recorded,
    sentences,
)
from experiments.leaderboard.tables import tables
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft
from fairflower.report.pages import listed, markdown_of, replace_generated_block

#: Colors of intervals; gray if undecided.
_COLORS = {BETTER: "#00a866", EQUIVALENT: "#19a3ff", WORSE: "#b23819"}


def text(findings: Findings) -> str:
    """Return the sentences and tables of the results as Markdown."""
    lines = [*sentences(findings), left(findings), recorded(findings)]
    parts = [listed(line for line in lines if line), *markdown_of(tables(findings))]
    return "\n" + "\n\n".join(parts) + "\n\n"


def write(findings: Findings) -> Path:
    """Write ``<results>.md`` and ``figures/<results>-differences.png``, and return the document."""
    results = findings.design.results
    document = results.with_suffix(".md")
    if not document.exists():
        document.write_text(f"# {results.stem.capitalize()}\n", encoding="utf-8")
    replace_generated_block(document, results, text(findings))
    if findings.benchmarks:
        drafts = map(differences, [findings])  # drawn by save, in its style
        canvas.save(drafts, results.parent / "figures", f"{results.stem}-")
    return document


def differences(findings: Findings) -> FigureDraft:
    """Draw every method's difference with its simultaneous interval, and the margin as a band."""
    by_benchmark = {benchmark.name: findings.judged(benchmark) for benchmark in findings.benchmarks}
    longest = max(map(len, by_benchmark.values()))
    sheet, axes = canvas.panel_grid(len(by_benchmark), 2, 0.21 * longest + 0.9, 0.2)
    margin, reference = primary(findings.design).margin, findings.design.reference
    for panel, (benchmark, judged) in zip(axes.flat, by_benchmark.items(), strict=False):
        panel.axvspan(-margin, margin, color=canvas.GRAY, alpha=0.15, linewidth=0)
        panel.axvline(0.0, color=canvas.INK, linewidth=0.8)
        ordered = sorted(judged.items(), key=lambda item: item[1].mean)
        for place, (_, difference) in enumerate(ordered):
            color = _COLORS.get(kind(difference), canvas.GRAY)
            panel.plot(
                [difference.low, difference.high], [place, place], color=color, linewidth=1.5
            )
            panel.plot(difference.mean, place, "o", color=color, markersize=4.5)
        panel.set_yticks(range(len(ordered)), [name for name, _ in ordered])
        panel.set_title(
            f"{benchmark}, {max(difference.n for difference in judged.values())} federations"
        )
        panel.set_xlabel(
            f"accuracy on the worst half of the domains, difference from {reference} in points"
        )
    shown = [
        f"{benchmark}: {name} {conclusion(difference)}"
        for benchmark, judged in by_benchmark.items()
        for name, difference in judged.items()
        if difference.sign
    ]
    return FigureDraft(
        "differences",
        sheet,
        f"Worst half of the domains, compared with {reference}",
        "Mean over federations, with simultaneous 95 % intervals for the methods of a benchmark. "
        f"Band: equivalence within {margin:g} points. Green: better. Red: worse. Blue: equivalent. "
        "Gray: undecided.",
        "; ".join(shown) or f"There is no evidence that any method differs from {reference}.",
    )
