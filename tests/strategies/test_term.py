"""TERM: the gradient of its objective, its limits, and a full step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replies import weights_by

from fairflower.strategies import TERM
from fairflower.testing.rounds import Rounds

EXAMPLES = np.array([10, 500, 90])


def weights(t: float, losses, examples=EXAMPLES) -> np.ndarray:
    rounds = Rounds(TERM(t=t), {"x": np.zeros(1)}, range(len(losses)))
    return weights_by("received_loss", rounds, losses, examples)


@given(
    st.lists(st.floats(0, 5), min_size=3, max_size=3).map(np.array),
    st.floats(0.05, 5) | st.floats(-5, -0.05),
)
def test_weights_are_the_gradient_of_the_tilted_objective(losses, t):
    def objective(F):
        return np.log((EXAMPLES * np.exp(t * F)).sum() / EXAMPLES.sum()) / t

    step = 1e-5
    slope = [
        (objective(losses + step * unit) - objective(losses - step * unit)) / (2 * step)
        for unit in np.eye(3)
    ]
    np.testing.assert_allclose(weights(t, losses), slope, atol=1e-7)


@pytest.mark.parametrize("t", [0.0, 1e-12, -1e-12])
def test_t_near_0_equals_fedavg(t):
    np.testing.assert_allclose(weights(t, (3.0, 0.1, 40.0)), EXAMPLES / 600, atol=1e-9)


@pytest.mark.parametrize("t", [1e3, 1e300, 1.7e308])
def test_a_large_t_selects_the_largest_loss_and_a_negative_t_the_smallest(t):
    np.testing.assert_allclose(weights(t, (3.0, 0.1, 40.0)), (0, 0, 1))
    np.testing.assert_allclose(weights(-t, (3.0, 0.1, 40.0)), (0, 1, 0))
    np.testing.assert_allclose(weights(t, (7.0, 7.0, 1.0)), (1 / 51, 50 / 51, 0))


def test_huge_losses_do_not_overflow():
    np.testing.assert_allclose(
        weights(1.0, (1e9, 1e9 + 1, 0.0), (1, 1, 1)), (1 / (1 + np.e), np.e / (1 + np.e), 0)
    )


def test_the_step_is_not_divided_by_the_number_of_clients():
    """The authors' code averages again after weighting, which divides the step by K."""
    rounds = Rounds(TERM(t=2.0), {"x": np.zeros(1)}, range(4))
    for t in range(1, 4):
        after = rounds.step(
            {k: {"x": np.ones(1)} for k in range(4)},
            metrics={k: {"received_loss": 1.0 + k} for k in range(4)},
        )
        assert after["x"][0] == pytest.approx(t)
