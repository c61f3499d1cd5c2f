"""Methods over several benchmarks: closed forms of balanced designs, and drawn data."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fairflower.statistics.benchmarks import mixed, pooled
from fairflower.statistics.differences import Difference, differences, dunnett, judged_as_family


def drawn(
    seed: int, shape: tuple[int, int, int], effects: dict[int, float], interaction: float = 1.0
) -> pd.DataFrame:
    """Runs on (benchmarks, federations, methods), all random parts with known deviations."""
    rng = np.random.default_rng(seed)
    count, federations, methods = shape
    rows = []
    for benchmark in range(count):
        own = interaction * rng.normal(size=methods) + 50 + 9 * rng.normal()
        for federation in range(federations):
            values = own + 3 * rng.normal() + 2 * rng.normal(size=methods)
            rows += [
                (benchmark, federation, f"m{m}", value + effects.get(m, 0.0))
                for m, value in enumerate(values)
            ]
    return pd.DataFrame(rows, columns=["benchmark", "federation", "method", "value"])


def test_a_balanced_mixed_model_is_the_table_of_variance() -> None:
    table = drawn(1, (4, 6, 5), {2: 3.0})
    found = mixed(table, "m0", 2.0)
    means = table.pivot_table(index="benchmark", columns="method", values="value")
    rest = means.sub(means.mean(axis=1), axis=0).sub(means.mean(axis=0), axis=1)
    rest += means.to_numpy().mean()
    error = math.sqrt(2 * (rest**2).to_numpy().sum() / 12 / 4)
    assert list(found) == ["m1", "m2", "m3", "m4"]
    for name, one in found.items():
        assert one.mean == pytest.approx((means[name] - means["m0"]).mean())
        assert one.error == pytest.approx(error, rel=1e-3)
        assert (one.df, one.n) == (12, 4)
        assert one.high - one.mean == pytest.approx(dunnett(4, 12) * one.error)


def test_the_model_of_the_means_is_that_of_all_runs() -> None:
    """By statsmodels on every run, with federation and method x benchmark as components."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    table = drawn(0, (3, 5, 3), {}, interaction=3.0)
    whole = MixedLM.from_formula(
        "value ~ C(method)",
        groups="benchmark",
        re_formula="1",
        vc_formula={"federation": "0+C(federation)", "method": "0+C(method)"},
        data=table,
    ).fit(reml=True, method=["powell", "lbfgs"])
    for place, one in enumerate(mixed(table, "m0").values(), 1):
        assert one.mean == pytest.approx(whole.params.iloc[place], abs=1e-6)
        assert one.error == pytest.approx(whole.bse.iloc[place], rel=0.01)


def test_federations_that_a_method_lacks_count_for_none() -> None:
    table = drawn(2, (3, 5, 3), {})
    lacking = table[~((table["method"] == "m1") & (table["federation"] == 4))]
    without = table[table["federation"] != 4]
    assert mixed(lacking, "m0", 2.0) == mixed(without, "m0", 2.0)


@pytest.mark.parametrize("method", ["m0", "m9"])
def test_a_mixed_model_needs_the_reference_and_two_benchmarks(method: str) -> None:
    with pytest.raises(ValueError, match=f"needs {method}"):
        mixed(drawn(0, (1 if method == "m0" else 2, 3, 2), {}), method)


def test_pooled_over_benchmarks_is_welchs_mean() -> None:
    rng = np.random.default_rng(3)
    samples = [rng.normal(1, 2, 6), rng.normal(0, 5, 9)]
    found = pooled([differences({"a": list(x)}, 2.0)["a"] for x in samples])
    # The mean of x and y is half the difference of x and -y.
    welch = stats.ttest_ind(samples[0], -samples[1], equal_var=False)
    assert found.mean == pytest.approx(np.mean([x.mean() for x in samples]))
    assert (found.p, found.df) == pytest.approx((welch.pvalue, welch.df))
    interval = welch.confidence_interval()
    assert (2 * found.low, 2 * found.high) == pytest.approx((interval.low, interval.high))
    assert (found.n, found.margin) == (6, 2.0)


def test_pooled_differences_need_errors() -> None:
    with pytest.raises(ValueError, match="error on each benchmark"):
        pooled([])
    with pytest.raises(ValueError, match="error on each benchmark"):
        pooled([Difference(1.0, math.nan, 1, *[math.nan] * 3)])


@pytest.mark.parametrize("sims", [60, pytest.param(1500, marks=pytest.mark.nightly)])
def test_mixed_models_of_benchmarks_without_differences_rarely_tell_one(sims: int) -> None:
    """Also where a method's effect varies between benchmarks; `pooled` answers for these alone."""
    tables = coverage = 0
    for seed in range(sims):
        found = mixed(drawn(seed, (5, 6, 4), {1: 4.0}, interaction=1.5), "m0")
        tables += any(one.sign for name, one in found.items() if name != "m1")
        coverage += all(one.low <= 4.0 * (name == "m1") <= one.high for name, one in found.items())
    bound = 0.06 + 3 * math.sqrt(0.05 * 0.95 / sims)
    assert tables / sims <= bound
    assert 1 - coverage / sims <= bound


@pytest.mark.parametrize("sims", [60, pytest.param(1500, marks=pytest.mark.nightly)])
def test_pooled_differences_keep_the_error_rate_for_their_benchmarks(sims: int) -> None:
    rng = np.random.default_rng(0)
    tables = 0
    for _ in range(sims):
        by_benchmark = []
        for spread in (1.0, 3.0, 2.0):
            values = spread * rng.normal(size=(6, 8))
            by_benchmark.append(differences(dict(enumerate(values[1:] - values[0]))))
        family = {m: pooled([found[m] for found in by_benchmark]) for m in range(5)}
        tables += any(one.sign for one in judged_as_family(family).values())
    assert tables / sims <= 0.06 + 3 * math.sqrt(0.05 * 0.95 / sims)
