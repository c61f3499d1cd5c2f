"""Fairness metrics against brute force, closed forms and their defining properties."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from fairflower.numerics import metrics
from fairflower.numerics.scores import Score

Metric = Callable[..., float]

accuracies = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=40)
RELATIVE: list[Metric] = [metrics.jain, metrics.gini, metrics.entropy]
EVERY: list[Metric] = [
    metrics.AVG,
    lambda a: metrics.std(a, ddof=0),
    metrics.MIN,
    metrics.MAX,
    metrics.GAP,
    metrics.worst_fraction,
    *RELATIVE,
]


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@given(accuracies)
def test_metrics_match_their_definitions(a: list[float]) -> None:
    k = len(a)
    mean = sum(a) / k
    shares = [value / sum(a) for value in a]
    differences = sum(abs(x - y) for x in a for y in a)
    assert metrics.AVG(a) == close(mean)
    assert metrics.std(a, ddof=0) == close(math.sqrt(sum((v - mean) ** 2 for v in a) / k))
    assert metrics.gini(a) == close(differences / (2 * k * k * mean))
    assert metrics.jain(a) == close(sum(a) ** 2 / (k * sum(v * v for v in a)))
    assert metrics.entropy(a) == close(-sum(p * math.log(p) for p in shares))


@given(accuracies)
def test_jain_is_a_function_of_the_coefficient_of_variation(a: list[float]) -> None:
    cv = metrics.std(a, ddof=0) / metrics.AVG(a)
    assert metrics.jain(a) == close(1 / (1 + cv**2))


@given(accuracies)
def test_metrics_stay_within_their_bounds(a: list[float]) -> None:
    k, tiny = len(a), 1e-12
    assert 1 / k - tiny <= metrics.jain(a) <= 1 + tiny
    assert 0 <= metrics.gini(a) <= 1 - 1 / k + tiny
    assert -tiny <= metrics.entropy(a) <= math.log(k) + tiny
    assert metrics.MIN(a) <= metrics.worst_fraction(a) + tiny
    assert metrics.worst_fraction(a) <= metrics.AVG(a) + tiny <= metrics.MAX(a) + 2 * tiny
    assert metrics.GAP(a) == metrics.MAX(a) - metrics.MIN(a) >= 0


@given(accuracies, st.randoms())
def test_metrics_do_not_depend_on_the_order(a: list[float], generator: random.Random) -> None:
    shuffled = generator.sample(a, len(a))
    for metric in EVERY:
        assert metric(shuffled) == close(metric(a))


@given(accuracies, st.sampled_from([1e-200, 0.01, 100.0, 1e200]))
def test_relative_metrics_do_not_depend_on_the_scale(a: list[float], scale: float) -> None:
    scaled = [scale * value for value in a]
    for metric in RELATIVE:
        assert metric(scaled) == close(metric(a))
    if 1e-3 < scale < 1e3:
        for metric in (metrics.MIN, metrics.GAP, metrics.worst_fraction):
            assert metric(scaled) == pytest.approx(scale * metric(a), rel=1e-9, abs=1e-9)


@given(accuracies)
def test_equalizing_two_clients_never_reduces_fairness(a: list[float]) -> None:
    """The Pigou-Dalton principle: best and worst meet in the middle, the mean stays."""
    order = sorted(a)
    middle = (order[0] + order[-1]) / 2
    equalized = [middle, *order[1:-1], middle][: len(a)]
    assert metrics.gini(equalized) <= metrics.gini(a) + 1e-9
    assert metrics.jain(equalized) >= metrics.jain(a) - 1e-9
    assert metrics.entropy(equalized) >= metrics.entropy(a) - 1e-9
    assert metrics.MIN(equalized) >= metrics.MIN(a)


@given(st.integers(1, 30), st.floats(1e-300, 100))
def test_equal_values_are_perfectly_fair(k: int, value: float) -> None:
    a = [value] * k
    assert metrics.jain(a) == close(1)
    assert metrics.gini(a) == close(0)
    assert metrics.entropy(a) == close(math.log(k))


def every(a: list[float]) -> dict[str, float]:
    return {row.heading: row(a) for row in metrics.SUMMARIES}


@pytest.mark.parametrize("k", [1, 4, 20])
def test_all_zeros_count_as_equal(k: int) -> None:
    summaries = every([0.0] * k)
    assert (summaries["Jain"], summaries["Gini"]) == (1, 0)
    assert summaries["entropy"] == close(math.log(k))
    assert summaries["AVG"] == summaries["MIN"] == 0


def test_summaries_of_a_single_value() -> None:
    summaries = every([0.7])
    assert math.isnan(summaries.pop("STD ddof 1"))
    assert summaries == {
        "AVG": 0.7, "STD ddof 0": 0, "MIN": 0.7, "MAX": 0.7, "GAP": 0, "worst 10 %": 0.7,
        "Jain": 1, "Gini": 0, "entropy": 0,
    }  # fmt: skip


def test_one_client_with_everything_gives_the_extreme_values() -> None:
    a = [1.0, *19 * [0.0]]
    assert metrics.jain(a) == close(1 / 20)
    assert metrics.gini(a) == close(1 - 1 / 20)
    assert metrics.entropy(a) == 0


def test_summaries_declare_the_better_direction() -> None:
    """The direction follows from examples: equal high values, unequal values, and low values."""
    even, uneven, low = [0.8, 0.8], [0.9, 0.5], [0.3, 0.3]
    rows = (*metrics.SUMMARIES, metrics.WORST_HALF)
    assert [row.heading for row in rows if not row.better] == ["MAX"]
    for row in rows:
        worse = uneven if row.compares else low
        if row.better:
            assert row.better * (row(even) - row(worse)) > 0, row.heading
    for better in (1, -1):
        average, worst, *_ = metrics.over_domains(Score("mae", better))
        assert average.better == worst.better == better


def test_summaries_declare_whether_the_unit_cancels_and_whether_they_need_two_values() -> None:
    for row in metrics.SUMMARIES:
        assert (row.unit == "") == (row([0.2, 0.6]) == close(row([0.1, 0.3]))), row.heading
        assert row.compares == (row([0.6, 0.6]) == close(row([0.3, 0.3]))), row.heading


@given(st.permutations([0.2, 0.45, 0.6, 0.95]), st.integers(0, 3))
def test_gradients_of_summaries_match_finite_differences(a: list[float], k: int) -> None:
    step = 1e-6 * np.eye(4)[k]
    for row in (metrics.AVG, metrics.STD, metrics.MIN, metrics.WORST_HALF):
        assert row.gradient is not None
        slope = (row(np.array(a) + step) - row(np.array(a) - step)) / 2e-6
        assert row.gradient(np.array(a))[k] == pytest.approx(slope, abs=1e-6)


def test_headings_and_axes_of_summaries_are_unique() -> None:
    for facts in zip(*((row.heading, row.axis) for row in metrics.SUMMARIES), strict=True):
        assert len(set(facts)) == len(metrics.SUMMARIES)


def test_summaries_match_a_published_row() -> None:
    """FedHEAL's own row of Table 2, whose STD is printed with ddof 1."""
    summaries = every([90.27, 95.69, 79.94, 46.45])
    assert round(summaries["AVG"], 2) == 78.09
    assert round(summaries["STD ddof 1"], 2) == 22.08
    assert summaries["STD ddof 1"] / summaries["STD ddof 0"] == close(math.sqrt(4 / 3))


@pytest.mark.parametrize(
    ("k", "fraction", "counted"),
    [(4, 0.1, 1), (10, 0.1, 1), (19, 0.1, 1), (20, 0.1, 2), (100, 0.29, 29), (7, 1.0, 7)],
)
def test_worst_fraction_counts_at_least_one(k: int, fraction: float, counted: int) -> None:
    assert metrics.worst_fraction(np.arange(k)[::-1], fraction) == close((counted - 1) / 2)


@pytest.mark.parametrize("metric", EVERY)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "at least one"),
        ([0.5, math.nan], "nan at index 1"),
        ([math.inf], "inf at index 0"),
        ([[0.5, 0.6]], r"\(1, 2\)"),
    ],
)
def test_bad_values_are_named(metric: Metric, values: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(values)


@pytest.mark.parametrize("metric", RELATIVE)
def test_relative_metrics_refuse_negative_values(metric: Metric) -> None:
    with pytest.raises(ValueError, match=r"non-negative values, got -1\.0 at index 1"):
        metric([0.5, -1.0])


def test_the_gap_accepts_negative_values() -> None:
    assert metrics.GAP([-1.0, 2.0]) == 3


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, math.nan])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        metrics.worst_fraction([0.5, 0.6], fraction)


# --- one model on one test set ----------------------------------------------------------


def predictions(seed: int, present: list[int], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of these classes, and probabilities with ties among them."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([present, rng.choice(present, 40)])
    raw = rng.integers(1, 6, (len(labels), classes)).astype(float)
    return labels, raw / raw.sum(axis=1, keepdims=True)


cases = st.tuples(
    st.integers(0, 2**31), st.lists(st.integers(0, 5), min_size=2, max_size=6, unique=True)
)


@given(cases)
def test_balanced_accuracy_matches_scikit_learn(case: tuple[int, list[int]]) -> None:
    labels, p = predictions(*case, classes=6)
    predicted = p.argmax(axis=1)
    with warnings.catch_warnings(action="ignore"):  # predicted classes without a test image
        expected = balanced_accuracy_score(labels, predicted)
    assert metrics.balanced_accuracy(labels, predicted) == close(expected)
    brute = [np.mean(predicted[labels == c] == c) for c in set(labels)]
    assert metrics.balanced_accuracy(labels, predicted) == close(np.mean(brute))


@given(cases)
def test_auc_is_the_probability_of_the_right_order_over_all_pairs(
    case: tuple[int, list[int]],
) -> None:
    labels, p = predictions(*case, classes=6)
    pairs = []
    for a, b in combinations(sorted(set(labels)), 2):
        for c, other in ((a, b), (b, a)):
            high, low = p[labels == c, c], p[labels == other, c]
            ahead = (high[:, None] > low).mean() + (high[:, None] == low).mean() / 2
            pairs.append(ahead)
    assert metrics.auc_ovo(labels, p) == close(np.mean(pairs))


def test_auc_matches_scikit_learn_if_all_classes_are_present() -> None:
    for classes in (3, 7):
        labels, p = predictions(1, list(range(classes)), classes)
        expected = roc_auc_score(labels, p, multi_class="ovo", average="macro")
        assert metrics.auc_ovo(labels, p) == close(expected)
    labels, p = predictions(1, [0, 1], 2)
    assert metrics.auc_ovo(labels, p) == close(roc_auc_score(labels, p[:, 1]))


def test_auc_is_one_half_by_chance_and_1_with_certainty() -> None:
    labels = np.arange(12) % 4
    assert metrics.auc_ovo(labels, np.full((12, 4), 0.25)) == 0.5
    assert metrics.auc_ovo(labels, np.eye(4)[labels]) == 1.0


def test_an_undefined_auc_is_nan() -> None:
    assert math.isnan(metrics.auc_ovo([1, 1, 1], np.full((3, 4), 0.25)))
    assert math.isnan(metrics.auc_ovo([0, 1, 2], np.diag([0.5, np.nan, 0.5])))


def test_balanced_accuracy_needs_labels() -> None:
    with pytest.raises(ValueError, match="at least one label"):
        metrics.balanced_accuracy([], [])


# --- clusters of clients -----------------------------------------------------------------

labels = st.integers(1, 12).flatmap(
    lambda k: st.tuples(*(st.lists(st.integers(0, 3), min_size=k, max_size=k) for _ in range(2)))
)


@given(labels)
def test_clustering_accuracy_matches_brute_force(drawn: tuple[list[int], list[int]]) -> None:
    """The best accuracy over all ways to name each cluster after one type."""
    types, clusters = drawn
    names = [sorted(set(types))] * 4
    best = max(
        sum(named[c] == t for t, c in zip(types, clusters, strict=True))
        for named in product(*names)
    )
    assert metrics.clustering_accuracy(types, clusters) == pytest.approx(best / len(types))


@given(labels)
def test_adjusted_rand_matches_counts_of_pairs(drawn: tuple[list[int], list[int]]) -> None:
    types, clusters = drawn
    pairs = list(combinations(range(len(types)), 2))
    one = [types[i] == types[j] for i, j in pairs]
    other = [clusters[i] == clusters[j] for i, j in pairs]
    both = sum(a and b for a, b in zip(one, other, strict=True))
    chance = sum(one) * sum(other) / len(pairs) if pairs else 0
    most = (sum(one) + sum(other)) / 2
    expected = (both - chance) / (most - chance) if most != chance else 1.0
    assert metrics.adjusted_rand(types, clusters) == pytest.approx(expected)


def test_names_of_types_and_clusters_do_not_matter() -> None:
    types, clusters = ["b", "b", "a", "c"], [7, 7, 3, 3]
    assert metrics.clustering_accuracy(types, clusters) == 0.75
    same = metrics.adjusted_rand([0, 0, 1, 2], ["x", "x", "y", "y"])
    assert metrics.adjusted_rand(types, clusters) == same
    assert metrics.adjusted_rand(types, types) == metrics.clustering_accuracy(types, types) == 1


@pytest.mark.parametrize("metric", [metrics.clustering_accuracy, metrics.adjusted_rand])
def test_types_and_clusters_must_have_the_same_length(metric: Metric) -> None:
    with pytest.raises(ValueError, match="shape"):
        metric([0, 1], [0])
    with pytest.raises(ValueError, match="at least one"):
        metric([], [])
