"""Helpers that compare what strategies, policies and exchanges remember between rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

#: The messages of this round, which no later round reads, and what the log has said last.
FORGOTTEN = {"_requests", "logged"}


def attributes(remembering: object) -> dict[str, Any]:
    """Return what a strategy, policy or exchange remembers, whether or not STATE names it."""
    return {name: a for name, a in vars(remembering).items() if name not in FORGOTTEN}


def equal(a: Any, b: Any) -> bool:
    """Return whether values are equal: numbers, arrays, collections or objects with these."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or (hasattr(a, "__dict__") and equal(attributes(a), attributes(b)))
