"""Methods over several benchmarks: closed forms, published numbers and simulated data."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from numpy.typing import NDArray
from scipy import stats

from experiments.leaderboard.benchmarks import mixed_model, over_benchmarks, ranks
from fairflower.statistics import holm

#: Variances of twelve methods' gains over benchmarks, as unequal as on the first three.
UNEQUAL = np.array([0.05, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 6.03]) / 2


def drawn(
    rng: np.random.Generator, benchmarks: int, variances: NDArray[np.float64] = UNEQUAL
) -> NDArray[np.float64]:
    """Means [methods, benchmarks] of methods that are equal on average, the reference first."""
    own = np.sqrt(variances)[:, None] * rng.normal(size=(len(variances), benchmarks))
    shape = (len(variances) + 1, benchmarks)
    return np.vstack([np.zeros(benchmarks), own]) + 0.25 * rng.normal(size=shape)


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


def test_the_mixed_model_matches_statsmodels() -> None:
    rng = np.random.default_rng(0)
    means = rng.normal(size=(5, 6)) + 2 * rng.normal(size=6)
    table = pd.DataFrame(
        [(str(m), b, means[m, b]) for m in range(5) for b in range(6)],
        columns=["method", "benchmark", "y"],
    )
    fit = smf.mixedlm("y ~ method", table, groups="benchmark").fit(reml=True)
    for m, one in mixed_model(gains(means)).items():
        assert one.mean == pytest.approx(fit.params[f"method[T.{m}]"])
        assert one.error == pytest.approx(fit.bse[f"method[T.{m}]"], rel=1e-4)


def test_the_mixed_models_intervals_and_p_values_are_dunnetts() -> None:
    """The largest of the |t| values, which are correlated by 1/2, by SciPy's multivariate t."""
    values = gains(drawn(np.random.default_rng(3), 5))
    judged = mixed_model(values, 2.0)
    k, df = len(values), len(values) * 4
    correlation = (np.eye(k) + 1) / 2
    distribution = stats.multivariate_t(np.zeros(k), correlation, df=df)

    def exceeds(t: float) -> float:
        ends = np.full(k, t)
        return 1 - float(distribution.cdf(ends, lower_limit=-ends, random_state=0))

    for one in judged.values():
        assert one.df == df
        assert one.p_same == pytest.approx(exceeds(max(0, 2 - abs(one.mean)) / one.error), abs=2e-3)
        assert one.equivalent == (not one.sign and -2 < one.low < one.high < 2)
        assert exceeds((one.high - one.mean) / one.error) == pytest.approx(0.05, abs=1e-3)
        assert one.p == pytest.approx(exceeds(abs(one.mean) / one.error), abs=2e-3)


def test_the_mixed_model_with_one_method_is_the_paired_t_test() -> None:
    pairs = [0.3, 1.2, 0.8, 1.9, 0.1, 1.4]
    (one,) = mixed_model({"a": pairs}).values()
    test = stats.ttest_1samp(pairs, 0.0)
    assert one.p == pytest.approx(test.pvalue, rel=1e-3)
    ends = tuple(test.confidence_interval(0.95))
    assert (one.low, one.high) == pytest.approx(ends, rel=1e-3)
    assert one.level == pytest.approx(0.05, rel=1e-3)


def test_equal_methods_are_equivalent_in_the_mixed_model() -> None:
    (one,) = mixed_model({"a": [0.0] * 5}, 2.0).values()
    assert (one.mean, one.sign, one.equivalent) == (0.0, 0, True)


def test_the_mixed_model_gives_no_verdict_without_a_spread_or_methods() -> None:
    (one,) = mixed_model({"a": [1.0] * 5}, 2.0).values()
    assert (one.mean, one.sign, one.equivalent) == (1.0, 0, False)
    assert math.isnan(one.p)
    assert mixed_model({}) == {}


SIMS = [200, pytest.param(2000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("variances", [UNEQUAL, np.full(12, UNEQUAL.mean())], ids=["un", "equal"])
@pytest.mark.parametrize("benchmarks", [5, 6])
@pytest.mark.parametrize("sims", SIMS)
def test_error_rates_and_power_over_benchmarks(
    sims: int, benchmarks: int, variances: NDArray[np.float64]
) -> None:
    """With 12 methods: false claims, false equivalence at the margin, and gains of 4 points."""
    rng = np.random.default_rng(0)
    claims = same = found = equivalent = 0
    for _ in range(sims):
        values = gains(drawn(rng, benchmarks, variances))
        judged = over_benchmarks(values, 2.0)
        claims += any(one.sign for one in judged.values())
        equivalent += judged[1].equivalent
        at_margin = {m: [x + 2.0 for x in row] for m, row in values.items()}
        same += any(one.equivalent for one in over_benchmarks(at_margin, 2.0).values())
        gained = {**values, 1: [x + 4.0 for x in values[1]]}
        found += over_benchmarks(gained, 2.0)[1].sign > 0
    noise = 3 * math.sqrt(0.05 * 0.95 / sims)
    assert claims / sims <= 0.05 + noise
    assert same / sims <= 0.05 + noise
    assert found / sims > 0.8
    assert equivalent / sims > 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("sims", SIMS)
def test_the_mixed_model_needs_equal_variances(sims: int) -> None:
    """One method that varies ten times as much: claimed too often; with Student's test, not."""
    rng = np.random.default_rng(1)
    rates = {}
    for name, variances in {"equal": np.ones(12), "unequal": np.r_[np.full(11, 0.2), 9.8]}.items():
        claims = [
            (
                any(one.sign for one in mixed_model(values).values()),
                any(one.sign for one in over_benchmarks(values).values()),
            )
            for values in (gains(drawn(rng, 5, variances / 2)) for _ in range(sims))
        ]
        rates[name] = np.mean(claims, axis=0)
    noise = 3 * math.sqrt(0.05 * 0.95 / sims)
    assert max(*rates["equal"], rates["unequal"][1]) <= 0.05 + noise
    assert rates["unequal"][0] > 0.1


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
