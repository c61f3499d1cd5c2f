"""What may be concluded from figures of several methods, seeds and benchmarks.

SciPy and statsmodels compute; here is only what is asked of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

#: What a p-value is to be below.
LEVEL = 0.05


class Difference(NamedTuple):
    """A paired difference: its mean, the 95 % Student-t interval, and a p-value."""

    mean: float
    low: float
    high: float
    p: float
    n: int

    @property
    def sign(self) -> int:
        """Of a difference that counts, by its p-value; else 0."""
        return int(math.copysign(1, self.mean)) if self.p < LEVEL else 0


def paired(values: Sequence[float]) -> Difference:
    """What differences of pairs say of their mean; NaN for all but that with one pair.

    >>> one = paired([1.0, 2.0, 3.0])
    >>> one.mean, round(one.low, 2), round(one.high, 2), round(one.p, 3)
    (2.0, -0.48, 4.48, 0.074)
    """
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Difference(mean, math.nan, math.nan, math.nan, n)
    if np.ptp(values) < 1e-9:  # the same in every pair: sums in another order are no spread
        same = abs(mean) < 1e-9
        return Difference(mean, mean, mean, 1.0 if same else 0.0, n)
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval()
    return Difference(mean, float(low), float(high), float(test.pvalue), n)


def holm(found: Mapping[str, Difference]) -> dict[str, Difference]:
    """The same with Holm's p-values, which hold for all of them together.

    Those without a p-value are no part of it.

    >>> p = {"a": 0.01, "b": 0.04, "c": 0.03}
    >>> one = Difference(1.0, 0.5, 1.5, 0.0, 5)
    >>> {name: new.p for name, new in holm({k: one._replace(p=p[k]) for k in p}).items()}
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    from statsmodels.stats.multitest import multipletests  # late: it is slow to import

    tested = {name: one for name, one in found.items() if not math.isnan(one.p)}
    if not tested:
        return dict(found)
    adjusted = multipletests([one.p for one in tested.values()], method="holm")[1]
    new = {
        n: one._replace(p=float(p)) for (n, one), p in zip(tested.items(), adjusted, strict=True)
    }
    return {**found, **new}


class Ranks(NamedTuple):
    """Mean ranks over benchmarks, 1 being best, and what is needed to tell two apart.

    ``p`` is Friedman's, that all methods are alike; ``critical`` is Nemenyi's critical difference
    at the 5 % level (Demsar 2006, Eq. after Table 5).
    """

    mean: dict[str, float]
    p: float
    critical: float


def ranks(figures: pd.DataFrame) -> Ranks:
    """Rank methods, the rows, on benchmarks, the columns, of which more is better.

    Raises
    ------
    ValueError
        With fewer than three of either, of which nothing is concluded.
    """
    k, n = figures.shape
    if k < 3 or n < 3:
        raise ValueError(f"Ranks need three methods and three benchmarks, got {k} and {n}.")
    placed = figures.rank(ascending=False)
    quantile = stats.studentized_range.ppf(1 - LEVEL, k, math.inf) / math.sqrt(2)
    return Ranks(
        {str(name): float(value) for name, value in placed.mean(axis=1).items()},
        float(stats.friedmanchisquare(*placed.to_numpy()).pvalue),
        float(quantile * math.sqrt(k * (k + 1) / (6 * n))),
    )


def shares(trials: pd.DataFrame, figure: str, factors: Mapping[str, str]) -> dict[str, float]:
    """How much of a figure's variance over trials is each factor's: an analysis of variance.

    Sums of squares of type II (each factor after all others), as shares of the total; what they
    leave, or have in common, is the ``rest``.

    Parameters
    ----------
    trials : DataFrame
        A row for each trial.
    factors : mapping
        Name -> term of a statsmodels formula, as ``C(strategy)`` or ``log(lr) + I(log(lr)**2)``.
        A factor that all trials share takes no part.
    """
    from statsmodels.formula.api import ols  # late: it is slow to import

    def left(names: Sequence[str]) -> float:
        terms = " + ".join(factors[name] for name in names) or "1"
        return float(ols(f"{figure} ~ {terms}", trials).fit().ssr)

    with warnings.catch_warnings():
        # Terms that say the same leave coefficients open, but not what they leave of the variance.
        warnings.simplefilter("ignore")
        total, whole = left([]), left([*factors])
        found = {
            name: (left([other for other in factors if other != name]) - whole) / total
            for name in factors
        }
    return {**found, "rest": 1 - sum(found.values())}
