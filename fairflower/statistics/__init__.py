"""Paired differences of several methods from a reference method, judged as a family, and power.

There are few replicates and many methods. This has three consequences:

- The variance of a single method is a poor estimate, and the method whose variance is smallest by
  chance would be the first to be called different. Therefore, variances are moderated across the
  methods (`moderated_variances`). A variance is only ever raised: lowering that of a method which
  really varies more than the others would make false claims about it
  (experiments/error-rates.md).
- Several tests are performed. Therefore, p-values are corrected over the family, over tests of
  difference and of equivalence together (`holm`), so that with a probability of 95 % all its
  verdicts are right. The intervals are Bonferroni's, which all contain the true differences with a
  probability of 95 %, but cut off at 0 where the test, which finds more, shows a difference: with
  at least `MIN_PAIRS` pairs, an interval excludes 0 if and only if there is a verdict. In a family
  with cut intervals, all of them and all verdicts are right together with a probability of 90 % at
  least. An interval of an equivalent method may reach beyond the margin, because the tests of
  equivalence are one-sided.
- A difference that is not significant may be zero, or too small for the design. Therefore, besides
  *better* and *worse* there are two other verdicts. *Equivalent* is shown by two one-sided tests
  within a margin that was fixed in advance. *Undecided* comes with the smallest difference that the
  design detects with 80 % power.

A t test rejects "no difference" if the absolute value of the estimate exceeds t(1 - level / 2; df)
s, where s is its standard error on df degrees of freedom. If the true difference is d, the ratio of
the estimate to its error has a noncentral t distribution. Its tail is integrated over the chi
distribution of s, which is exact for any df, even with few replicates.

The script ``benchmarks/error_rates.py`` simulates error rates and power.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import digamma, gammaincinv, ndtr, ndtri, polygamma, stdtr, stdtrit

#: Probability of any false claim in a family of tests, and of detecting a true difference.
LEVEL, POWER = 0.05, 0.8

#: Minimum number of pairs for a verdict. With fewer pairs, only intervals are reported.
MIN_PAIRS = 5

#: Smaller differences are rounding errors, caused by summing in another order.
_SAME = 1e-9

#: Squared correlation of differences from the same method. It is 1/4 if all methods have the same
#: variance, and more if that method varies more. 1/3 was chosen among 1/4, 1/3 and 1/2 by simulated
#: error rates. The error rates in experiments/error-rates.md come from other random draws.
_SQUARED_CORRELATION = 1 / 3

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation (ddof 1, NaN if n = 1) over ``n`` replicates."""

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanStd:
        """Return the mean and standard deviation of values, one value for each replicate.

        >>> MeanStd.of([1.0, 3.0])
        MeanStd(mean=2.0, std=1.4142135623730951, n=2)
        """
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return cls(float(np.mean(values)), spread, len(values))


@dataclass(frozen=True)
class Difference(MeanStd):
    """Mean of ``n`` paired differences, with its 95 % interval and its tests."""

    #: Ends of Student's interval, which is simultaneous after `judged_as_family`. NaN if unknown.
    low: float
    high: float
    #: p-value of the test of no difference, corrected for the family by `judged_as_family`.
    p: float
    #: Standard error of the mean, and its degrees of freedom, including those from moderation.
    error: float = math.nan
    df: float = math.nan
    #: Margin of equivalence, and the p-value of the two one-sided tests, corrected likewise. NaN
    #: without a margin.
    margin: float = math.nan
    p_same: float = math.nan
    #: Level of the test and of the interval: 0.05, or 0.05 / m for m tests.
    level: float = LEVEL

    @property
    def detectable(self) -> float:
        """Smallest true difference that is detected with 80 % power; NaN if unknown."""
        return detectable(self.error, self.df, self.level)

    @property
    def sign(self) -> int:
        """Sign of a difference with p < 0.05 and at least `MIN_PAIRS` pairs; otherwise 0."""
        return int(math.copysign(1, self.mean)) if self.p < LEVEL and self.n >= MIN_PAIRS else 0

    @property
    def equivalent(self) -> bool:
        """Whether the tests show that the methods are equivalent within the margin."""
        return self.p_same < LEVEL and self.n >= MIN_PAIRS and not self.sign


def differences(
    values: Mapping[_Key, Sequence[float]],
    margin: float | Mapping[_Key, float] = math.nan,
    floors: Mapping[_Key, float] | None = None,
) -> dict[_Key, Difference]:
    """Return each method's mean difference in a metric, with variances moderated across methods.

    ``values`` are each method's paired differences from the reference method, the same for all.
    ``margin`` is the margin of equivalence in the unit of the values, or that of each method; NaN
    means no test of equivalence. ``floors`` are the `example_worth` of each method's differences: a
    smaller (moderated) standard deviation is raised to it, because accuracies are multiples of one
    test example, so differences can be equal, or zero, by rounding. This does not affect the
    variances of other methods.

    p-values and intervals are not corrected for multiple tests (`judged_as_family` does this). If
    all paired differences are 0 and there is no floor, the interval has width 0. If they all equal
    another value, the interval is NaN unless other methods or a floor provide a variance.
    """
    alike = {
        key for key, pairs in values.items() if len(pairs) > 1 and np.abs(pairs).max() <= _SAME
    }
    kept = {k: MeanStd.of(v) for k, v in values.items() if len(v) > 1 and k not in alike}
    own = {key: 0.0 if e.std < _SAME else e.std**2 for key, e in kept.items()}
    moderated = moderated_variances([*own.values()], [e.n - 1 for e in kept.values()])
    spreads = dict(zip(own, moderated, strict=True))
    judged = {}
    for key, pairs in values.items():
        n, floor = len(pairs), (floors or {}).get(key, 0.0)
        within = margin[key] if isinstance(margin, Mapping) else margin
        if key in alike:
            error = floor / math.sqrt(n)
            judged[key] = difference_of(MeanStd(0.0, 0.0, n), error, n - 1, within)
        elif key in spreads:
            shrunk, df = spreads[key]
            # The larger of two variances errs upward, by more than the common df err downward.
            variance = max(shrunk, own[key], floor**2)
            judged[key] = difference_of(kept[key], math.sqrt(variance / n), df, within)
        else:
            judged[key] = difference_of(MeanStd.of(pairs), math.nan, math.nan, within)
    return judged


def judged_as_family(judged: Mapping[_Key, Difference]) -> dict[_Key, Difference]:
    """Return the differences with corrected p-values, simultaneous intervals and detectable sizes.

    The tests of difference and of equivalence are one family (`holm`).
    Differences without a p-value are not part of the family. Differences with fewer than
    `MIN_PAIRS` pairs get no verdict, so they are a family of their own.
    """
    few = {key: member for key, member in judged.items() if member.n < MIN_PAIRS}
    enough = {key: member for key, member in judged.items() if key not in few}
    return {**judged, **_corrected(enough), **_corrected(few)}


def _corrected(judged: Mapping[_Key, Difference]) -> dict[_Key, Difference]:
    members = {key: member for key, member in judged.items() if not math.isnan(member.p)}
    larger = {key: float(np.fmax(member.p, member.p_same)) for key, member in members.items()}
    p = holm({key: member.p for key, member in members.items()}, larger)
    p_same = holm({key: member.p_same for key, member in members.items()}, larger)
    level = LEVEL / max(1, len(members))
    new = dict(judged)
    for key, member in members.items():
        width = critical(member.df, level) * member.error if member.error else 0.0
        low, high = member.mean - width, member.mean + width
        corrected = replace(member, p=p[key], p_same=p_same[key], level=level)
        if corrected.sign > 0:
            low = max(low, 0.0)
        elif corrected.sign < 0:
            high = min(high, 0.0)
        new[key] = replace(corrected, low=low, high=high)
    return new


def example_worth(slopes: ArrayLike, sizes: ArrayLike) -> float:
    """Return the largest change of a metric due to a single test example.

    ``slopes``, shape (K,), are the derivatives of the metric with respect to the domains'
    accuracies, and ``sizes``, shape (K,), the numbers of test examples.
    """
    return float((np.abs(slopes) / np.asarray(sizes)).max())


def holm(p: Mapping[_Key, float], larger: Mapping[_Key, float] | None = None) -> dict[_Key, float]:
    """Return p-values corrected for multiple tests by Holm's step-down method.

    NaN stays NaN and does not count as a test. With ``larger``, ``p`` holds one of two tests of
    each key, whose null hypotheses exclude each other: "no difference" and "at least the margin".
    Both kinds are then right together, by a closed test: an intersection of null hypotheses, which
    has at most one of each of s keys (otherwise it is empty), is rejected if its smallest p-value
    is at most level / s, and a null hypothesis if all its intersections are. The last of these has
    the ``larger`` p-values of the s - 1 keys in which they are largest.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    >>> holm({"a": 0.01, "b": 0.03}, {"a": 0.5, "b": 0.9})
    {'a': 0.02, 'b': 0.06}
    """
    others = sorted(q for q in (larger or p).values() if not math.isnan(q))
    least = [0.0, *accumulate((q * (len(others) - i) for i, q in enumerate(others)), max)]
    new = dict(p)
    for key, one in p.items():
        if not math.isnan(one):
            smaller = bisect_left(others, one)
            new[key] = min(1.0, max(least[smaller], one * (len(others) - smaller)))
    return new


def moderated_variances(
    variances: Sequence[float], df: Sequence[float]
) -> list[tuple[float, float]]:
    """Shrink variances towards their common value, and return them with their degrees of freedom.

    This is the empirical Bayes method of limma (Smyth 2004, Section 6). Each variance s_j^2 on d_j
    degrees of freedom is assumed to estimate a true variance sigma_j^2, and 1 / sigma_j^2 to have a
    scaled chi-squared distribution about 1 / s_0^2 with d_0 degrees of freedom. d_0 and s_0^2 are
    fitted to the mean and variance of log s_j^2. The moderated variance is (d_0 s_0^2 + d_j s_j^2)
    / (d_0 + d_j) on d_0 + d_j degrees of freedom. Fewer than three variances are unchanged.

    limma bounds the degrees of freedom by the sum of all d_j, as for independent variances. Here,
    all differences share the noise of the reference method. If differences have the squared
    correlation r, the mean of m variances has sum d_j / (1 + (m - 1) r) degrees of freedom, which
    is the bound used here (r = 1/3).

    ``variances`` are s_j^2, and ``df`` are d_j, above 0.
    """
    s2, d = np.asarray(variances, np.float64), np.asarray(df, np.float64)
    if len(s2) < 3 or not np.median(s2) > 0:
        return list(zip(s2.tolist(), d.tolist(), strict=True))
    logs = np.log(np.maximum(s2, 1e-5 * np.median(s2))) - digamma(d / 2) + np.log(d / 2)
    excess = float(np.var(logs, ddof=1) - np.mean(polygamma(1, d / 2)))
    if excess > 0:
        # trigamma(x) is between 1 / x and 1 / x + 1 / x^2.
        ends = (1 / excess, 1 / excess + 1)
        prior_df = 2 * brentq(lambda x: polygamma(1, x) - excess, *ends, xtol=1e-12)
        prior = math.exp(np.mean(logs) + digamma(prior_df / 2) - math.log(prior_df / 2))
        new = (prior_df * prior + d * s2) / (prior_df + d)
    else:  # they vary no more than by chance
        prior_df, new = math.inf, np.full(len(s2), float(d @ s2 / d.sum()))
    bound = float(d.sum()) / (1 + (len(d) - 1) * _SQUARED_CORRELATION)
    whole = np.maximum(d, np.minimum(prior_df + d, bound))
    return list(zip(new.tolist(), whole.tolist(), strict=True))


def redrawn(difference: Difference, overlap: float) -> Difference:
    """Return a mean difference with the variance (1 / n + overlap) s^2 (Nadeau and Bengio 2003).

    ``overlap`` is the number of test per training examples, if pairs draw them from the same pool.
    """
    if not overlap:
        return difference
    error = difference.error * math.sqrt(1 + difference.n * overlap)
    return difference_of(difference, error, difference.df, difference.margin)


def difference_of(
    estimate: MeanStd, error: float, df: float, margin: float = math.nan
) -> Difference:
    """Return a difference with p-values and interval; its error has ``df`` degrees of freedom."""
    mean, std, n = estimate.mean, estimate.std, estimate.n
    if error == 0 and abs(mean) <= _SAME:
        same = math.nan if math.isnan(margin) else float(margin <= 0)
        return Difference(mean, std, n, mean, mean, 1.0, error, df, margin, same)
    if error == 0:  # equal differences, which do not tell their variance
        error = df = math.nan
    width = critical(df) * error
    # SciPy's ttest_1samp gives the same result, but takes a hundred times as long.
    p = 2 * float(stdtr(df, -abs(mean) / error))
    same = float(stdtr(df, (abs(mean) - margin) / error))
    low, high = mean - width, mean + width
    return Difference(mean, std, n, low, high, p, error, df, margin, same)


# --- power ----------------------------------------------------------------------------

#: Maximum number of replicates to consider.
MAX_PAIRS = 10_000


#: Returns nodes and weights of a Gauss-Legendre rule from -1 to 1.
_legendre = cache(np.polynomial.legendre.leggauss)


@lru_cache(256)
def chi(df: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights [400] for means over s / sigma, with ``df`` degrees of freedom."""
    if math.isinf(df):
        return np.ones(1), np.ones(1)
    nodes, weights = _legendre(400)
    return np.sqrt(2 * gammaincinv(df / 2, (nodes + 1) / 2) / df), weights / 2


def critical(df: float, level: float = LEVEL) -> float:
    """Return the absolute t value above which a two-sided test at ``level`` rejects."""
    return float(-stdtrit(df, level / 2) if math.isfinite(df) else -ndtri(level / 2))


def power(effect: float, error: float, df: float, level: float = LEVEL) -> float:
    """Return the probability that a two-sided t test detects a true difference ``effect``.

    The estimate has the standard error ``error``, above 0 and in the same unit, on ``df`` degrees
    of freedom (``inf`` if it is known). ``level`` is 0.05 / m for m tests under Bonferroni's
    correction.

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

    ``sd`` is the standard deviation of paired differences, at least 0, and ``effect`` the true
    difference, above 0. The result is from 2 to `MAX_PAIRS`, which may be too few pairs.

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
