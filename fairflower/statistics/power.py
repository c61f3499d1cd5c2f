"""Power of two-sided t tests, and the smallest difference that they detect.

A t test rejects "no difference" if the absolute value of the estimate exceeds t(1 - level / 2; df)
s, where s is its standard error on df degrees of freedom. If the true difference is d, the ratio of
the estimate to its error has a noncentral t distribution. Its tail is integrated over the chi
distribution of s, which is exact for any df, even with few replicates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtr, ndtri, stdtrit

#: Probability of any false claim in a family of tests, and of detecting a true difference.
LEVEL, POWER = 0.05, 0.8

#: Maximum number of replicates to consider.
MAX_PAIRS = 10_000

#: Nodes and weights of a Gauss-Legendre rule on probabilities from 0 to 1.
_CHANCES, _WEIGHTS = (np.polynomial.legendre.leggauss(400) + np.array([[1.0], [0.0]])) / 2


@lru_cache(256)
def chi(df: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights [400] for means over s / sigma, with ``df`` degrees of freedom."""
    if math.isinf(df):
        return np.ones(1), np.ones(1)
    return np.sqrt(2 * gammaincinv(df / 2, _CHANCES) / df), _WEIGHTS


def critical(df: float, level: float = LEVEL) -> float:
    """Return the absolute t value above which a two-sided test at ``level`` rejects."""
    return float(-stdtrit(df, level / 2) if math.isfinite(df) else -ndtri(level / 2))


def power(effect: float, error: float, df: float, level: float = LEVEL) -> float:
    """Return the probability that a two-sided t test detects a difference.

    Parameters
    ----------
    effect : float
        True difference.
    error : float
        Standard error of the estimate, above 0, in the same unit.
    df : float
        Degrees of freedom of ``error``; ``inf`` if it is known.
    level : float
        Level of the test; 0.05 / m for m tests under Bonferroni's correction.

    Examples
    --------
    >>> round(power(1.0, 0.5, 9), 3), round(power(0.0, 0.5, 9), 3)
    (0.431, 0.05)
    """
    spreads, weights = chi(df)
    bound = critical(df, level) * spreads
    tails = ndtr(effect / error - bound) + ndtr(-effect / error - bound)
    return float(weights @ tails)


def detectable(error: float, df: float, level: float = LEVEL) -> float:
    """Return the smallest true difference that a two-sided t test detects with power `POWER`.

    >>> round(detectable(2.4 / 5 ** 0.5, 4, 0.05 / 40), 1)
    10.8
    """
    if not error > 0 or not df > 0:
        return 0.0 if error == 0 else math.nan
    low, high = 0.0, 1.0
    while power(high, 1.0, df, level) < POWER:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, 1.0, df, level) < POWER else (low, middle)
    return high * error


def needed(sd: float, effect: float, level: float = LEVEL) -> int:
    """Return the number of pairs that a t test needs to detect a difference with power `POWER`.

    Parameters
    ----------
    sd : float
        Standard deviation of paired differences, at least 0.
    effect : float
        True difference, above 0.
    level : float
        Level of the test.

    Returns
    -------
    int
        A number from 2 to `MAX_PAIRS`. `MAX_PAIRS` may be too few pairs.

    Examples
    --------
    >>> needed(2.4, 2.0), needed(2.4, 2.0, level=0.05 / 40)
    (14, 30)
    """
    return _fewest(sd, lambda error, df: power(effect, error, df, level) >= POWER)


def equivalence_power(margin: float, error: float, df: float, level: float = LEVEL) -> float:
    """Return the probability that two one-sided t tests show equivalence of equal methods.

    Both tests reject at ``level`` if the absolute value of the estimate is less than ``margin``
    minus t(1 - level; df) times its standard error.
    """
    spreads, weights = chi(df)
    one_sided = critical(df, min(1.0, 2 * level))
    room = np.maximum(0.0, margin / error - one_sided * spreads)
    return float(weights @ (2 * ndtr(room) - 1))


def needed_for_equivalence(sd: float, margin: float, level: float = LEVEL) -> int:
    """Return the number of pairs needed to show equivalence of equal methods (see `needed`)."""
    return _fewest(sd, lambda error, df: equivalence_power(margin, error, df, level) >= POWER)


def _fewest(sd: float, suffices: Callable[[float, float], bool]) -> int:
    """Return the smallest number of pairs, up to `MAX_PAIRS`, whose standard error suffices."""

    def enough(n: int) -> bool:
        return sd == 0 or suffices(sd / math.sqrt(n), n - 1)

    return 2 + bisect_left(range(2, MAX_PAIRS), True, key=enough)
