"""Figures of trials: accuracy on validation images against every argument that was tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, legend
from fairflower.report.tuning import SHOWN, Tuned

#: Of each of `SHOWN`, by label.
_LOOKS = canvas.line_styles([row.phrase for row in SHOWN], canvas.METHOD_COLORS)


def sketches(tuned: Sequence[Tuned]) -> Iterator[FigureDraft]:
    """A figure for each method with arguments to tune, of a panel for each of them."""
    for place, one in enumerate(tuned, start=1):
        if one.ranges and one.completed:
            yield _trials(one, place)


def _trials(one: Tuned, place: int) -> FigureDraft:
    best = one.chosen
    assert best is not None
    sheet, axes = canvas.panel_grid(len(one.ranges), 4, 2.9, 0.4, narrow=2, sharey=True)
    for panel, (key, search) in zip(axes.flat, one.ranges.items(), strict=False):
        for row, (label, style) in zip(SHOWN, _LOOKS.items(), strict=True):
            values = [trial.values[key] for trial in one.completed]
            y = [trial.percent(row) for trial in one.completed]
            panel.plot(values, y, style.marker, color=style.color, markersize=5, label=label)
        default = one.trials[0].values[key]
        panel.axvline(
            default, color=canvas.GRAY, linestyle="--", linewidth=1, label="paper's value"
        )
        x, y = [best.values[key]] * 2, [best.percent(row) for row in SHOWN]
        panel.scatter(x, y, 120, facecolors="none", edgecolors=canvas.INK, label="chosen")
        if search.log:
            panel.set_xscale("log")
        panel.set_xlabel(key)
    for panel in axes[:, 0]:
        panel.set_ylabel("on validation images, %")
    legend(sheet, *axes.flat)
    left = len(one.trials) - len(one.completed)
    missing = f" Not shown: {left} that were pruned or lost." if left else ""
    return FigureDraft(
        f"tuning-{place}",
        sheet,
        f"{one.method}: {len(one.completed)} trials",
        "Accuracy on validation images against what was tuned; the other arguments differ, too. "
        f"Dashed: the paper's value. Ringed: the trial that was chosen.{missing}",
        f"Worst domain and average of {len(one.completed)} trials of {one.method}; the chosen one "
        f"has {' and '.join(f'{best.percent(row):.1f}' for row in SHOWN)}.",
    )
