"""Differences and ranks of methods over several benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fairflower.statistics.differences import Difference, differences, judged_as_family
from fairflower.statistics.power import LEVEL

_Key = TypeVar("_Key")


def over_benchmarks(
    gains: Mapping[_Key, Sequence[float]], margin: float = math.nan
) -> dict[_Key, Difference]:
    """Return each method's mean difference over benchmarks like these, judged as a family.

    A replicate is a benchmark, so the error contains what varies between benchmarks. Each method
    has Student's test on its own variance. A mixed model with one variance for all methods
    (statsmodels' `MixedLM`), or variances moderated across methods, would make more false claims,
    because some methods depend much more on the benchmark than others: on the leaderboard's first
    three benchmarks the variances of methods differ by a factor above 100. With such variances, the
    mixed model makes a false claim in 10 % of simulated tables instead of 5 %.

    Parameters
    ----------
    gains : mapping
        Method -> its mean difference from the reference on each benchmark, the same for all.
    margin : float
        Margin within which methods count as equivalent.
    """
    judged = {key: differences({key: values}, margin)[key] for key, values in gains.items()}
    return judged_as_family(judged)


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
