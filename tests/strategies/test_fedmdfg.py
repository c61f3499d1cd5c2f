"""FedMDFG: the step against a general solver, and its descent properties."""

from __future__ import annotations

import numpy as np
import pytest
from reference_solvers import min_norm_point

from fairflower.strategies import FedMDFG
from fairflower.testing.rounds import Rounds


def play(rounds: Rounds, moves: dict[int, np.ndarray], losses: dict[int, float]) -> np.ndarray:
    before = rounds.model["x"]
    after = rounds.step(
        {k: {"x": move} for k, move in moves.items()},
        metrics={k: {"received_loss": loss} for k, loss in losses.items()},
    )["x"]
    return np.asarray(after - before)


def step(moves: np.ndarray, losses, **arguments) -> np.ndarray:
    rounds = Rounds(FedMDFG(**arguments), {"x": np.zeros(moves.shape[1])}, range(len(moves)))
    return play(rounds, dict(enumerate(moves)), dict(enumerate(losses)))


def expected(moves: np.ndarray, losses, fairly: bool, absent=(), before=1.0) -> np.ndarray:
    """Return the documented step from the updates; ``before`` is their earlier mean norm."""
    F = np.array(losses)
    hull = [v / np.linalg.norm(v) for v in moves]
    now = np.linalg.norm(moves, axis=1).mean()
    hull += [v / np.linalg.norm(v) * before / now for v in absent]
    if fairly:
        h = F.sum() / (F @ F) * F - 1
        hull.insert(0, h / np.linalg.norm(h) @ np.array(hull[: len(moves)]))
    d = min_norm_point(np.array(hull))
    return np.asarray(d * np.linalg.norm(moves.mean(axis=0)) / np.linalg.norm(d))


RANDOM = np.random.default_rng(3)
MOVES = RANDOM.normal(size=(4, 12)) * np.array([[1], [5], [0.2], [2]])


@pytest.mark.parametrize(
    ("losses", "fairly"), [((1.0, 1.1, 0.9, 1.0), False), ((0.2, 1.0, 3.0, 0.5), True)]
)
def test_the_step_is_the_shortest_vector_of_the_hull(losses, fairly):
    actual = step(MOVES, losses)
    np.testing.assert_allclose(actual, expected(MOVES, losses, fairly), rtol=1e-3, atol=1e-4)
    assert (MOVES @ actual > 0).all()


def test_theta_90_is_plain_multi_gradient_descent():
    losses = (0.2, 1.0, 3.0, 0.5)
    plain = expected(MOVES, losses, fairly=False)
    np.testing.assert_allclose(step(MOVES, losses, theta=90), plain, rtol=1e-3, atol=1e-4)


def test_unequal_losses_become_more_equal():
    """For gradients of equal norm. To first order, each loss falls by <g_k, d>."""
    F, moves = np.array([0.2, 1.0, 3.0, 0.5]), MOVES / np.linalg.norm(MOVES, axis=1)[:, None]
    later = F - 1e-3 * moves @ step(moves, F)

    def cosine(v):
        return v.sum() / np.linalg.norm(v)

    assert cosine(later) > cosine(F)


def test_a_huge_loss_gives_a_finite_step():
    assert np.isfinite(step(MOVES, (1.0, 1e200, 1.0, 1.0))).all()


def test_absent_clients_of_the_previous_round_count_and_older_ones_do_not():
    rounds = Rounds(FedMDFG(min_clients=1), {"x": np.zeros(12)}, range(4))
    equal = dict.fromkeys(range(4), 1.0)
    play(rounds, dict(enumerate(MOVES)), equal)
    present = {k: MOVES[k] for k in (0, 1)}
    actual = play(rounds, present, dict.fromkeys(present, 1.0))
    two = MOVES[:2]
    before = np.linalg.norm(MOVES, axis=1).mean()
    remembered = expected(two, (1.0, 1.0), False, MOVES[2:], before)
    np.testing.assert_allclose(actual, remembered, rtol=1e-3, atol=1e-4)
    actual = play(rounds, present, dict.fromkeys(present, 1.0))
    np.testing.assert_allclose(actual, expected(two, (1.0, 1.0), False), rtol=1e-3, atol=1e-4)


def test_equal_updates_with_unequal_losses_give_no_step():
    same = np.tile(MOVES[0], (3, 1))
    np.testing.assert_array_equal(step(same, (0.2, 1.0, 3.0)), 0)
    np.testing.assert_allclose(step(same, (1.0, 1.0, 1.0)), MOVES[0], rtol=1e-4)


def test_opposite_updates_cancel():
    np.testing.assert_array_equal(step(np.array([[1.0, 0], [-3.0, 0]]), (1.0, 1.0)), 0)


def test_a_zero_update_does_not_affect_other_clients():
    moves = np.array([[1.0, 0, 0], [0, 0, 0], [0, 1.0, 0]])
    actual = step(moves, (1.0, 0.0, 1.0))
    np.testing.assert_allclose(actual / actual[0], (1, 1, 0), rtol=1e-4)
    np.testing.assert_array_equal(step(np.zeros((3, 3)), (1.0, 0.0, 2.0)), 0)
