"""PropFair's weights: the gradient of its objective, bounded near M."""

from __future__ import annotations

import numpy as np
from replies import weights_by

from fairflower.strategies import PropFair
from fairflower.testing.rounds import Rounds

EXAMPLES = np.array([10, 500, 90])


def weights(losses, **arguments) -> np.ndarray:
    rounds = Rounds(PropFair(**arguments), {"x": np.zeros(1)}, range(len(losses)))
    return weights_by("received_loss", rounds, losses, EXAMPLES)


def test_weights_are_the_gradient_of_the_objective():
    losses, M, step = np.array([0.2, 1.0, 2.5]), 3.0, 1e-6

    def objective(F):
        return -EXAMPLES / 600 @ np.log(1 - F / M)

    slope = [(objective(losses + step * e) - objective(losses - step * e)) for e in np.eye(3)]
    np.testing.assert_allclose(weights(losses, M=M), np.array(slope) / sum(slope), atol=1e-7)


def test_weights_match_a_hand_computation():
    """n / (M - F) = 10 / 1, 500 / 2, 90 / 3."""
    np.testing.assert_allclose(weights((3.0, 2.0, 1.0), M=4), np.array([10, 250, 30]) / 290)


def test_losses_above_m_minus_epsilon_count_equally():
    actual = weights((4.9, 50.0, 0.0), M=5, epsilon=0.5)
    np.testing.assert_allclose(actual, np.array([20, 1000, 18]) / 1038)


def test_a_large_m_equals_fedavg():
    np.testing.assert_allclose(weights((3.0, 0.1, 40.0), M=1e9), EXAMPLES / 600, atol=1e-7)
