"""FedEBA+: the weights of the largest entropy, and the common step, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from rounds import Rounds
from scipy.optimize import minimize

from fairflower.strategies import TERM, FedEBAPlus

MOVES = np.array([1.0, 2.0, 4.0])
GRADIENTS = np.array([-1.0, 3.0, 1.0])


def step(losses, strategy=None, moves=MOVES, **arguments) -> tuple[float, np.ndarray]:
    strategy = strategy or FedEBAPlus(**arguments)
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(3))
    after = rounds.step(
        {k: {"x": np.array([move])} for k, move in enumerate(moves)},
        metrics={k: {"received_loss": loss} for k, loss in enumerate(losses)},
        measured={k: {"gradient": {"x": np.array([g])}} for k, g in enumerate(GRADIENTS)},
    )
    return float(after["x"][0]), np.asarray(strategy.diagnostics["weights"])


LOSSES = np.array([0.9, 1.0, 1.3])


def test_no_weights_of_that_mean_loss_have_a_larger_entropy():
    _, weights = step(LOSSES, tau=0.3)
    best = minimize(
        lambda w: (w * np.log(w)).sum(),
        np.full(3, 1 / 3),
        bounds=[(1e-9, 1)] * 3,
        constraints=[
            {"type": "eq", "fun": lambda w: w.sum() - 1},
            {"type": "eq", "fun": lambda w: (w - weights) @ LOSSES},
        ],
        options={"ftol": 1e-14},
    ).x
    np.testing.assert_allclose(weights, best, atol=1e-5)


def test_weights_are_terms_where_clients_have_as_many_examples():
    np.testing.assert_allclose(step(LOSSES, tau=0.5)[1], step(LOSSES, TERM(t=2.0))[1])


def test_the_model_is_aligned_with_one_step_of_all():
    """lr .05, mean gradient 1: the common step is -.05."""
    after, weights = step(LOSSES, alpha=0.25)
    assert after == pytest.approx(0.75 * weights @ MOVES - 0.25 * 0.05, rel=1e-6)


def test_not_where_losses_are_too_unequal():
    after, weights = step(LOSSES, theta=1.0)
    assert after == pytest.approx(weights @ MOVES)


def test_no_clients_step_is_longer_than_its_update():
    """Steps of .05, -.15 and -.05, of which the first two are cut to what the clients moved."""
    moves = np.array([0.0, 0.12, 4.0])  # the cuts do not cancel
    after, weights = step(LOSSES, moves=moves, alpha=0.5)
    assert after == pytest.approx(0.5 * weights @ moves - 0.5 * (0.12 + 0.05) / 3, rel=1e-5)


def test_alpha_0_is_the_weights_alone_and_asks_for_no_gradient():
    assert FedEBAPlus(alpha=0).needs == ("received_loss",)
    after, weights = step(LOSSES, alpha=0)
    assert after == pytest.approx(weights @ MOVES)


def test_losses_far_too_large_for_exp_are_no_trouble():
    _, weights = step((1e9, 1e9 + 1, 0.0), tau=1.0)
    np.testing.assert_allclose(weights, (1 / (1 + np.e), np.e / (1 + np.e), 0))


def test_a_learning_rate_is_needed_before_a_round():
    with pytest.raises(ValueError, match=r"train\.lr"):
        FedEBAPlus().read_config({})
    FedEBAPlus(alpha=0).read_config({})
    FedEBAPlus(lr=0.1).read_config({})


def test_the_common_step_follows_a_falling_learning_rate():
    rounds = Rounds(FedEBAPlus(alpha=1, theta=90), {"x": np.zeros(1)}, range(2))
    for lr in (0.1, 0.02):
        rounds.config = {"train.lr": lr}
        before = rounds.model["x"]
        after = rounds.step(
            {k: {"x": np.ones(1)} for k in range(2)},
            measured={k: {"gradient": {"x": np.ones(1)}} for k in range(2)},
        )["x"]
        assert after - before == pytest.approx(-lr, rel=1e-6)
