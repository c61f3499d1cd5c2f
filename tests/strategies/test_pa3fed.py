"""Reconstructed PA3Fed: weights follow the relative change of each client's loss."""

from __future__ import annotations

import numpy as np
import pytest

from fairflower.strategies import PA3Fed
from fairflower.testing.rounds import Rounds

MODEL = {"w": np.zeros(2, np.float32)}
EXAMPLES = {0: 10, 1: 30, 2: 60}


def weights(strategy: PA3Fed, *losses: dict[int, float]) -> np.ndarray:
    """Return the weights after rounds in which the clients with a loss participate."""
    rounds = Rounds(strategy, MODEL, range(3))
    for by_client in losses:
        rounds.step(
            {k: {"w": np.ones(2)} for k in by_client},
            {k: EXAMPLES[k] for k in by_client},
            metrics={k: {"received_loss": loss} for k, loss in by_client.items()},
        )
    return np.asarray(strategy.diagnostics["weights"])


def test_the_first_round_is_fedavg():
    assert weights(PA3Fed(), {0: 1.0, 1: 2.0, 2: 3.0}) == pytest.approx([0.1, 0.3, 0.6])


def test_weights_follow_the_relative_change_of_the_loss():
    actual = weights(PA3Fed(beta=0.3), {0: 2.0, 1: 2.0, 2: 4.0}, {0: 1.0, 1: 2.2, 2: 3.2})
    d = np.array([0.5, 0.1, 0.2])
    expected = 0.7 * np.array([0.1, 0.3, 0.6]) + 0.3 * d / d.sum()
    assert actual == pytest.approx(expected)


def test_fedavg_is_used_outside_critical_periods():
    losses = {0: 2.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 2.002, 2: 4.0}  # overall change 0.3 * 0.001
    assert weights(PA3Fed(delta=0.001), *losses) == pytest.approx([0.1, 0.3, 0.6])
    assert weights(PA3Fed(delta=0.0001), *losses) == pytest.approx([0.07, 0.51, 0.42])


def test_beta_0_equals_fedavg():
    losses = {0: 2.0, 1: 2.0, 2: 4.0}, {0: 1.0, 1: 2.2, 2: 3.2}
    assert weights(PA3Fed(beta=0), *losses) == pytest.approx([0.1, 0.3, 0.6])


def test_losses_are_compared_with_the_clients_last_participation():
    strategy = PA3Fed(beta=1, min_clients=1)
    actual = weights(strategy, {0: 2.0, 1: 2.0}, {1: 1.0}, {0: 1.0, 1: 0.75})
    assert actual == pytest.approx(
        [2 / 3, 1 / 3]
    )  # changes: 1/2 since round 1 and 1/4 since round 2


def test_a_new_client_gets_the_mean_change_of_the_others():
    strategy = PA3Fed(beta=1, min_clients=1)
    actual = weights(strategy, {0: 2.0, 1: 2.0}, {0: 1.0, 1: 1.6, 2: 9.0})
    assert actual == pytest.approx(np.array([0.5, 0.2, 0.35]) / 1.05)


def test_losses_of_0_give_valid_weights():
    actual = weights(PA3Fed(delta=0), {0: 0.0, 1: 0.0, 2: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert actual == pytest.approx([0.1, 0.3, 0.6])
    actual = weights(PA3Fed(), {0: 0.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert actual.sum() == pytest.approx(1)
