"""Figures of trials: accuracy on validation images against every argument that was tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes

from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import Sketch, legend
from fairflower.report.tuning import Trial, Tuned

#: A figure of trials, its look, and whether its marks are filled.
_WORST, _AVERAGE = canvas.looks(["worst domain", "average"], canvas.METHOD_COLOURS).items()


def sketches(tuned: Sequence[Tuned]) -> Iterator[Sketch]:
    """A figure for each method with arguments to tune, of a panel for each of them."""
    for place, one in enumerate(tuned, start=1):
        if one.ranges and one.completed:
            yield _trials(one, place)


def _trials(one: Tuned, place: int) -> Sketch:
    sheet, axes = canvas.tiles(len(one.ranges), 4, 2.9, 0.4, narrow=2, sharey=True)
    for panel, (key, search) in zip(axes.flat, one.ranges.items(), strict=False):
        for (label, look), of in ((_WORST, _worst), (_AVERAGE, _average)):
            values = [trial.values[key] for trial in one.completed]
            y = [of(trial) for trial in one.completed]
            panel.plot(values, y, look.marker, color=look.colour, markersize=5, label=label)
        _mark(panel, one, key)
        if search.log:
            panel.set_xscale("log")
        panel.set_xlabel(key)
    for panel in axes[:, 0]:
        panel.set_ylabel("on validation images, %")
    legend(sheet, *axes.flat)
    best = one.chosen
    assert best is not None
    left = len(one.trials) - len(one.completed)
    missing = f" Not shown: {left} that were pruned or lost." if left else ""
    return Sketch(
        f"tuning-{place}",
        sheet,
        f"{one.method}: {len(one.completed)} trials",
        "Accuracy on validation images against what was tuned; the other arguments differ, too. "
        f"Dashed: the paper's value. Ringed: the trial that was chosen.{missing}",
        f"Worst domain and average of {len(one.completed)} trials of {one.method}; the chosen one "
        f"has {_worst(best):.1f} and {_average(best):.1f}.",
    )


def _mark(panel: Axes, one: Tuned, key: str) -> None:
    """The paper's value and the chosen trial."""
    default = one.trials[0].values[key]
    panel.axvline(default, color=canvas.GREY, linestyle="--", linewidth=1, label="paper's value")
    if best := one.chosen:
        x, y = [best.values[key]] * 2, [_worst(best), _average(best)]
        panel.scatter(x, y, 120, facecolors="none", edgecolors=canvas.INK, label="chosen")


def _worst(trial: Trial) -> float:
    return 100 * trial.worst


def _average(trial: Trial) -> float:
    return 100 * trial.average
