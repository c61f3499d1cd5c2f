"""Formatting of numbers, lists and rounds as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

DASH = "\N{EN DASH}"

#: Text for an interval or a detectable difference that is larger than the metric's range.
FEW_PAIRS = "too few pairs"

#: Text that is shown for an undefined metric of group fairness.
UNDEFINED = "undefined"

#: Reference to the explanation of tables and verdicts.
GUIDE = "How to read the tables and verdicts: docs/report.md."

#: Mark on a number for which some domain was not tested.
MARK = "\N{DAGGER}"

#: Maximum number of ranges of rounds to list.
_SPANS = 6


def thousands(value: Any) -> str:
    """Format a whole number with commas; empty for any other value.

    >>> thousands(133514), thousands(None)
    ('133,514', '')
    """
    return f"{value:,}" if isinstance(value, int) else ""


def format_number(value: float, digits: int = 2, *, signed: bool = False) -> str:
    """Format a number with a true minus sign; NaN becomes a dash.

    >>> format_number(0.126, signed=True), format_number(2 / 3, digits=4)
    ('+0.13', '0.6667')
    """
    if math.isnan(value):
        return DASH
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def within_range(value: float, text: str, most: float = 100.0) -> str:
    """Return the text of a difference of at most ``most`` points, else "too few pairs"."""
    return FEW_PAIRS if abs(value) > most else text


def format_interval(low: float, high: float, most: float = 100.0) -> str:
    """Format an interval of a difference that is at most ``most`` points."""
    text = f"[{format_number(low)}, {format_number(high)}]"
    return within_range(max(abs(low), abs(high)), text, most)


def format_std(std: float, n: int, digits: int = 2) -> str:
    """Format the standard deviation of ``n`` values; empty for a single value.

    >>> format_std(0.25, 3), format_std(math.nan, 1)
    ('± 0.25', '')
    """
    return f"± {format_number(std, digits)}" if n > 1 else ""


def join_words(parts: Sequence[str]) -> str:
    """Join words with commas and "and".

    >>> join_words(["a"]), join_words(["a", "b"]), join_words(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def untested(
    domains: Sequence[str], rounds: NDArray[np.int64], accuracy: NDArray[np.float64]
) -> str:
    """State which domains were not tested in which rounds; empty if all were always tested.

    >>> untested(["usps", "svhn"], np.arange(1, 5), np.array([[0.5, 0.4], *[[0.5, np.nan]] * 3]))
    'svhn was not tested in rounds 2 to 4'
    """
    by_rounds: dict[str, list[str]] = {}
    for domain, tested in zip(domains, np.isfinite(accuracy).T, strict=True):
        if not tested.all():
            by_rounds.setdefault(listed_rounds(rounds, ~tested), []).append(domain)
    return "; ".join(
        f"{join_words(names)} {'was' if len(names) == 1 else 'were'} not tested in {which}"
        for which, names in by_rounds.items()
    )


def listed_rounds(rounds: NDArray[np.int64], chosen: NDArray[np.bool_]) -> str:
    """List the chosen rounds as ranges, or only count them if there are too many ranges.

    >>> listed_rounds(np.arange(7), np.array([True, False, True, True, True, False, True]))
    'rounds 0, 2 to 4 and 6'
    """
    if chosen.all():
        return "any round"
    places = np.flatnonzero(chosen)
    spans = np.split(rounds[places], np.flatnonzero(np.diff(places) > 1) + 1)
    if len(spans) > _SPANS:
        return f"{len(places)} of {len(rounds)} rounds"
    parts = [[f"{s[0]} to {s[-1]}"] if len(s) > 2 else map(str, s) for s in spans]
    return f"round{'s' if len(places) > 1 else ''} {join_words([*chain.from_iterable(parts)])}"
