"""Helpers of direction-based strategies: inequality of losses, memory, and layers of a model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.directions import (
    inequality_angle,
    inequality_gradient,
    rescale_to_norm,
    store_updates,
    with_absent_clients,
)


def cohort(server_round: int, clients: tuple[int, ...], size: int = 2) -> Cohort:
    received = {"w": np.full(size, 10.0 * server_round), "bn.running_mean": np.ones(1)}
    returned = tuple(
        {"w": received["w"] + client + server_round / 10, "bn.running_mean": np.zeros(1)}
        for client in clients
    )
    n = np.ones(len(clients))
    buffers = frozenset({"bn.running_mean"})
    return Cohort(server_round, clients, n, received, returned, buffers=buffers)


@given(st.lists(st.floats(0.01, 9), min_size=2, max_size=6).map(np.array))
def test_the_inequality_gradient_is_that_of_the_negative_cosine_with_ones(F):
    def minus_cosine(v):
        return -v.sum() / np.sqrt(len(v) * (v @ v))

    slope = np.array(
        [(minus_cosine(F + 1e-6 * e) - minus_cosine(F - 1e-6 * e)) / 2e-6 for e in np.eye(len(F))]
    )
    np.testing.assert_allclose(inequality_gradient(F), slope, rtol=1e-3, atol=1e-3)
    assert inequality_gradient(F) @ F == pytest.approx(0, abs=1e-9)


def test_inequality_angles_match_a_hand_computation():
    assert inequality_angle(np.array([1.0, 0.0])) == pytest.approx(45)
    assert inequality_angle(np.full(7, 3.0)) == pytest.approx(0, abs=1e-5)
    assert inequality_angle(np.array([0.0, 0.0, 1e300])) == pytest.approx(54.7356, abs=1e-4)


def test_absent_clients_are_added_with_their_last_update_up_to_an_age():
    last, memory = {}, {}
    for now, clients in ((1, (5, 7)), (2, (3,))):
        store_updates(cohort(now, clients), memory)
        last |= dict.fromkeys(clients, now)
    everyone, ages = with_absent_clients(cohort(3, (3, 4)), memory, last, oldest=2)
    assert ages.tolist() == [0, 0, 2, 2]
    moved = [arrays["w"][0] - 30 for arrays in everyone.returned]
    assert moved == pytest.approx([3.3, 4.3, 5.1, 7.1])
    assert everyone.returned[2]["bn.running_mean"] == 1  # statistics stay as received
    everyone, ages = with_absent_clients(cohort(3, (3, 4)), memory, last, oldest=1)
    assert ages.tolist() == [0, 0]


def test_a_direction_is_rescaled_to_the_length_of_another():
    gram, like = np.diag([1.0, 4.0]), np.array([0.5, 0.5])
    c = rescale_to_norm(np.array([3.0, 0.0]), gram, like)
    np.testing.assert_allclose(c, (np.sqrt(1.25), 0))
    np.testing.assert_array_equal(rescale_to_norm(np.zeros(2), gram, like), 0)


def test_gram_and_move_accept_single_layers():
    received = {"a": np.zeros(2), "b": np.zeros(1)}
    returned = ({"a": np.array([1.0, 2]), "b": np.ones(1)}, {"a": np.ones(2), "b": np.zeros(1)})
    both = Cohort(1, (0, 1), np.ones(2), received, returned)
    np.testing.assert_allclose(both.gram(names=["a"]), [[5, 3], [3, 2]])
    np.testing.assert_allclose(both.gram(names=["a"]) + both.gram(names=["b"]), both.gram())
    coefficients = {"a": np.array([2.0, -1.0]), "b": np.array([0.5, 0.0])}
    model = both.move(coefficients, np.array([0.5, 0.5]))
    np.testing.assert_allclose(model["a"], (1, 3))
    np.testing.assert_allclose(model["b"], 0.5)
    with pytest.raises(ValueError, match="require weights for the buffers"):
        both.move(coefficients)
