"""Methods over several benchmarks: closed forms, published numbers and simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fairflower.statistics.benchmarks import over_benchmarks, ranks
from fairflower.statistics.differences import holm

#: Variances of twelve methods' gains over benchmarks, as unequal as on the first three.
UNEQUAL = np.array([0.05, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 6.03]) / 2


def drawn(rng: np.random.Generator, benchmarks: int) -> NDArray[np.float64]:
    """Means [methods, benchmarks] of methods that are equal on average; the first varies least."""
    own = np.sqrt(UNEQUAL)[:, None] * rng.normal(size=(len(UNEQUAL), benchmarks))
    return np.vstack([np.zeros(benchmarks), own]) + 0.25 * rng.normal(size=(13, benchmarks))


def gains(means: NDArray[np.float64]) -> dict[int, list[float]]:
    return {m: list(row - means[0]) for m, row in enumerate(means[1:], 1)}


def test_over_benchmarks_is_a_t_test_with_holm_correction_and_bonferroni_intervals():
    values = gains(drawn(np.random.default_rng(1), 6))
    differences = over_benchmarks(values, 2.0)
    by_scipy = holm({m: stats.ttest_1samp(row, 0.0).pvalue for m, row in values.items()})
    for m, row in values.items():
        one = differences[m]
        assert (one.mean, one.n, one.margin) == (pytest.approx(np.mean(row)), 6, 2.0)
        assert one.p == pytest.approx(by_scipy[m])
        width = stats.t.ppf(1 - 0.05 / 24, 5) * np.std(row, ddof=1) / math.sqrt(6)
        assert one.high - one.mean == pytest.approx(width)


def test_four_benchmarks_give_no_verdict() -> None:
    (one,) = over_benchmarks({"a": [5.0, 5.1, 5.2, 4.9]}, 2.0).values()
    assert one.low > 4
    assert (one.sign, one.equivalent) == (0, False)


@pytest.mark.parametrize("sims", [300, pytest.param(4000, marks=pytest.mark.nightly)])
def test_false_claims_are_rare_if_methods_have_unequal_variances(sims: int) -> None:
    """A mixed model with one variance of method x benchmark makes twice as many."""
    rng = np.random.default_rng(0)
    claims = of_mixed = 0
    for _ in range(sims):
        means = drawn(rng, 6)
        values = gains(means)
        claims += any(one.sign for one in over_benchmarks(values).values())
        rest = means - means.mean(0) - means.mean(1, keepdims=True) + means.mean()
        df = 5 * 12
        error = math.sqrt(2 * float((rest**2).sum()) / df / 6)
        p = {m: 2 * stats.t.sf(abs(np.mean(row)) / error, df) for m, row in values.items()}
        of_mixed += min(holm(p).values()) < 0.05
    noise = 3 * math.sqrt(0.05 * 0.95 / sims)
    assert claims / sims <= 0.06 + noise
    assert claims < of_mixed
    if sims > 1000:
        assert of_mixed / sims == pytest.approx(0.10, abs=0.02)


def test_the_critical_difference_matches_demsar_2006() -> None:
    """Demsar (JMLR 2006), Table 6 and text: 4 classifiers, 14 data sets, CD = 1.25."""
    table = [
        (0.763, 0.768, 0.771, 0.798), (0.599, 0.591, 0.590, 0.569), (0.954, 0.971, 0.968, 0.967),
        (0.628, 0.661, 0.654, 0.657), (0.882, 0.888, 0.886, 0.898), (0.936, 0.931, 0.916, 0.931),
        (0.661, 0.668, 0.609, 0.685), (0.583, 0.583, 0.563, 0.625), (0.775, 0.838, 0.866, 0.875),
        (1.000, 1.000, 1.000, 1.000), (0.940, 0.962, 0.965, 0.962), (0.619, 0.666, 0.614, 0.669),
        (0.972, 0.981, 0.9751, 0.975), (0.957, 0.978, 0.946, 0.970),
    ]  # fmt: skip
    names = ["C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf"]
    result = ranks(dict(zip(names, np.array(table).T.tolist(), strict=True)))
    assert result.mean == pytest.approx(
        {"C4.5": 3.143, "C4.5+m": 2.000, "C4.5+cf": 2.893, "C4.5+m+cf": 1.964}, abs=5e-4
    )
    assert result.critical == pytest.approx(1.25, abs=0.005)
    assert result.p < 0.05


def test_ranks_of_methods_that_tie_everywhere_have_p_value_1() -> None:
    result = ranks({name: [1.0, 2.0, 3.0] for name in "abc"})
    assert result.mean == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert result.p == 1.0


def test_ranks_need_at_least_three_methods() -> None:
    with pytest.raises(ValueError, match="got 2 and 3"):
        ranks({"a": [1.0] * 3, "b": [1.0] * 3})
