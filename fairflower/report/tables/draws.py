"""Notes on what the federations of a comparison have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fairflower.arguments import conform
from fairflower.report.methods import Comparison
from fairflower.report.reading import Run
from fairflower.report.text import join_words

#: What federations are that have the same division; the argument are their numbers.
SAME = (
    "Federations {} are the same division of the data: their runs are seeds on one federation, and "
    "verdicts hold for these data only. For other draws, set data.redraw (to rows or, for example, "
    "patient) or data.clients-per-domain."
)


def draw_cells(run: Run) -> dict[str, str]:
    """Return the cells of a summary for ``division`` and ``redraw`` in ``run.json``, if known."""
    if not run.info.get("division"):
        return {}
    return {"division": run.division, "redraw": json.dumps(run.info.get("redraw"))}


def draw_facts(row: Mapping[str, str]) -> dict[str, Any]:
    """Read the cells of `draw_cells`. Raises ``ValueError`` if they are malformed."""
    redraw = json.loads(row.get("redraw") or "{}")
    conform(redraw, dict[str, float], "redraw")
    return {"division": row.get("division") or "", "redraw": redraw}


def draw_notes(comparison: Comparison) -> Iterator[str]:
    """Yield notes on federations that are the same division, and on examples that they share."""
    by_division: dict[str, set[int]] = {}
    for run in comparison.kept_runs:
        if run.info.get("division"):
            by_division.setdefault(run.division, set()).add(run.federation)
    for numbers in by_division.values():
        if len(numbers) > 1:
            yield SAME.format(join_words(list(map(str, sorted(numbers)))))
    facts = (m.runs[0].info.get("redraw") or {} for m in comparison.methods if m.divisions > 1)
    for redraw in [known for known in facts if {"train", "test"} <= known.keys()][:1]:
        ratio = redraw.get("tests per training example")
        yield (
            f"Two federations share on average {100 * redraw['train']:.0f} % of their training "
            f"examples and {100 * redraw['test']:.0f} % of their test examples. "
        ) + (
            "Test examples are drawn anew, so variances use Nadeau and Bengio's factor, "
            f"1/n + {ratio:.2g} instead of 1/n."
            if ratio
            else "Intervals do not cover what other examples would change."
        )
