"""The closed test of two kinds of null hypotheses by brute force, for tests of verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product


def closed_p(pairs: Sequence[Sequence[float]], place: int, kind: int) -> float:
    """Return the corrected p-value of one of two null hypotheses of each place.

    Bonferroni's test of every intersection with at most one null hypothesis of a place; a null
    hypothesis is rejected if all intersections that contain it are.
    """
    largest = 0.0
    for chosen in product((None, 0, 1), repeat=len(pairs)):
        if chosen[place] == kind:
            p = [pair[c] for pair, c in zip(pairs, chosen, strict=True) if c is not None]
            largest = max(largest, min(1.0, len(p) * min(p)))
    return largest
