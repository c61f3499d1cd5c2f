"""Differences judged as a family: limma's and SciPy's numbers, closed forms, simulated data."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from brute_force import closed_p
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats

from fairflower.statistics import (
    MIN_PAIRS,
    differences,
    example_worth,
    holm,
    judged_as_family,
    moderated_variances,
)

SAMPLES = st.lists(st.integers(-50, 50), min_size=3, max_size=9).filter(lambda v: np.ptp(v) > 0)


@given(SAMPLES, st.floats(0.5, 20))
def test_a_single_difference_is_a_t_test_and_equivalence_is_two_one_sided_tests(
    values: list[int], margin: float
) -> None:
    one = differences({"a": values}, margin)["a"]
    expected = stats.ttest_1samp(values, 0)
    interval = expected.confidence_interval(0.95)
    assert one.p == pytest.approx(expected.pvalue)
    assert (one.low, one.high) == pytest.approx((interval.low, interval.high))
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    assert one.p_same == pytest.approx(max(below, above))


def test_moderated_variances_match_limmas_model() -> None:
    """The fitted prior reproduces the mean and the variance of the log variances."""
    s2, df = [1.0, 2.0, 0.3, 9.0, 4.0, 0.9, 1.7], [4, 4, 4, 5, 4, 4, 3]
    d = np.array(df, float)
    logs = np.log(s2) - special.digamma(d / 2) + np.log(d / 2)
    excess = np.var(logs, ddof=1) - special.polygamma(1, d / 2).mean()
    half = optimize.brentq(lambda x: special.polygamma(1, x) - excess, 1e-3, 1e6)
    prior = math.exp(logs.mean() + special.digamma(half) - math.log(half))
    for (variance, whole), s, own in zip(moderated_variances(s2, df), s2, df, strict=True):
        assert variance == pytest.approx((2 * half * prior + own * s) / (2 * half + own))
        assert own <= whole <= 2 * half + own + 1e-9


def test_variances_that_differ_only_by_chance_are_pooled() -> None:
    variances = moderated_variances([1.0, 1.1, 0.9, 1.05], [9, 9, 9, 9])
    assert {round(variance, 12) for variance, _ in variances} == {1.0125}
    # Fewer than 36 degrees of freedom, because the differences share the reference's noise.
    assert all(9 < df < 36 for _, df in variances)


def test_fewer_than_three_variances_are_not_moderated() -> None:
    assert moderated_variances([1.0, 4.0], [4, 4]) == [(1.0, 4.0), (4.0, 4.0)]
    assert moderated_variances([], []) == []
    assert moderated_variances([0.0, 0.0, 1.0, 0.0], [2, 2, 2, 2])[0] == (0.0, 2.0)


def test_a_small_spread_by_luck_is_not_significant_in_a_family() -> None:
    """A method loses 0.4 points on every seed, beside methods that vary by two points."""
    rng = np.random.default_rng(0)
    values = {f"m{i}": list(rng.normal(-5 * (i < 3), 2.0, 5)) for i in range(12)}
    values["lucky"] = [-0.4, -0.41, -0.39, -0.4, -0.4]
    assert differences({"lucky": values["lucky"]})["lucky"].sign == -1
    assert judged_as_family(differences(values))["lucky"].sign == 0


def test_moderation_lowers_no_variance() -> None:
    """A method that varies more than the others keeps its own variance."""
    rng = np.random.default_rng(3)
    values = {f"m{i}": list(rng.normal(0, 1.0, 6)) for i in range(11)}
    values["volatile"] = list(rng.normal(0, 4.0, 6))
    for name, one in differences(values).items():
        assert one.error >= np.std(values[name], ddof=1) / math.sqrt(6) - 1e-12
    own = np.std(values["volatile"], ddof=1) / math.sqrt(6)
    assert differences(values)["volatile"].error == pytest.approx(own)


@pytest.mark.parametrize("n", [5, pytest.param(6, marks=pytest.mark.nightly)])
def test_a_method_with_a_large_variance_causes_few_false_claims(n: int) -> None:
    """Methods are equal, but one varies four times as much; 10 % before, at six pairs."""
    rng, sims, claims = np.random.default_rng(n), 600, 0
    for _ in range(sims):
        spread = np.array([1.0] * 12 + [4.0])[:, None]
        runs = rng.normal(size=(13, n)) * spread
        judged = judged_as_family(differences(dict(enumerate(runs[1:] - runs[0]))))
        claims += any(one.sign for one in judged.values())
    assert claims / sims <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / sims)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_fewer_than_five_pairs_have_intervals_and_no_verdict(n: int) -> None:
    values = [5.0, 5.01, 4.99, 5.0][:n]
    one = judged_as_family(differences({"a": values}, 50.0))["a"]
    assert one.low < 5 < one.high
    assert (one.sign, one.equivalent) == (0, False)


def test_equal_differences_have_no_p_value_and_no_interval() -> None:
    one = judged_as_family(differences({"a": [2.0] * 6}, 3.0))["a"]
    assert all(map(math.isnan, (one.p, one.p_same, one.low, one.high, one.detectable)))
    assert (one.sign, one.equivalent, one.n) == (0, False, 6)
    one = differences({"a": [2.0]})["a"]
    assert math.isnan(one.p)


def test_methods_that_agree_in_every_pair_are_equivalent() -> None:
    judged = judged_as_family(
        differences({"a": [1e-13, 0.0, -1e-13, 0, 0], "b": [1, 2, 3, 1, 2]}, 2.0)
    )
    one = judged["a"]
    assert (one.low, one.high, one.p, one.detectable) == (0, 0, 1, 0)
    assert one.equivalent
    assert not one.sign


def test_a_spread_below_the_worth_of_one_example_is_raised_to_it() -> None:
    values = [2.0, 2.0, 2.1, 2.0, 2.0, 2.0]
    floored = differences({"a": values}, floors={"a": 0.3})["a"]
    assert floored.error == pytest.approx(0.3 / math.sqrt(6))
    assert floored.std == pytest.approx(np.std(values, ddof=1))
    kept = differences({"a": [0.0, 4.0, 2.0]}, floors={"a": 0.3})["a"]
    assert kept.error == pytest.approx(2.0 / math.sqrt(3))
    equal = differences({"a": [2.0] * 5}, floors={"a": 0.3})["a"]
    assert equal.p == pytest.approx(2 * stats.t.sf(2.0 / (0.3 / math.sqrt(5)), 4))
    zero = differences({"a": [0.0] * 5}, 0.5, floors={"a": 0.3})["a"]
    assert zero.high == pytest.approx(stats.t.ppf(0.975, 4) * 0.3 / math.sqrt(5))
    assert zero.p_same == pytest.approx(stats.t.sf(0.5 / (0.3 / math.sqrt(5)), 4))


@given(st.lists(st.floats(0.0, 3.0), min_size=2, max_size=2))
def test_the_error_does_not_fall_as_the_spread_grows(scales: list[float]) -> None:
    """Scaling the same values up never lowers the error, also not at the floor."""
    values = np.array([-1.0, 0.5, 0.0, 1.5, -1.0, 0.0])
    errors = [
        differences({"a": list(scale * values)}, 2.0, {"a": 0.6})["a"].error
        for scale in sorted(scales)
        if scale > 1e-6
    ]
    assert errors == sorted(errors)


def test_the_floor_of_one_method_does_not_change_the_others() -> None:
    rng = np.random.default_rng(1)
    values = {f"m{i}": list(rng.normal(0, 2.0, 8)) for i in range(5)} | {"calm": [0.1, 0.0] * 4}
    alone, raised = differences(values, 2.0), differences(values, 2.0, {"calm": 3.0})
    assert raised["calm"].error == pytest.approx(3.0 / math.sqrt(8))
    assert alone["calm"].error < raised["calm"].error
    assert {k: d for k, d in raised.items() if k != "calm"} == {
        k: d for k, d in alone.items() if k != "calm"
    }


def test_an_example_is_worth_most_in_the_smallest_domain() -> None:
    right = np.array([9, 60])  # of 16 and of 100
    moved = [100 * np.mean((right + step) / [16, 100]) for step in ([0, 0], [1, 0], [0, 1])]
    largest = max(abs(value - moved[0]) for value in moved[1:])
    assert example_worth([50.0, 50.0], [16, 100]) == pytest.approx(largest)


def discrete_false_claims(n: int, changed: float, sims: int) -> float:
    """Share of false claims about a method whose predictions on 16 examples change by chance.

    ``changed`` is the probability that the difference is one example, to either side.
    """
    rng = np.random.default_rng(n)
    p = [changed / 2, 1 - changed, changed / 2]
    floors = {"a": example_worth([100.0], [16])}
    drawn = 100 / 16 * rng.choice([-1, 0, 1], (sims, n), p=p)
    return sum(differences({"a": list(d)}, floors=floors)["a"].sign != 0 for d in drawn) / sims


@pytest.mark.parametrize("changed", [0.1, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("n", [5, 7, 10, 40])
def test_differences_of_whole_examples_cause_few_false_claims(n: int, changed: float) -> None:
    sims = 1000
    bound = 0.06 + 3 * math.sqrt(0.05 * 0.95 / sims)
    assert discrete_false_claims(n, changed, sims) <= bound


@given(st.dictionaries(st.text("abcdefgh", min_size=1), SAMPLES, min_size=1, max_size=6))
def test_verdicts_and_equivalence_agree_with_the_interval(values: dict[str, list[int]]) -> None:
    for one in judged_as_family(differences(values, 15.0)).values():
        if one.n >= MIN_PAIRS:
            assert one.sign == (
                1 if one.low >= 0 < one.high else -1 if one.high <= 0 > one.low else 0
            )
        if one.n >= MIN_PAIRS and one.low > -15 and one.high < 15 and not one.sign:
            assert one.equivalent
        assert not (one.equivalent and one.sign)


def test_a_difference_significant_only_by_holm_has_an_interval_ending_at_zero() -> None:
    values = {"clear": [8, 9, 7, 8, 9, 8], "small": [1.0, 1.3, 0.9, 0.2, 1.1, 0.8]}
    alone = {name: stats.ttest_1samp(pairs, 0) for name, pairs in values.items()}
    wider = {n: test.confidence_interval(1 - 0.05 / 2) for n, test in alone.items()}
    judged = judged_as_family(differences(values))
    assert judged["clear"].low == pytest.approx(wider["clear"].low)
    # Shifted so that p lies between 0.025 and 0.05, where only Holm's second step rejects.
    shifted = {**values, "small": [v - 0.48 for v in values["small"]]}
    assert 0.025 < stats.ttest_1samp(shifted["small"], 0).pvalue < 0.05
    small = judged_as_family(differences(shifted))["small"]
    assert (small.sign, small.low) == (1, 0.0)
    turned = {name: [-v for v in pairs] for name, pairs in shifted.items()}
    assert judged_as_family(differences(turned))["small"].high == 0.0


@given(st.dictionaries(st.text("abcdefgh", min_size=1), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_matches_the_step_down_procedure(p: dict[str, float]) -> None:
    """Rejects from the smallest on, as long as p_(i) < level / (m - i + 1)."""
    adjusted = holm(p)
    for level in (0.01, 0.05, 0.2):
        rejected: set[str] = set()
        for i, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
            if not value < level / (len(p) - i):
                break
            rejected.add(name)
        close = any(
            abs(value * (len(p) - i) - level) < 1e-12 for i in range(len(p)) for value in p.values()
        )
        assert close or {name for name, one in adjusted.items() if one < level} == rejected


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4))
def test_two_kinds_of_tests_are_corrected_as_the_closed_test(
    pairs: list[tuple[float, ...]],
) -> None:
    larger = {k: max(pair) for k, pair in enumerate(pairs)}
    for kind in (0, 1):
        adjusted = holm({k: pair[kind] for k, pair in enumerate(pairs)}, larger)
        for key in range(len(pairs)):
            assert adjusted[key] == pytest.approx(closed_p(pairs, key, kind))


@pytest.mark.parametrize("methods", [2, 4])
def test_all_verdicts_are_right_together_where_some_methods_are_alike_and_others_differ(
    methods: int,
) -> None:
    """Half are truly 0 and half at the margin, 3.3 standard errors; 24 pairs, a level of 5 %."""
    rng, sims, n, margin = np.random.default_rng(5), 3000, 24, 3.3
    wrong = 0
    for _ in range(sims):
        noise = rng.normal(size=(methods + 1, n)) * math.sqrt(n / 2)
        values = noise[1:] - noise[0] + margin * (np.arange(methods)[:, None] % 2)
        judged = judged_as_family(differences(dict(enumerate(values)), margin))
        wrong += any(
            one.sign < 0 or one.equivalent if k % 2 else one.sign for k, one in judged.items()
        )
    assert wrong / sims <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / sims)


def test_a_missing_p_value_is_not_part_of_the_family() -> None:
    adjusted = holm({"a": 0.02, "b": math.nan, "c": 0.5})
    assert adjusted["a"] == pytest.approx(0.04)
    assert math.isnan(adjusted["b"])


def false_claims(methods: int, n: int, sims: int, shared: float = 0.0) -> float:
    """Share of tables with a false claim; ``shared`` is the SD of what all replicates share."""
    rng = np.random.default_rng(methods * 1000 + n)
    tables = 0
    for _ in range(sims):
        spreads = np.exp(0.3 * rng.normal(size=(methods + 1, 1)))
        values = rng.normal(size=(methods + 1, n)) * spreads
        values += shared * rng.normal(size=(methods + 1, 1))
        judged = judged_as_family(differences(dict(enumerate(values[1:] - values[0]))))
        tables += any(one.sign for one in judged.values())
    return tables / sims


@pytest.mark.parametrize(
    ("methods", "n", "sims"),
    [
        (2, 10, 300),
        (11, 5, 150),
        *[
            pytest.param(methods, n, 4000, marks=pytest.mark.nightly)
            for methods, n in product((3, 11, 40), (5, 10, 24))
        ],
    ],
)
def test_few_tables_without_differences_have_a_claim(methods: int, n: int, sims: int) -> None:
    """At most 6 %, and three standard errors of the simulation."""
    bound = 0.06 + 3 * math.sqrt(0.05 * 0.95 / sims)
    assert false_claims(methods, n, sims) <= bound
