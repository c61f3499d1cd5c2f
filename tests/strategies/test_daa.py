"""DaA: golden weights, nearly uniform weights on the paper's federations, and class counts."""

from __future__ import annotations

import numpy as np
import pytest
from toy_trainers import SETTINGS, data, tiny_model

from fairflower.clients import SGD
from fairflower.strategies import DaA
from fairflower.testing import make_cohort
from fairflower.training.measurements import train_and_measure


def weights(counts: list[list[float]], domains: int) -> tuple[np.ndarray, np.ndarray]:
    strategy = DaA(domains=domains)
    sizes = [sum(row) for row in counts]
    cohort = make_cohort([[1.0]] * len(counts), sizes, measured={"class_counts": counts})
    found = strategy.weigh(cohort)
    return found, np.asarray(strategy.diagnostics["distance"])


@pytest.mark.parametrize(
    ("counts", "distance", "expected"),
    [
        ([[30, 30], [10, 10], [10, 10]], (0.2, 0.4, 0.4), (0.380748, 0.309626, 0.309626)),
        (
            [[60, 0], [10, 10], [0, 20]],
            (0.360555, 0.400000, 0.412311),
            (0.375288, 0.312733, 0.311979),
        ),
    ],
)
def test_weights_match_golden_values(counts, distance, expected):
    actual, d = weights(counts, 2)
    np.testing.assert_allclose(d, distance, atol=1e-6)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "sizes", "expected"),
    [
        (
            10,
            {600: 3, 72: 6, 732: 6, 100: 5},
            {600: 0.051010, 72: 0.048822, 732: 0.051559, 100: 0.048937},
        ),
        (
            7,
            {449: 2, 552: 3, 631: 2, 1059: 3},
            {449: 0.097944, 552: 0.098789, 631: 0.099438, 1059: 0.102957},
        ),
    ],
    ids=["digits", "pacs"],
)
def test_the_papers_federations_have_nearly_uniform_weights(classes, sizes, expected):
    each = [n for n, count in sizes.items() for _ in range(count)]
    actual, _ = weights([[n / classes] * classes for n in each], 4)
    np.testing.assert_allclose(actual, [expected[n] for n in each], atol=1e-6)
    assert actual.max() / actual.min() < 1.06


def test_clients_send_their_class_counts():
    client = SGD(tiny_model(), data(1), SETTINGS, client_id=1, seed=0)
    _, arrays = train_and_measure(client, {"measure": "class_counts", "server-round": 1})
    y = client.data.train.y
    expected = [(y == c).sum() for c in range(client.data.num_classes)]
    np.testing.assert_array_equal(arrays["class_counts"]["h"], expected)
