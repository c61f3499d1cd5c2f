"""Numbers, values, lists and rounds as a report writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

DASH = "\N{EN DASH}"

#: Marks a figure over domains of which some lack tests.
MARK = "\N{DAGGER}"

#: Stretches of rounds that are still listed.
_SPANS = 6


def thousands(value: Any) -> str:
    """A count as text; empty for anything else.

    >>> thousands(133514), thousands(None)
    ('133,514', '')
    """
    return f"{value:,}" if isinstance(value, int) else ""


def format_number(value: float, digits: int = 2, *, signed: bool = False) -> str:
    """A figure as text, with a true minus sign; a dash where it is not defined.

    >>> number(0.126, signed=True), number(2 / 3, digits=4)
    ('+0.13', '0.6667')
    """
    if math.isnan(value):
        return DASH
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "\N{MINUS SIGN}")


def format_p_value(p: float) -> str:
    """A p-value as text.

    >>> p_value(0.0312), p_value(0.0001)
    ('0.031', '< 0.001')
    """
    return "< 0.001" if p < 0.0005 else format_number(p, 3)


def format_std(std: float, n: int, digits: int = 2) -> str:
    """The small print under a mean; empty for one value, which has none.

    >>> spread(0.25, 3), spread(math.nan, 1)
    ('± 0.25', '')
    """
    return f"± {format_number(std, digits)}" if n > 1 else ""


def join_words(parts: Sequence[str]) -> str:
    """Join with commas and an "and".

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def untested(
    domains: Sequence[str], rounds: NDArray[np.int64], accuracy: NDArray[np.float64]
) -> str:
    """Which domains were not tested in which of the tested rounds; empty if all were in all.

    >>> untested(["usps", "svhn"], np.arange(1, 5), np.array([[0.5, 0.4], *[[0.5, np.nan]] * 3]))
    'svhn was not tested in rounds 2 to 4'
    """
    found: dict[str, list[str]] = {}
    for domain, there in zip(domains, np.isfinite(accuracy).T, strict=True):
        if not there.all():
            found.setdefault(listed_rounds(rounds, ~there), []).append(domain)
    return "; ".join(
        f"{join_words(names)} {'was' if len(names) == 1 else 'were'} not tested in {which}"
        for which, names in found.items()
    )


def listed_rounds(rounds: NDArray[np.int64], chosen: NDArray[np.bool_]) -> str:
    """The chosen ones of the tested rounds; how many if they are all over the place.

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
