"""Notes on what the federations of a comparison have in common."""

from __future__ import annotations

from collections.abc import Iterator

from fairflower.report.methods import Comparison
from fairflower.report.text import join_words


def draw_notes(comparison: Comparison) -> Iterator[str]:
    """Yield notes on federations that are the same division, and on examples that they share."""
    by_division: dict[str, set[int]] = {}
    for run in comparison.kept_runs:
        if run.info.get("division"):
            by_division.setdefault(run.division, set()).add(run.federation)
    for numbers in by_division.values():
        if len(numbers) > 1:
            yield (
                f"Federations {join_words(list(map(str, sorted(numbers))))} are the same division "
                "of the data: their runs are seeds on one federation, and verdicts hold for these "
                "data only. For other draws, set data.redraw or data.clients-per-domain."
            )
    drawn = [m for m in comparison.methods if m.federations and len(m.runs) > 1]
    texts = {_shared(m.runs[0].info["redraw"]) for m in drawn if m.runs[0].info.get("redraw")}
    yield from sorted(texts)


def _shared(redraw: dict[str, float]) -> str:
    text = (
        f"Two federations share on average {100 * redraw['train']:.0f} % of their training "
        f"examples and {100 * redraw['test']:.0f} % of their test examples. "
    )
    if ratio := redraw.get("tests per training example"):
        return text + (
            "Test examples are drawn anew, so variances use Nadeau and Bengio's factor, "
            f"1/n + {ratio:.2g} instead of 1/n."
        )
    return text + "Intervals do not cover what other examples would change."
