"""FairFed: the AAAI 2023 formula, and not the one with the sum left out."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds import Rounds, weights_by

from fairflower.strategies import FairFed

EXAMPLES = {0: 100, 1: 60, 2: 40}
weights = partial(weights_by, "received_accuracy", examples=EXAMPLES)


def start(**arguments) -> Rounds:
    return Rounds(FairFed(min_clients=1, **arguments), {"x": np.zeros(1)}, range(4))


def test_two_rounds_by_hand():
    """Global metrics .5 .8 + .3 .6 + .2 .4 = .66 and .5 .5 + .3 .9 + .2 .6 = .64."""
    rounds = start(beta=0.5)
    first = np.array([0.5, 0.3, 0.2]) - 0.5 * (np.array([0.14, 0.06, 0.26]) - 0.46 / 3)
    np.testing.assert_allclose(weights(rounds, (0.8, 0.6, 0.4)), first)
    np.testing.assert_allclose(rounds.strategy.diagnostics["gap"], (0.14, 0.06, 0.26))
    assert rounds.model["x"][0] == pytest.approx(first @ [1, 2, 3])
    second = first - 0.5 * (np.array([0.14, 0.26, 0.04]) - 0.44 / 3)
    np.testing.assert_allclose(weights(rounds, (0.5, 0.9, 0.6)), second)


def test_the_gap_is_to_the_mean_over_clients_and_has_no_sign():
    """With the sum left out the gap is m_k (1 - n_k / n): the best client loses most."""
    rounds = start(beta=0.1)
    found = weights(rounds, (0.9, 0.5, 0.1), examples=dict.fromkeys(range(3), 1))
    np.testing.assert_allclose(found[0], found[2])
    assert found[1] > found[0]
    assert weights(start(beta=0.1), (0.9, 0.8, 0.8))[0] > 0.49


@given(st.integers(0, 10_000))
def test_beta_0_is_fedavg_whoever_takes_part(seed):
    random = np.random.default_rng(seed)
    rounds = start(beta=0)
    for _ in range(4):
        present = sorted(random.choice(4, random.integers(1, 5), replace=False).tolist())
        n = {k: int(random.integers(1, 500)) for k in present}
        found = weights(rounds, {k: float(random.random()) for k in present}, examples=n)
        expected = np.array(list(n.values())) / sum(n.values())
        np.testing.assert_allclose(found, expected)


def test_equal_metrics_leave_fedavg():
    rounds = start(beta=1.0)
    for _ in range(3):
        np.testing.assert_allclose(weights(rounds, (0.7, 0.7, 0.7)), (0.5, 0.3, 0.2))


@given(st.integers(0, 10_000), st.floats(0, 100))
def test_weights_stay_on_the_simplex_whatever_the_step(seed, beta):
    random = np.random.default_rng(seed)
    rounds = start(beta=beta)
    for _ in range(5):
        present = sorted(random.choice(4, random.integers(1, 5), replace=False).tolist())
        n = {k: int(random.integers(1, 500)) for k in present}
        found = weights(rounds, {k: float(random.random()) for k in present}, examples=n)
        assert found.min() >= 0
        assert found.sum() == pytest.approx(1)


def test_a_client_cut_to_nothing_comes_back_at_once():
    """Weights are carried on as they were used, so nothing piles up below 0."""
    rounds = start(beta=1.0)
    for _ in range(20):
        found = weights(rounds, (0.9, 0.85, 0.2))
    assert found[2] == 0
    assert weights(rounds, (0.9, 0.1, 0.7))[2] > 0


def test_any_metric_that_the_clients_report_will_do():
    strategy = FairFed(metric="equal_opportunity_difference", min_clients=1)
    assert strategy.needs == ("equal_opportunity_difference",)
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(3))
    found = weights_by("equal_opportunity_difference", rounds, (0.0, 0.0, 0.3), EXAMPLES)
    assert found[2] < 0.2
