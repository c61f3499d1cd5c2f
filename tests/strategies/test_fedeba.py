"""FedEBA+: the maximum-entropy weights, and the common step computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from fairflower.strategies import TERM, FedEBAPlus
from fairflower.testing.rounds import Rounds

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


def test_weights_maximize_entropy_at_their_mean_loss():
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


def test_weights_equal_those_of_term_with_equal_example_counts():
    np.testing.assert_allclose(step(LOSSES, tau=0.5)[1], step(LOSSES, TERM(t=2.0))[1])


def test_the_model_is_mixed_with_the_common_step():
    """lr .05, mean gradient 1: the common step is -.05."""
    after, weights = step(LOSSES, alpha=0.25)
    assert after == pytest.approx(0.75 * weights @ MOVES - 0.25 * 0.05, rel=1e-6)


def test_the_common_step_is_omitted_above_the_angle_theta():
    after, weights = step(LOSSES, theta=1.0)
    assert after == pytest.approx(weights @ MOVES)


def test_common_steps_are_clipped_to_the_client_updates():
    """The steps are .05, -.15 and -.05; the first two are clipped to the norms of the updates."""
    moves = np.array([0.0, 0.12, 4.0])  # the clipped parts do not cancel
    after, weights = step(LOSSES, moves=moves, alpha=0.5)
    assert after == pytest.approx(0.5 * weights @ moves - 0.5 * (0.12 + 0.05) / 3, rel=1e-5)


def test_alpha_0_uses_only_the_weights_and_needs_no_gradient():
    assert FedEBAPlus(alpha=0).measurements == ("received_loss",)
    after, weights = step(LOSSES, alpha=0)
    assert after == pytest.approx(weights @ MOVES)


def test_huge_losses_do_not_overflow():
    _, weights = step((1e9, 1e9 + 1, 0.0), tau=1.0)
    np.testing.assert_allclose(weights, (1 / (1 + np.e), np.e / (1 + np.e), 0))


def test_a_learning_rate_is_required_unless_alpha_is_0():
    with pytest.raises(ValueError, match=r"train\.lr"):
        FedEBAPlus().read_config({})
    FedEBAPlus(alpha=0).read_config({})
    FedEBAPlus(lr=0.1).read_config({})


def test_the_common_step_uses_the_learning_rate_of_the_round():
    rounds = Rounds(FedEBAPlus(alpha=1, theta=90), {"x": np.zeros(1)}, range(2))
    for lr in (0.1, 0.02):
        rounds.config = {"train.lr": lr}
        before = rounds.model["x"]
        after = rounds.step(
            {k: {"x": np.ones(1)} for k in range(2)},
            measured={k: {"gradient": {"x": np.ones(1)}} for k in range(2)},
        )["x"]
        assert after - before == pytest.approx(-lr, rel=1e-6)
