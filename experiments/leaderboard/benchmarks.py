"""Differences and ranks of methods over several benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, stdtr

from fairflower.statistics import (
    LEVEL,
    Difference,
    MeanStd,
    chi,
    difference_of,
    differences,
    judged_as_family,
)

_Key = TypeVar("_Key")

#: Nodes and weights for means over a normal variable, by Gauss-Hermite quadrature.
_NORMAL, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)


def over_benchmarks(
    gains: Mapping[_Key, Sequence[float]], margin: float = math.nan
) -> dict[_Key, Difference]:
    """Return each method's mean difference over benchmarks like these, judged as a family.

    A replicate is a benchmark, so the error contains what varies between benchmarks. Each method
    has Student's test on its own variance, corrected by `holm`, so its error rates hold however
    much the variances differ. `mixed_model` is narrower if they do not.

    Parameters
    ----------
    gains : mapping
        Method -> its mean difference from the reference on each benchmark, the same for all.
    margin : float
        Margin within which methods count as equivalent.
    """
    judged = {key: differences({key: values}, margin)[key] for key, values in gains.items()}
    return judged_as_family(judged)


def mixed_model(
    gains: Mapping[_Key, Sequence[float]], margin: float = math.nan
) -> dict[_Key, Difference]:
    """Return each method's mean difference over benchmarks by a mixed model with Dunnett's test.

    The model is y_mb = mu_m + u_b + e_mb for method m, one of which is the reference, and benchmark
    b, with random u_b ~ N(0, s_u^2) and e_mb ~ N(0, s^2). For a complete table its estimates are
    those of a two-way analysis of variance: differences from the reference have the standard error
    sqrt(2 s^2 / n) for n benchmarks, and s^2 has (k - 1) (n - 1) degrees of freedom for k methods.
    Intervals and p-values are simultaneous over the methods (Dunnett 1955). Methods are equivalent
    if their interval is within the margin, so that all verdicts are right together with 95 %.

    All methods are assumed to depend equally much on the benchmark. A method that depends on it
    more than the others is called different too often.

    Parameters
    ----------
    gains : mapping
        Method -> its mean difference from the reference on each benchmark, the same for all. At
        least two benchmarks.
    margin : float
        Margin within which methods count as equivalent.
    """
    if not gains:
        return {}
    table = np.vstack([np.zeros_like(next(iter(gains.values()))), *gains.values()])
    k, n = table.shape
    df = (k - 1) * (n - 1)
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    error = math.sqrt(2 * float((rest**2).sum()) / df / n)
    if error < 1e-12:  # all methods have the same gain everywhere
        error = 0.0
    alone = {m: difference_of(MeanStd.of(gain), error, df, margin) for m, gain in gains.items()}
    if error == 0:
        return alone
    threshold = _dunnett_threshold(k - 1, df)
    return {
        method: replace(
            one,
            low=one.mean - threshold * error,
            high=one.mean + threshold * error,
            p=_dunnett(abs(one.mean) / error, k - 1, df),
            p_same=_dunnett(max(0.0, margin - abs(one.mean)) / error, k - 1, df),
            level=2 * float(stdtr(df, -threshold)),
        )
        for method, one in alone.items()
    }


@lru_cache(64)
def _dunnett_threshold(methods: int, df: float) -> float:
    return float(brentq(lambda t: _dunnett(t, methods, df) - LEVEL, 1.0, 100.0))


def _dunnett(t: float, methods: int, df: float) -> float:
    """Return the probability that any of several |t| values with a common reference exceeds t."""
    spreads, weights = chi(df)
    # Given the reference's error and the estimated spread, the methods' t values are independent.
    bound = math.sqrt(2) * t * spreads[:, None]
    inside = ndtr(_NORMAL + bound) - ndtr(_NORMAL - bound)
    return max(0.0, float(1 - weights @ inside**methods @ _WEIGHTS / math.sqrt(2 * math.pi)))


class Ranks(NamedTuple):
    """Mean ranks over benchmarks (1 is best), and the smallest significant difference between two.

    ``p`` is the p-value of Friedman's test that all methods are equal. ``critical`` is Nemenyi's
    critical difference at the 5 % level (Demsar 2006, equation after Table 5).
    """

    mean: dict[str, float]
    p: float
    critical: float


def ranks(values: Mapping[str, Sequence[float]]) -> Ranks:
    """Rank methods by their values on each benchmark, where higher values are better.

    Raises
    ------
    ValueError
        If there are fewer than three methods or benchmarks.
    """
    table = np.array(list(values.values()))  # [methods, benchmarks]
    k, n = table.shape
    if k < 3 or n < 3:
        raise ValueError(
            f"Ranks need at least three methods and three benchmarks, but got {k} and {n}."
        )
    from scipy import stats  # late: it takes a second to import

    placed = stats.rankdata(-table, axis=0)
    quantile = stats.studentized_range.ppf(1 - LEVEL, k, math.inf) / math.sqrt(2)
    return Ranks(
        dict(zip(values, placed.mean(axis=1).tolist(), strict=True)),
        # With ties everywhere the statistic is 0 / 0.
        float(stats.friedmanchisquare(*table).pvalue) if np.ptp(table, axis=0).any() else 1.0,
        float(quantile * math.sqrt(k * (k + 1) / (6 * n))),
    )
