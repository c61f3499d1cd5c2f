"""Superquantile: the worst-case mixture, by a linear program and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import weights_by
from scipy.optimize import linprog

from fairflower.strategies import Superquantile
from fairflower.testing.rounds import Rounds

EXAMPLES = np.array([100, 300, 400, 200])


def weights(theta: float, losses, examples=EXAMPLES) -> np.ndarray:
    rounds = Rounds(Superquantile(theta=theta), {"x": np.zeros(1)}, range(len(losses)))
    return weights_by("received_loss", rounds, losses, examples)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 9), min_size=4, max_size=4), st.floats(0.01, 1))
def test_weights_solve_the_worst_case_linear_program(losses, theta):
    bounds = [(0, a) for a in EXAMPLES / 1000 / theta]
    best = linprog(-np.array(losses), A_eq=np.ones((1, 4)), b_eq=[1], bounds=bounds)
    actual = weights(theta, losses)
    assert actual @ losses == pytest.approx(-best.fun, abs=1e-7)
    assert (actual <= EXAMPLES / 1000 / theta + 1e-9).all()


def test_the_client_at_the_quantile_counts_partially():
    """Half of 1000 examples: 200 of the worst client, 300 of the 400 of the next."""
    np.testing.assert_allclose(weights(0.5, (0.1, 0.2, 0.5, 0.9)), (0, 0, 0.6, 0.4))


def test_equal_losses_share_the_remaining_weight_by_examples():
    np.testing.assert_allclose(weights(0.5, (0.2, 0.2, 0.1, 0.9)), (0.15, 0.45, 0, 0.4))


def test_theta_1_is_fedavg_and_a_small_theta_the_worst_client():
    np.testing.assert_allclose(weights(1, (0.1, 0.2, 0.5, 0.9)), EXAMPLES / 1000)
    np.testing.assert_allclose(weights(0.01, (0.1, 0.2, 0.5, 0.9)), (0, 0, 0, 1))
