"""Figures of trials: validation accuracy against each tuned argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fairflower.config.text import counted
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, legend
from fairflower.report.tuning import SHOWN, Tuned

#: Line style of each summary in `SHOWN`, by label.
_LOOKS = canvas.line_styles([row.phrase for row in SHOWN], canvas.METHOD_COLORS)


def sketches(tuned: Sequence[Tuned]) -> Iterator[FigureDraft]:
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
