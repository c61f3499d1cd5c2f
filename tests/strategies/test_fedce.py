"""FedCE against a computation on the vectors, and the coefficients sent to clients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.strategies import FedCE
from fairflower.testing.rounds import Rounds


def start(clients: int = 3, size: int = 5, **arguments) -> Rounds:
    return Rounds(FedCE(min_clients=1, **arguments), {"x": np.zeros(size)}, range(clients))


def weights(rounds: Rounds, updates, accuracies) -> np.ndarray:
    rounds.step(
        {k: {"x": update} for k, update in updates.items()},
        {k: 10 ** (k % 4) for k in updates},
        metrics={k: {"minus_score": accuracies[k]} for k in updates},
    )
    return rounds.strategy.diagnostics["weights"]


def normalized(scores) -> np.ndarray:
    return np.maximum(scores, 1e-6) / np.maximum(scores, 1e-6).sum()


def by_vectors(history, mode) -> np.ndarray:
    """Return the coefficients after rounds of (updates [K, n], accuracies [K]) of all clients."""
    c = np.full(len(history[0][0]), 1 / len(history[0][0]))
    cosines, minus, coefficients = [], [], []
    for updates, accuracies in history:
        consensus = c @ updates
        rest = [consensus - c[k] * updates[k] for k in range(len(c))]
        cosines.append(
            [
                u @ r / np.linalg.norm(u) / np.linalg.norm(r)
                for u, r in zip(updates, rest, strict=True)
            ]
        )
        minus.append(accuracies)
        A = normalized(1 - np.mean(cosines, axis=0))
        B = normalized(1 - np.mean(minus, axis=0))
        coefficients.append(normalized(A * B if mode == "times" else A + B))
        c = np.mean(coefficients, axis=0)
    return c


@given(seed=st.integers(0, 10_000), mode=st.sampled_from(["times", "plus"]))
def test_weights_from_the_gram_matrix_match_those_from_vectors(seed, mode):
    random = np.random.default_rng(seed)
    history = [(random.normal(size=(4, 5)), random.random(4)) for _ in range(3)]
    rounds = start(4, mode=mode)
    for t, (updates, accuracies) in enumerate(history, start=1):
        before = rounds.model["x"]
        actual = weights(rounds, dict(enumerate(updates)), accuracies)
        expected = by_vectors(history[:t], mode)
        np.testing.assert_allclose(actual, expected, atol=1e-9)
        np.testing.assert_allclose(rounds.model["x"] - before, expected @ updates, atol=1e-9)


def test_a_distinct_direction_and_a_low_minus_score_raise_the_weight():
    same, other = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    actual = weights(start(size=2), {0: same, 1: same, 2: other}, (0.5, 0.5, 0.5))
    assert actual[2] > actual[0] == pytest.approx(actual[1])
    actual = weights(start(size=2), {0: same, 1: same, 2: same}, (0.9, 0.9, 0.1))
    np.testing.assert_allclose(actual, np.array([0.1, 0.1, 0.9]) / 1.1)


def test_equal_clients_get_equal_weights_despite_rounding():
    update = np.random.default_rng(0).normal(size=50)
    rounds = start(7, 50)
    for _ in range(3):
        np.testing.assert_allclose(
            weights(rounds, dict.fromkeys(range(7), update), [1.0] * 7), 1 / 7
        )


def test_the_accuracies_of_round_1_enter_the_mean():
    """A known implementation enters 0 for round 1, which would halve the mean after round 2."""
    update = np.eye(2)
    rounds = start(2, 2)
    for _ in range(2):
        actual = weights(rounds, dict(enumerate(update)), (0.8, 0.6))
    np.testing.assert_allclose(actual, [1 / 3, 2 / 3])


def test_a_new_client_starts_with_the_mean_coefficient():
    random = np.random.default_rng(6)
    rounds, updates = start(), random.normal(size=(3, 5))
    c = np.append(2 * weights(rounds, {0: updates[0], 1: updates[1]}, (0.2, 0.9)), 1)
    weights(rounds, dict(enumerate(updates)), random.random(3))
    rest = [c @ updates - c[k] * updates[k] for k in range(3)]
    norms = np.linalg.norm(updates, axis=1) * np.linalg.norm(rest, axis=1)
    cosines = (updates * rest).sum(1) / norms
    np.testing.assert_allclose(rounds.strategy.diagnostics["cosine"], cosines)


def test_zero_updates_give_equal_weights_and_a_single_client_weight_1():
    rounds = start(2)
    np.testing.assert_allclose(weights(rounds, dict.fromkeys(range(2), np.zeros(5)), (0, 0)), 0.5)
    np.testing.assert_allclose(weights(start(1), {0: np.ones(5)}, (0.5,)), 1)


def sent_coefficients(rounds: Rounds) -> dict[int, object]:
    return {
        m.metadata.dst_node_id - 1000: m.content.config_records["config"].get("coefficient")
        for m in rounds.ask()
    }


def test_each_client_receives_its_coefficient_in_the_global_model():
    random = np.random.default_rng(3)
    rounds = start(3)
    assert sent_coefficients(rounds) == dict.fromkeys(range(3))
    locals_ = {k: random.normal(size=5) for k in range(3)}
    base = rounds.model["x"]
    c = weights(rounds, {k: local - base for k, local in locals_.items()}, random.random(3))
    assert sent_coefficients(rounds) == dict(enumerate(c))
    for k, local in locals_.items():
        without = (rounds.model["x"] - c[k] * local) / (1 - c[k])
        others = [j for j in locals_ if j != k]
        mean = sum(c[j] * locals_[j] for j in others) / sum(c[j] for j in others)
        np.testing.assert_allclose(without, mean)


def test_an_absent_client_receives_no_coefficient():
    random = np.random.default_rng(4)
    rounds = start(3)
    for present in ([0, 1, 2], [0, 2]):
        weights(rounds, {k: random.normal(size=5) for k in present}, random.random(3))
    coefficients = sent_coefficients(rounds)
    assert coefficients[1] is None
    assert coefficients[0] + coefficients[2] == pytest.approx(1)


def test_coefficients_survive_a_checkpoint():
    random = np.random.default_rng(5)
    rounds = start(3)
    weights(rounds, {k: random.normal(size=5) for k in range(3)}, random.random(3))
    resumed = start(3)
    resumed.strategy.load_state_dict(rounds.strategy.state_dict())
    assert sent_coefficients(resumed) == sent_coefficients(rounds)


@pytest.mark.parametrize("value", [1.5, -0.1])
def test_a_reply_with_a_metric_outside_0_to_1_is_dropped(value: float) -> None:
    rounds = start(metric="received_loss")
    updates = {k: {"x": np.eye(3, 5)[k]} for k in range(3)}
    metrics = {k: {"received_loss": value if k == 1 else 0.5} for k in range(3)}
    rounds.step(updates, metrics=metrics)
    assert list(rounds.strategy.dropped) == [1]
    assert f"received_loss = {value}: expected" in rounds.strategy.dropped[1]
    assert rounds.strategy.client_ids == (0, 2)
