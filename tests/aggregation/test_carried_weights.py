"""Weights that clients keep between rounds, also over rounds in which they are absent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.numerics.simplex import current_weights, store_weights


@given(st.integers(0, 10_000))
def test_absent_clients_keep_their_weights_and_present_clients_their_sum(seed):
    random = np.random.default_rng(seed)
    fair = random.integers(1, 100, 6).astype(float)
    held: dict[int, float] = {}
    store_weights(held, range(6), fair, random.dirichlet(np.ones(6)))
    before = np.array([held[k] for k in range(6)]) * fair
    present = np.flatnonzero(random.random(6) < 0.5)
    if present.size:
        weights = random.dirichlet(np.ones(len(present)))
        store_weights(held, present.tolist(), fair[present], weights)
        after = np.array([held[k] for k in range(6)]) * fair
        absent = np.setdiff1d(np.arange(6), present)
        np.testing.assert_array_equal(after[absent], before[absent])
        assert after.sum() == pytest.approx(before.sum())
        np.testing.assert_allclose(current_weights(held, present.tolist(), fair[present]), weights)


def test_under_full_participation_weights_are_those_of_the_previous_round():
    held: dict[int, float] = {}
    for weights in ([0.5, 0.3, 0.2], [0.1, 0.0, 0.9], [0.0, 0.0, 1.0]):
        store_weights(held, (4, 5, 9), np.array([1.0, 7.0, 2.0]), np.array(weights))
        np.testing.assert_allclose(
            current_weights(held, (4, 5, 9), np.array([1.0, 7.0, 2.0])), weights
        )


def test_clients_with_total_weight_0_restart_from_their_fair_weights():
    held = {0: 0.0, 1: 0.0, 2: 3.0}
    np.testing.assert_allclose(current_weights(held, (0, 1), np.array([1.0, 3.0])), [0.25, 0.75])
    store_weights(held, (0, 1), np.array([1.0, 3.0]), np.array([0.5, 0.5]))
    np.testing.assert_allclose(current_weights(held, (0, 1), np.array([1.0, 3.0])), [0.5, 0.5])
