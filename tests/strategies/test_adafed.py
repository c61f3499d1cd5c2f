"""AdaFed: its direction against plain Gram-Schmidt, and its descent properties."""

from __future__ import annotations

import numpy as np
import pytest

from fairflower.strategies import AdaFed
from fairflower.testing.rounds import Rounds


def step(moves: np.ndarray, losses, **arguments) -> np.ndarray:
    """The model's step for updates (K, n)."""
    rounds = Rounds(AdaFed(**arguments), {"x": np.zeros(moves.shape[1])}, range(len(moves)))
    after = rounds.step(
        {k: {"x": move} for k, move in enumerate(moves)},
        metrics={k: {"received_loss": loss} for k, loss in enumerate(losses)},
    )
    return after["x"]


def by_gram_schmidt(moves: np.ndarray, power: np.ndarray) -> np.ndarray:
    """Eq. 5-6 and 11-14 of the paper."""
    directions: list[np.ndarray] = []
    for g, f in zip(moves, power, strict=True):
        c = [g @ other / (other @ other) for other in directions]
        rest = g - sum(
            (a * other for a, other in zip(c, directions, strict=True)), np.zeros(len(g))
        )
        directions.append(rest / (f - sum(c)))
    lambdas = np.array([1 / (g @ g) for g in directions])
    return lambdas / lambdas.sum() @ np.array(directions)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_direction_matches_gram_schmidt_in_any_client_order(gamma, seed):
    random = np.random.default_rng(seed)
    moves, losses = random.normal(size=(5, 9)) + 0.3, random.uniform(0.1, 3, 5)
    power = losses**gamma / (losses**gamma).mean()
    actual = step(moves, losses, gamma=gamma)
    np.testing.assert_allclose(actual, by_gram_schmidt(moves, power), rtol=1e-6)
    order = random.permutation(5)
    np.testing.assert_allclose(actual, by_gram_schmidt(moves[order], power[order]), rtol=1e-6)


def test_losses_fall_in_proportion_to_loss_to_the_power_gamma():
    random = np.random.default_rng(7)
    moves, losses = random.normal(size=(4, 30)), np.array([0.5, 1.0, 2.0, 4.0])
    falls = moves @ step(moves, losses, gamma=2)
    np.testing.assert_allclose(falls / falls[0], (losses / 0.5) ** 2, rtol=1e-6)


def test_equal_losses_and_orthogonal_updates_give_the_uniform_step():
    np.testing.assert_allclose(step(np.eye(3), (2.0, 2.0, 2.0)), 1 / 3)
    np.testing.assert_allclose(step(np.eye(3), (2.0, 2.0, 2.0), eta=0.5), 1 / 6)


def test_orthogonal_updates_match_a_hand_computation():
    """Orthogonal: d = sum_k f_k g_k / sum_k f_k^2, f = (1/2, 3/2)."""
    np.testing.assert_allclose(step(np.eye(2), (1.0, 3.0)), (0.2, 0.6))


def test_a_client_with_loss_0_gets_no_descent():
    random = np.random.default_rng(1)
    moves = random.normal(size=(3, 8))
    d = step(moves, (0.0, 1.0, 2.0))
    assert moves[0] @ d == pytest.approx(0, abs=1e-9)
    assert moves[1] @ d > 0
    assert np.isfinite(step(moves, (0.0, 0.0, 0.0))).all()


def test_a_zero_update_does_not_affect_other_clients():
    moves = np.array([[1.0, 0, 0], [0, 0, 0], [0, 1.0, 0]])
    np.testing.assert_allclose(step(moves, (1.0, 9.0, 3.0)), (0.2, 0.6, 0))


def test_no_step_is_taken_without_a_proportional_descent_direction():
    same = np.array([[1.0, 2.0], [1.0, 2.0]])
    np.testing.assert_allclose(step(same, (1.0, 3.0)), 0, atol=1e-6)
    np.testing.assert_allclose(step(np.array([[1.0, 0], [-1.0, 0]]), (1.0, 1.0)), 0, atol=1e-6)
    np.testing.assert_allclose(step(same, (2.0, 2.0)), (1, 2), rtol=1e-6)
