"""Reconstructed EAGLE: its weights are the gradient of the published objective."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.strategies import EAGLE
from fairflower.testing.rounds import Rounds

MODEL = {"w": np.zeros(2, np.float32)}


def weights(strategy: EAGLE, received: list[float], local: list[float]) -> np.ndarray:
    clients = range(len(received))
    rounds = Rounds(strategy, MODEL, clients)
    rounds.step(
        {k: {"w": np.ones(2)} for k in clients},
        {k: 10 * (k + 1) for k in clients},  # without effect
        metrics={k: {"received_loss": received[k], "local_loss": local[k]} for k in clients},
    )
    return np.asarray(strategy.diagnostics["weights"])


def test_weights_of_two_clients_match_a_hand_computation() -> None:
    # Gaps 1.0 and 0.6: 0.2 from their mean; (1 + 0.4 lambda) / 2.
    assert weights(EAGLE(), [1.5, 1.0], [0.5, 0.4]) == pytest.approx([0.7, 0.3])
    assert weights(EAGLE(lambda_=0.5), [1.5, 1.0], [0.5, 0.4]) == pytest.approx([0.6, 0.4])
    assert weights(EAGLE(lambda_=0), [1.5, 1.0], [0.5, 0.4]) == pytest.approx([0.5, 0.5])


def test_weights_follow_the_gap_to_the_local_loss_and_not_the_loss() -> None:
    assert weights(EAGLE(), [2.3, 0.5], [2.1, 0.1]) == pytest.approx([0.4, 0.6])


def test_negative_weights_are_set_to_0() -> None:
    # Gaps 3, 0 and 0: 1 + 4, 1 - 2 and 1 - 2.
    assert weights(EAGLE(), [3, 1, 2], [0, 1, 2]) == pytest.approx([1, 0, 0])
    # Gaps 1.2, 0.6 and 0: 2.2, 1 and -0.2.
    assert weights(EAGLE(), [1.2, 0.6, 0], [0, 0, 0]) == pytest.approx([2.2 / 3.2, 1 / 3.2, 0])


@given(
    st.lists(st.tuples(st.floats(0.5, 3), st.floats(0, 2)), min_size=2, max_size=5),
    st.floats(0, 0.1),  # small enough for weights above 0
)
def test_weights_are_the_gradient_of_the_objective(
    losses: list[tuple[float, float]], lambda_: float
) -> None:
    """By central differences of ``mean F + lambda Var(F - F*)`` in each F_k."""
    received, local = (np.array(values) for values in zip(*losses, strict=True))

    def objective(F: np.ndarray) -> float:
        return float(F.mean() + lambda_ * np.var(F - local))

    h = 1e-5
    slope = [
        (objective(received + h * e) - objective(received - h * e)) / (2 * h)
        for e in np.eye(len(losses))
    ]
    actual = weights(EAGLE(lambda_=lambda_), received.tolist(), local.tolist())
    assert actual == pytest.approx(slope, abs=1e-6)


def test_a_negative_lambda_is_refused() -> None:
    with pytest.raises(ValueError, match="lambda"):
        EAGLE(lambda_=-0.1)
