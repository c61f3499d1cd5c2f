"""Figure of group fairness: differences between groups over rounds, computed for all people."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fairflower.numerics.group_fairness import DIFFERENCES
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, LineStyles, legend, panels, slug
from fairflower.report.measures import by_attribute
from fairflower.report.methods import Comparison, Curve, Method
from fairflower.report.text import format_number


def sketches(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield one figure per sensitive attribute, with one panel per difference."""
    for attribute, methods in by_attribute(comparison):
        sheet, axes = panels(1, len(DIFFERENCES), canvas.FULL, 3.0)
        alt_parts = []
        for panel, metric in zip(axes[0], DIFFERENCES, strict=True):
            for method in methods:
                curve = _curve(method, metric.name)
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


def _curve(method: Method, metric: str) -> Curve:
    """Return a metric for all people, in points, over the rounds in which every run recorded it."""
    by_round = [
        dict(zip(run.rounds.tolist(), 100 * run.group_metrics[metric].accuracy[:, 0], strict=True))
        for run in method.runs
    ]
    rounds = [r for r in by_round[0] if all(np.isfinite(run.get(r, np.nan)) for run in by_round)]
    values = np.array([[run[r] for r in rounds] for run in by_round])
    return Curve.of(np.array(rounds, np.int64), values)
