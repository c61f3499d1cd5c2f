"""AFL: lambda stays on the simplex, persists between rounds and weighs the model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_solvers import minimize_on_simplex
from replies import weights_by

from fairflower.strategies import AFL
from fairflower.testing.rounds import Rounds

weights = partial(weights_by, "received_loss")


def nearest(point: np.ndarray) -> np.ndarray:
    """Return the projection onto the simplex, by a general solver."""
    return minimize_on_simplex(lambda w: ((w - point) ** 2).sum(), len(point))


def start(clients: int = 3, **arguments) -> Rounds:
    return Rounds(AFL(min_clients=1, **arguments), {"x": np.zeros(1)}, range(clients))


def test_weights_are_uniform_in_round_1_and_one_step_away_in_round_2():
    """An implementation that restarts every round prints these weights in all later rounds."""
    rounds = start()
    np.testing.assert_allclose(weights(rounds, (2.3, 0.5, 0.1)), 1 / 3)
    np.testing.assert_allclose(
        weights(rounds, (2.3, 0.5, 0.1)), (0.346667, 0.328667, 0.324667), atol=1e-6
    )


def test_lambda_persists_between_rounds():
    rounds = start()
    losses, expected = np.array([2.3, 0.5, 0.1]), np.full(3, 1 / 3)
    for _ in range(10):
        np.testing.assert_allclose(weights(rounds, losses), expected, atol=1e-6)
        expected = nearest(expected + 0.01 * losses)
    assert weights(rounds, losses)[0] > 0.46  # always .3467 if restarted every round


def test_lambda_and_not_example_counts_weigh_the_model():
    rounds = start(lr=0.5)
    weights(rounds, (2.0, 0.5, 0.1))
    before = rounds.model["x"][0]
    w = weights(rounds, (2.0, 0.5, 0.1))
    np.testing.assert_allclose(w, nearest(np.array([1, 0.25, 0.05]) + 1 / 3), atol=1e-6)
    assert rounds.model["x"][0] - before == pytest.approx(w @ [1, 2, 3])


@pytest.mark.slow
def test_training_converges_to_the_minimax_equilibrium():
    """theta in R with losses (theta - 1)^2 and (theta + 1)^2 + .5: both losses end up equal."""
    rounds = Rounds(AFL(lr=0.02), {"x": np.zeros(1)}, range(2))
    path = []
    for _ in range(600):
        x = rounds.model["x"][0]
        path.append(x)
        rounds.step(
            {0: {"x": -0.1 * np.array([2 * (x - 1)])}, 1: {"x": -0.1 * np.array([2 * (x + 1)])}},
            metrics={0: {"received_loss": (x - 1) ** 2}, 1: {"received_loss": (x + 1) ** 2 + 0.5}},
        )
    assert np.mean(path[-200:]) == pytest.approx(-0.125, abs=0.01)
    assert rounds.strategy.diagnostics["weights"][1] == pytest.approx(0.5625, abs=0.02)


def test_lr_0_gives_uniform_weights():
    rounds = start(lr=0)
    for _ in range(3):
        np.testing.assert_allclose(weights(rounds, (5.0, 0.1, 1.0)), 1 / 3)


@given(st.integers(0, 10_000), st.floats(0, 1e3))
def test_lambda_stays_on_the_simplex_under_partial_participation(seed, lr):
    random = np.random.default_rng(seed)
    rounds = start(6, lr=lr)
    for _ in range(6):
        present = sorted(random.choice(6, random.integers(1, 7), replace=False).tolist())
        w = weights(rounds, {k: float(random.exponential(3)) for k in present})
        assert w.shape == (len(present),)
        assert w.min() >= 0
        assert w.sum() == pytest.approx(1)


def test_an_absent_client_keeps_its_lambda():
    rounds = start(lr=0.1)
    weights(rounds, (1.0, 0.0, 0.0))
    held = nearest(np.full(3, 1 / 3) + 0.1 * np.array([1, 0, 0]))
    weights(rounds, {1: 1.0, 2: 0.0})
    actual = weights(rounds, (0.0, 0.0, 0.0))
    assert actual[0] == pytest.approx(held[0], abs=1e-6)
    pair = nearest(held[1:] / held[1:].sum() + 0.1 * np.array([1, 0]))
    np.testing.assert_allclose(actual[1:], pair * held[1:].sum(), atol=1e-6)
