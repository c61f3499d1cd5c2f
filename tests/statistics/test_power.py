"""Power of t tests, against SciPy's noncentral t distribution and simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fairflower.statistics import (
    MAX_PAIRS,
    critical,
    detectable,
    equivalence_power,
    needed,
    needed_for_equivalence,
    power,
)


@pytest.mark.parametrize("df", [1, 2, 4, 9, 23, 200])
@pytest.mark.parametrize("effect", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("level", [0.05, 0.05 / 40])
def test_power_matches_the_noncentral_t_distribution(df: int, effect: float, level: float) -> None:
    bound = stats.t.ppf(1 - level / 2, df)
    expected = stats.nct.sf(bound, df, 2 * effect) + stats.nct.cdf(-bound, df, 2 * effect)
    assert power(effect, 0.5, df, level) == pytest.approx(expected, abs=1e-6)


def test_power_with_a_known_error_matches_the_normal_distribution() -> None:
    expected = stats.norm.sf(1.959964 - 1.5) + stats.norm.cdf(-1.959964 - 1.5)
    assert power(1.5, 1.0, math.inf) == pytest.approx(expected, abs=1e-6)
    assert critical(math.inf) == pytest.approx(1.959964, abs=1e-6)


@given(st.floats(0.1, 10), st.integers(2, 40), st.integers(1, 60))
def test_the_detectable_difference_has_the_wanted_power(sd: float, n: int, tests: int) -> None:
    error = sd / math.sqrt(n)
    least = detectable(error, n - 1, 0.05 / tests)
    assert power(least, error, n - 1, 0.05 / tests) == pytest.approx(0.8, abs=1e-9)


def test_an_unknown_error_has_no_detectable_difference() -> None:
    assert math.isnan(detectable(math.nan, 4))
    assert math.isnan(detectable(1.0, 0))
    assert detectable(0.0, 4) == 0.0


@given(st.floats(0.2, 5), st.integers(1, 40))
def test_the_needed_number_of_pairs_is_the_smallest_sufficient_number(
    sd: float, tests: int
) -> None:
    level = 0.05 / tests
    n = needed(sd, 2.0, level)
    assert power(2.0, sd / math.sqrt(n), n - 1, level) >= 0.8
    assert n == 2 or power(2.0, sd / math.sqrt(n - 1), n - 2, level) < 0.8
    n = needed_for_equivalence(sd, 2.0, level)
    assert equivalence_power(2.0, sd / math.sqrt(n), n - 1, level) >= 0.8
    assert n == 2 or equivalence_power(2.0, sd / math.sqrt(n - 1), n - 2, level) < 0.8


def test_the_needed_number_of_pairs_is_capped() -> None:
    assert needed(1e6, 1.0) == needed_for_equivalence(1e6, 1.0) == MAX_PAIRS


def test_power_matches_the_share_of_significant_simulated_samples() -> None:
    """2,000 samples of 8 pairs; the share's standard error is 0.011."""
    drawn = np.random.default_rng(0).normal(1.5, 1.8, size=(2000, 8))
    p = stats.ttest_1samp(drawn, 0, axis=1).pvalue
    assert (p < 0.05).mean() == pytest.approx(power(1.5, 1.8 / math.sqrt(8), 7), abs=0.035)
    alike = drawn - 1.5
    upper = [stats.ttest_1samp(alike, s * 2.0, axis=1, alternative=a).pvalue < 0.05
             for s, a in ((1, "less"), (-1, "greater"))]  # fmt: skip
    share = (upper[0] & upper[1]).mean()
    assert share == pytest.approx(equivalence_power(2.0, 1.8 / math.sqrt(8), 7), abs=0.035)


def test_pairs_without_spread_need_the_minimum_of_two() -> None:
    assert needed(0.0, 2.0) == needed_for_equivalence(0.0, 2.0) == 2
