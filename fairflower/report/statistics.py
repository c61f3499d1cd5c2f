"""Tests, ranks and shares of variance for leaderboards with several seeds and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from fairflower.report.text import format_number
from fairflower.statistics import differences as corrections
from fairflower.statistics.differences import Difference as Difference
from fairflower.statistics.differences import differences
from fairflower.statistics.power import LEVEL, detectable


def paired_t_test(values: Sequence[float]) -> Difference:
    """Return the mean, interval and p-value of paired differences; for one pair, only the mean.

    >>> gain = paired_t_test([1.0, 2.0, 3.0])
    >>> gain.mean, round(gain.low, 2), round(gain.high, 2), round(gain.p, 3)
    (2.0, -0.48, 4.48, 0.074)
    """
    return differences({"": values})[""]


def holm_correction(by_name: Mapping[str, Difference]) -> dict[str, Difference]:
    """Return the differences with p-values corrected by Holm's method over all of them.

    Differences without a p-value are ignored.
    """
    p = corrections.holm({name: difference.p for name, difference in by_name.items()})
    return {name: replace(difference, p=p[name]) for name, difference in by_name.items()}


def detectable_text(by_name: Mapping[str, Difference]) -> str:
    """State the smallest detectable difference, for the median spread and Bonferroni's level."""
    n, std = np.median([(difference.n, difference.std) for difference in by_name.values()], axis=0)
    least = detectable(std / math.sqrt(n), n - 1, LEVEL / len(by_name))
    largest = max(difference.mean for difference in by_name.values())
    return (
        f"with {n:g} seeds and the median spread, {format_number(std)}, differences of "
        f"{format_number(least, 1)} points are detected with 80 % power; the largest gain is "
        f"{format_number(largest, signed=True)}."
    )


class Ranks(NamedTuple):
    """Mean ranks over benchmarks (1 is best), and the smallest significant difference between two.

    ``p`` is the p-value of Friedman's test that all methods are equal. ``critical`` is Nemenyi's
    critical difference at the 5 % level (Demsar 2006, equation after Table 5).
    """

    mean: dict[str, float]
    p: float
    critical: float

    @property
    def lowest(self) -> float:
        """The lowest mean rank, which is the best."""
        return min(self.mean.values())

    @property
    def best(self) -> list[str]:
        """The methods with the best mean rank."""
        return [name for name, rank in self.mean.items() if rank == self.lowest]


def ranks(figures: pd.DataFrame) -> Ranks:
    """Rank methods (rows) on benchmarks (columns), where higher values are better.

    Raises
    ------
    ValueError
        If there are fewer than three methods or benchmarks.
    """
    k, n = figures.shape
    if k < 3 or n < 3:
        raise ValueError(
            f"Ranks need at least three methods and three benchmarks, but got {k} and {n}."
        )
    placed = figures.rank(ascending=False)
    from scipy import stats  # late: it takes a second to import

    quantile = stats.studentized_range.ppf(1 - LEVEL, k, math.inf) / math.sqrt(2)
    return Ranks(
        {str(name): float(value) for name, value in placed.mean(axis=1).items()},
        float(stats.friedmanchisquare(*placed.to_numpy()).pvalue),
        float(quantile * math.sqrt(k * (k + 1) / (6 * n))),
    )


def eta_squared(
    figures: ArrayLike, factors: Mapping[str, pd.Series | pd.DataFrame]
) -> dict[str, float]:
    """Return each factor's share of a metric's variance over trials (analysis of variance).

    The shares are the type II sums of squares (each factor after all others) of a linear model,
    divided by the total. The share ``rest`` is the part that the factors do not explain. The result
    is empty if all values are equal. ``figures`` [T] has one value per trial, and each factor has T
    rows of categories or numbers.
    """
    values = np.asarray(figures, dtype=np.float64)
    if np.ptp(values) < 1e-9:
        return {}
    columns = {name: pd.get_dummies(of).to_numpy(np.float64) for name, of in factors.items()}

    def left(names: Iterable[str]) -> float:
        design = np.column_stack([np.ones(len(values)), *(columns[name] for name in names)])
        residual = values - design @ np.linalg.lstsq(design, values)[0]
        return float(residual @ residual)

    total, whole = left([]), left(columns)
    shares = {n: (left(other for other in columns if other != n) - whole) / total for n in columns}
    return {**shares, "rest": 1 - sum(shares.values())}
