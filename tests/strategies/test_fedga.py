"""FedGA: the official sign, the losses that form the gap, and the decaying step."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from fairflower.arrays import record_of
from fairflower.strategies import FedGA
from fairflower.testing.rounds import Rounds


def weights(rounds: Rounds, received, trained) -> np.ndarray:
    if not isinstance(received, dict):
        received, trained = dict(enumerate(received)), dict(enumerate(trained))
    rounds.step(
        {k: {"x": np.array([1.0 + k])} for k in received},
        {k: 10 ** (k % 4) for k in received},
        metrics={k: {"received_loss": received[k], "trained_loss": trained[k]} for k in received},
    )
    return rounds.strategy.diagnostics["weights"]


def start(clients: int = 3, **arguments) -> Rounds:
    return Rounds(FedGA(min_clients=1, **arguments), {"x": np.zeros(1)}, range(clients))


@pytest.mark.parametrize("common", [0.0, 0.7])
def test_weights_match_known_values(common):
    """Gaps are .3, -.1, -.2 plus a common offset; the client with the largest gap gains weight."""
    rounds = start()
    np.testing.assert_allclose(weights(rounds, (9.0, 9.0, 9.0), (0.2, 0.4, 0.6)), 1 / 3)
    gaps = np.array([0.3, -0.1, -0.2]) + common
    actual = weights(rounds, np.array([0.2, 0.4, 0.6]) + gaps, (0.1, 0.1, 0.1))
    np.testing.assert_allclose(actual, (0.35, 0.327778, 0.322222), atol=1e-6)
    np.testing.assert_allclose(rounds.strategy.diagnostics["gap"], (0.3, -0.1, -0.2))


def test_the_gap_is_the_received_loss_minus_the_last_trained_loss():
    """This round's trained loss and the first round's received loss have no effect."""
    one, other = start(), start()
    weights(one, (5.0, 1.0, 2.0), (0.2, 0.4, 0.6))
    weights(other, (0.0, 8.0, 9.0), (0.2, 0.4, 0.6))
    a, b = weights(one, (0.5, 0.3, 0.4), (1, 2, 3)), weights(other, (0.5, 0.3, 0.4), (3, 2, 1))
    np.testing.assert_array_equal(a, b)
    assert a.argmax() == 0


def test_the_step_decays_to_0_over_the_rounds():
    rounds = start(2, step=0.4, rounds=4)
    gained = []
    previous = weights(rounds, (1.0, 1.0), (0.0, 0.0))
    for _ in range(5):
        w = weights(rounds, (1.0, 0.0), (0.0, 0.0))
        gained.append(w[0] - previous[0])
        previous = w
    np.testing.assert_allclose(gained, [0.15, 0.1, 0.05, 0, 0], atol=1e-12)


def test_the_number_of_rounds_comes_from_the_train_config_unless_given():
    strategy = FedGA()
    model = record_of({"x": np.zeros(1)})
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(1))
    weights(rounds, (1.0,), (1.0,))
    assert strategy.rounds is None
    list(strategy.configure_train(1, model, ConfigRecord({"num-server-rounds": 12}), None))
    assert strategy.rounds == 12
    explicit = FedGA(rounds=3)
    explicit.enroll({0: 1}, 0)
    list(explicit.configure_train(1, model, ConfigRecord({"num-server-rounds": 12}), None))
    assert explicit.rounds == 3


def test_step_0_and_equal_gaps_give_uniform_weights():
    for rounds, received in ((start(step=0), (5.0, 1.0, 0.0)), (start(), (1.0, 1.0, 1.0))):
        for _ in range(3):
            np.testing.assert_allclose(weights(rounds, received, (0.5, 0.5, 0.5)), 1 / 3)


def test_a_new_client_has_the_mean_gap():
    rounds = start(4)
    weights(rounds, {0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.5})
    actual = weights(rounds, {0: 0.9, 1: 0.5, 2: 7.0}, {0: 0.5, 1: 0.5, 2: 0.5})
    np.testing.assert_allclose(rounds.strategy.diagnostics["gap"], (0.2, -0.2, 0))
    np.testing.assert_allclose(actual, np.array([1, 1, 1]) / 3 + 0.05 / 3 * np.array([1, -1, 0]))


@given(st.integers(0, 10_000), st.floats(0, 50))
def test_weights_stay_on_the_simplex_under_partial_participation(seed, step):
    random = np.random.default_rng(seed)
    rounds = start(5, step=step)
    for _ in range(5):
        present = sorted(random.choice(5, random.integers(1, 6), replace=False).tolist())
        losses = [{k: float(random.exponential()) for k in present} for _ in range(2)]
        actual = weights(rounds, *losses)
        assert actual.min() >= 0
        assert actual.sum() == pytest.approx(1)
