"""FedISM: the released code's numbers, limits of q and beta, and partial participation."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replies import weights_by

from fairflower.strategies import FedISM
from fairflower.testing.rounds import Rounds

weights = partial(weights_by, "sharpness")

#: Output of the released function for S = (.02, .05, .1).
GOLDEN = {
    0.5: (0.20758918, 0.32822731, 0.46418351),
    1: (0.11764706, 0.29411765, 0.58823529),
    2: (0.03100775, 0.19379845, 0.77519380),
    10: (1e-7, 9.7561e-4, 0.99902429),
}


def start(clients: int = 3, **arguments) -> Rounds:
    return Rounds(FedISM(min_clients=1, **arguments), {"x": np.zeros(1)}, range(clients))


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("q", GOLDEN)
def test_weights_match_the_released_code(q, variant):
    actual = weights(start(q=q, variant=variant), (0.02, 0.05, 0.1))
    np.testing.assert_allclose(actual, GOLDEN[q], rtol=1e-6, atol=3e-9)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_the_moving_average_matches_the_released_code(variant):
    rounds = start(q=2, beta=0.5, variant=variant)
    weights(rounds, (0.02, 0.05, 0.1))
    actual = weights(rounds, (0.1, 0.05, 0.02))
    np.testing.assert_allclose(actual, (0.40310078, 0.19379845, 0.40310078), atol=1e-8)


def test_the_variants_differ_at_sharpness_0():
    flat = (0.0, 0.1)
    assert weights(start(q=1), flat)[0] == pytest.approx(1e-9, rel=1e-6)
    assert weights(start(q=1, variant="released"), flat)[0] == pytest.approx(1.1e-9, rel=1e-6)


def test_the_model_is_the_weighted_mean():
    rounds = start(q=1)
    w = weights(rounds, (0.02, 0.05, 0.1))
    assert rounds.model["x"][0] == pytest.approx(w @ [1, 2, 3])


@given(st.lists(st.floats(-1e-3, 1e6), min_size=1, max_size=6), st.floats(0, 1))
def test_q_0_gives_uniform_weights(sharpness, beta):
    rounds = start(len(sharpness), q=0, beta=beta)
    for _ in range(2):
        np.testing.assert_allclose(weights(rounds, sharpness), 1 / len(sharpness))


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_a_large_q_gives_all_weight_to_the_sharpest_client(variant):
    rounds = start(q=1e4, variant=variant)
    for _ in range(2):
        np.testing.assert_allclose(weights(rounds, (0.02, 0.1, 0.05)), (0, 1, 0), atol=1e-12)


def test_a_weight_that_underflows_to_0_recovers():
    rounds = start(2, q=150)
    weights(rounds, (1.0, 0.001))  # 0.001^150 is 0
    np.testing.assert_array_equal(weights(rounds, (0.001, 1.0)), (0.5, 0.5))
    rounds = start(2, q=150)
    weights(rounds, (1.0, 0.001))
    assert weights(rounds, {1: 1.0}) == [1.0]  # a client with weight 0, alone


def test_beta_1_uses_only_the_last_round_and_beta_0_only_the_first():
    for beta, expected in ((1, (0.1, 0.05, 0.02)), (0, (0.02, 0.05, 0.1))):
        rounds = start(q=1, beta=beta)
        weights(rounds, (0.02, 0.05, 0.1))
        weights(rounds, (1.0, 2.0, 3.0))
        actual = weights(rounds, (0.1, 0.05, 0.02))
        if beta == 1:
            np.testing.assert_allclose(actual, np.array(expected) / sum(expected))
        else:
            np.testing.assert_allclose(actual, GOLDEN[1], atol=1e-8)


def test_negative_and_zero_sharpness_are_raised_to_the_floor():
    assert weights(start(), (-0.5, 0.0)) == pytest.approx([0.5, 0.5])
    rounds = start()
    weights(rounds, (-1.0, 0.1))
    np.testing.assert_array_equal(rounds.strategy.diagnostics["sharpness"], (1e-10, 0.1))


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 5))
def test_constant_sharpness_gives_normalized_powers_of_the_present_clients(seed, beta, q):
    random = np.random.default_rng(seed)
    S = random.uniform(0.01, 1, 6)
    rounds = start(6, q=q, beta=beta)
    for _ in range(6):
        present = sorted({0, *random.choice(6, random.integers(0, 7), replace=False).tolist()})
        actual = weights(rounds, {k: S[k] for k in present})
        np.testing.assert_allclose(actual, S[present] ** q / (S[present] ** q).sum(), rtol=1e-9)


def test_a_cohort_of_new_clients_gets_a_share_proportional_to_its_size():
    rounds = start(5, q=2, beta=0)
    weights(rounds, {0: 0.1, 1: 0.3})
    weights(rounds, {2: 0.1, 3: 0.1, 4: 0.3})
    actual = weights(rounds, dict.fromkeys(range(5), 1.0))
    np.testing.assert_allclose(actual[:2], np.array([1, 9]) / 10 * 2 / 5)
    np.testing.assert_allclose(actual[2:], np.array([1, 1, 9]) / 11 * 3 / 5)


def test_an_absent_client_keeps_its_weight():
    rounds = start(q=1, beta=0.5)
    weights(rounds, (0.2, 0.2, 0.6))
    weights(rounds, {0: 0.1, 1: 0.3})  # .4 of the weights, shared out as (.5 + .25)/2, ...
    held = np.array([0.4 * 0.375, 0.4 * 0.625, 0.6])
    actual = weights(rounds, (1.0, 1.0, 1.0))
    np.testing.assert_allclose(actual, 0.5 / 3 + 0.5 * held)


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_weights_stay_on_the_simplex_for_extreme_sharpness(seed):
    random = np.random.default_rng(seed)
    rounds = start(8, q=40)
    for _ in range(8):
        present = sorted(random.choice(8, random.integers(1, 9), replace=False).tolist())
        actual = weights(rounds, {k: 10.0 ** random.integers(-12, 12) for k in present})
        assert actual.min() >= 0
        assert actual.sum() == pytest.approx(1)
