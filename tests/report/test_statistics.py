"""Statistics of the leaderboard, against closed forms, published numbers and brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fairflower.report.statistics import (
    Difference,
    eta_squared,
    holm_correction,
    paired_t_test,
    ranks,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@given(st.lists(st.integers(-50, 50), min_size=3, max_size=9))
def test_a_paired_difference_is_scipys_test_and_students_interval(values: list[int]) -> None:
    one = paired_t_test([float(v) for v in values])
    if np.ptp(values) == 0:
        known = values[0] == 0
        assert (one.p == 1 and one.low == one.high == 0) if known else math.isnan(one.p)
        return
    width = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    assert one.mean == pytest.approx(np.mean(values))
    assert (one.low, one.high) == pytest.approx((one.mean - width, one.mean + width))
    assert one.p == pytest.approx(stats.ttest_rel(values, np.zeros(len(values))).pvalue)
    # The interval excludes zero just where p is below 5 %.
    assert (one.p < 0.05) == (one.low > 0 or one.high < 0)
    assert one.sign == (np.sign(one.mean) if one.p < 0.05 and one.n >= 5 else 0)


def test_neither_one_pair_nor_equal_pairs_say_anything() -> None:
    one = paired_t_test([3.0])
    assert (one.mean, one.sign) == (3.0, 0)
    assert all(map(math.isnan, (one.low, one.high, one.p)))
    assert paired_t_test([1e-13, 0.0, -1e-13]).sign == 0  # sums in another order
    assert paired_t_test([-2.0] * 6).sign == 0


def test_what_has_no_p_value_is_no_part_of_the_family() -> None:
    none = paired_t_test([1.0])
    one = Difference(1.0, 0.4, 5, 0.5, 1.5, 0.02)
    found = holm_correction({"a": one, "b": none, "c": replace(none, p=0.5)})
    assert found["a"].p == pytest.approx(0.04)
    assert math.isnan(found["b"].p)
    assert holm_correction({"b": none}) == {"b": none}


def test_the_critical_difference_is_demsars() -> None:
    """Demsar (JMLR 2006), Table 6 and text: 4 classifiers, 14 data sets, CD = 1.25."""
    table = [
        (0.763, 0.768, 0.771, 0.798), (0.599, 0.591, 0.590, 0.569), (0.954, 0.971, 0.968, 0.967),
        (0.628, 0.661, 0.654, 0.657), (0.882, 0.888, 0.886, 0.898), (0.936, 0.931, 0.916, 0.931),
        (0.661, 0.668, 0.609, 0.685), (0.583, 0.583, 0.563, 0.625), (0.775, 0.838, 0.866, 0.875),
        (1.000, 1.000, 1.000, 1.000), (0.940, 0.962, 0.965, 0.962), (0.619, 0.666, 0.614, 0.669),
        (0.972, 0.981, 0.9751, 0.975), (0.957, 0.978, 0.946, 0.970),
    ]  # fmt: skip
    names = ["C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf"]
    found = ranks(pd.DataFrame(table, columns=names).T)
    assert found.mean == pytest.approx(
        {"C4.5": 3.143, "C4.5+m": 2.000, "C4.5+cf": 2.893, "C4.5+m+cf": 1.964}, abs=5e-4
    )
    assert found.critical == pytest.approx(1.25, abs=0.005)
    assert found.p < 0.05


def test_ranks_need_three_of_each() -> None:
    with pytest.raises(ValueError, match="got 2 and 3"):
        ranks(pd.DataFrame(np.ones((2, 3))))


def test_shares_of_a_balanced_design_are_the_factors_variances() -> None:
    """Of y = a_i + b_j, each factor's share is its variance over both's."""
    a, b = {"x": 0.0, "y": 3.0, "z": 1.0}, {0.5: 0.0, 1.0: 2.0}
    frame = pd.DataFrame([{"rule": i, "lr": j, "y": a[i] + b[j]} for i, j in product(a, b)])
    found = eta_squared(frame["y"], {"rule": frame["rule"], "rate": frame[["lr"]]})
    total = np.var([*a.values()]) + np.var([*b.values()])
    assert found["rule"] == pytest.approx(np.var([*a.values()]) / total)
    assert found["rate"] == pytest.approx(np.var([*b.values()]) / total)
    assert found["rest"] == pytest.approx(0, abs=1e-9)


def test_shares_are_those_of_a_table_of_variance() -> None:
    """By statsmodels 0.15, anova_lm(ols("y ~ C(rule) + x").fit(), typ=2)."""
    frame = pd.DataFrame(
        {"rule": list("aabbcc"), "x": [0.0, 1, 2, 0, 1, 3], "y": [1.0, 2.0, 4.5, 2.0, 2.0, 4.0]}
    )
    found = eta_squared(frame["y"], {"rule": frame["rule"], "x": frame[["x"]]})
    total = ((frame["y"] - frame["y"].mean()) ** 2).sum()
    assert found["rule"] * total == pytest.approx(2.137873, abs=1e-6)
    assert found["x"] * total == pytest.approx(5.555556, abs=1e-6)


@pytest.mark.parametrize("figures", [[0.5] * 4, [0.1 + 0.2, 0.3, 0.3, 0.3]])
def test_of_figures_that_are_all_the_same_there_are_no_shares(figures: list[float]) -> None:
    assert eta_squared(figures, {"rule": pd.Series(["a", "a", "b", "b"])}) == {}


def test_what_factors_have_in_common_is_the_rests() -> None:
    """Two columns that say the same take nothing each from what the other leaves."""
    rule, lr = pd.Series(list("xyxy")), pd.DataFrame({"lr": [0.0, 1.0, 0.0, 1.0]})
    found = eta_squared([0.0, 2.0, 0.0, 2.0], {"rule": rule, "rate": lr})
    assert found == pytest.approx({"rule": 0.0, "rate": 0.0, "rest": 1.0}, abs=1e-9)
