"""Fairness between groups: fairlearn's numbers, a loop over people, and undefined values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.numerics import group_fairness as fairness

PARITY, OPPORTUNITY, ODDS = fairness.DIFFERENCES
PARITY_RATIO, OPPORTUNITY_RATIO, ODDS_RATIO = fairness.RATIOS

#: Twelve people; the rates and differences below, and the ratio of parity, are fairlearn 0.15's.
LABELS = [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0]
PREDICTED = [1, 1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0]
GROUPS = 5 * [0] + 7 * [1]

people = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=60
)


def test_rates_differences_and_ratios_match_fairlearn():
    counts = fairness.counts_by_group(LABELS, PREDICTED, GROUPS, 2)
    rates = fairness.group_rates(counts)
    np.testing.assert_allclose(rates["selection"], (0.6, 0.285714), atol=1e-6)
    np.testing.assert_allclose(rates["true_positive"], (0.666667, 0.5), atol=1e-6)
    np.testing.assert_allclose(rates["false_positive"], (0.5, 0.2), atol=1e-6)
    for actual, expected in (
        (PARITY(counts), 0.314286),
        (OPPORTUNITY(counts), 0.166667),
        (ODDS(counts), 0.3),
        (PARITY_RATIO(counts), 0.476190),
        (OPPORTUNITY_RATIO(counts), 0.75),
        (ODDS_RATIO(counts), 0.4),
    ):
        assert actual == pytest.approx(expected, abs=1e-6)


@given(people)
def test_differences_match_a_loop_over_people(people):
    def rate(group, labels):
        chosen = [p for y, p, g in people if g == group and y in labels]
        return sum(chosen) / len(chosen) if chosen else math.nan

    counts = fairness.counts_by_group(*zip(*people, strict=True), num_groups=3)
    differences = []
    for labels in ((0, 1), (1,), (0,)):
        rates = [rate(group, labels) for group in range(3)]
        known = not any(map(math.isnan, rates))
        differences.append(max(rates) - min(rates) if known else math.nan)
    parity, opportunity, false = differences
    odds = math.nan if math.isnan(opportunity + false) else max(opportunity, false)
    for actual, expected in (
        (PARITY(counts), parity),
        (OPPORTUNITY(counts), opportunity),
        (ODDS(counts), odds),
    ):
        assert actual == pytest.approx(expected, nan_ok=True)


def test_without_positives_in_a_group_parity_is_defined_and_opportunity_is_not():
    counts = fairness.counts_by_group([1, 0, 0], [1, 0, 1], [0, 0, 1], 2)
    assert math.isnan(OPPORTUNITY(counts))
    assert math.isnan(OPPORTUNITY_RATIO(counts))
    assert math.isnan(ODDS(counts))
    assert math.isnan(ODDS_RATIO(counts))
    assert PARITY(counts) == 0.5


def test_parity_of_one_group_is_undefined_and_without_selection_the_ratio_is_1():
    assert math.isnan(PARITY([[2, 1, 1, 1, 1, 0]]))
    assert PARITY_RATIO([[2, 0, 1, 0, 1, 0]] * 2) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 2], [0, 0], [0, 0], 1), r"labels\[1\] = 2: expected an integer from 0 to 1"),
        (([0, 1], [0.5, 0], [0, 0], 1), r"predicted\[0\] = 0.5"),
        (([0, 1], [0, 0], [0, 3], 3), r"groups\[1\] = 3: expected an integer from 0 to 2"),
        (([0, 1], [0, 0], [0], 1), r"groups of shape \(1,\): expected equal shapes"),
    ],
)
def test_invalid_labels_predictions_and_groups_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        fairness.counts_by_group(*arguments)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2, 3], r"shape \(3,\): expected \(G, 6\)"),
        ([[5, 3, 3, 2, 2, 2]], "the numbers contradict each other"),
        ([[-1, 0, -1, 0, 0, 0]], ">= 0"),
        ([[2, 2, 0, 2, 2, 0]], "the numbers contradict each other"),
    ],
)
def test_invalid_counts_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        fairness.group_rates(counts)
