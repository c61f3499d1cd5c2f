"""AAggFF: both forms against a general solver of the objective that they minimize."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from reference_solvers import minimize_on_simplex
from replies import weights_by

from fairflower.strategies import AAggFF
from fairflower.strategies.aaggff import CDFS
from fairflower.testing.rounds import Rounds

weights = partial(weights_by, "received_loss")


def start(clients: int = 3, **arguments) -> Rounds:
    return Rounds(AAggFF(min_clients=1, **arguments), {"x": np.zeros(1)}, range(clients))


def play(responses, released: bool = False) -> list[np.ndarray]:
    """Return follow-the-regularized-leader decisions after each response (silo form)."""
    K = len(responses[0])
    alpha, beta, past, decisions = 4, K / 4, [], []
    p = np.ones(K) if released else np.full(K, 1 / K)
    for r in responses:
        past.append((-r / (1 + p @ r), p))

        def cost(w, past=tuple(past)):
            total = alpha / 2 * w @ w * (1 + beta if released else 1)
            for g, at in past:
                total += g @ w + beta / 2 * (g @ (w if released else w - at)) ** 2
            return total

        p = minimize_on_simplex(cost, K)
        decisions.append(p)
    return decisions


def weibull(losses) -> np.ndarray:
    x = np.array(losses) / np.mean(losses)
    return 1 - np.exp(-(x**2))


LOSSES = [(2.3, 0.5, 0.1), (1.5, 0.7, 0.1), (0.2, 1.9, 0.4), (1.0, 1.0, 0.2)]


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_silo_follows_the_regularized_leader(variant):
    rounds = start(variant=variant)
    expected = play([weibull(losses) / 3 for losses in LOSSES], variant == "released")
    for losses, p in zip(LOSSES, expected, strict=True):
        np.testing.assert_allclose(weights(rounds, losses), p, atol=2e-5)
    assert abs(expected[-1] - 1 / 3).max() > 0.01


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_silo_treats_late_clients_like_absent_ones(variant) -> None:
    """Two of ten clients train three rounds before the others enroll, or while they are absent."""
    late, known = start(2, variant=variant), start(10, variant=variant)
    for losses in [(3.0, 1.0)] * 3:
        for rounds in (late, known):
            weights(rounds, dict(enumerate(losses)))
    late.strategy.enroll({k: 1000 + k for k in range(10)}, seed=0)
    both = [weights(rounds, [2.0] * 10) for rounds in (late, known)]
    np.testing.assert_allclose(*both, atol=1e-3)
    assert both[0][0] > 0.105


def test_silo_uses_the_mean_response_for_absent_clients():
    rounds = start()
    weights(rounds, LOSSES[0])
    actual = weights(rounds, {0: 1.0, 2: 3.0})
    pair = weibull((1.0, 3.0)) / 3
    p = play([weibull(LOSSES[0]) / 3, np.array([pair[0], pair.mean(), pair[1]])])[-1]
    np.testing.assert_allclose(actual, p[[0, 2]] / p[[0, 2]].sum(), atol=2e-5)


def test_silo_treats_a_new_client_as_absent_in_earlier_rounds():
    rounds = start()
    weights(rounds, {0: 1.0, 2: 3.0})
    pair = weibull((1.0, 3.0)) / 3
    first = np.array([pair[0], pair.mean(), pair[1]])
    p = play([first, weibull(LOSSES[0]) / 3])[-1]
    np.testing.assert_allclose(weights(rounds, LOSSES[0]), p, atol=2e-5)


@pytest.mark.parametrize(("variant", "masses"), [("paper", (1, 1)), ("released", (4, 1))])
def test_device_form_matches_a_hand_computation(variant, masses):
    """Two rounds of all four clients: C = 1, and r in [0, 1].

    In the released code initial weights are C for each client, and the mean of participating
    clients is omitted.
    """
    rounds, losses = start(4, form="device", variant=variant), np.array([4.0, 2.0, 1.0, 1.0])
    r, sums = weibull(losses), 0
    for t, mass in zip((1, 2), masses, strict=True):
        sums = sums - (r - r.mean()) / (1 + mass * r.mean())
        p = np.exp(-np.sqrt(np.log(4)) * sums / (3 * np.sqrt(t + 1)))
        np.testing.assert_allclose(weights(rounds, losses), p / p.sum())


def test_device_form_scales_differences_by_the_inverse_participation_rate():
    """Half of four clients: C = 1/2, r in [0, 1/2], and differences count twice."""
    rounds = start(4, form="device")
    r = weibull((1.0, 3.0)) / 2
    g = -2 * (r - r.mean()) / (1 + r.mean())
    p = np.exp(-np.sqrt(np.log(4)) * g / (2.5 * np.sqrt(2)))
    np.testing.assert_allclose(weights(rounds, {0: 1.0, 1: 3.0}), p / p.sum())
    # An absent client gets the mean of the others.
    r = weibull((1.0, 1.0)) / 2
    later = np.exp(-np.sqrt(np.log(4)) * np.array([g[1], 0]) / (2.5 * np.sqrt(3)))
    np.testing.assert_allclose(weights(rounds, {1: 1.0, 2: 1.0}), later / later.sum())


@pytest.mark.parametrize("form", ["silo", "device"])
@pytest.mark.parametrize("losses", [(0.0, 0.0, 0.0), (2.0, 2.0, 2.0)])
def test_equal_losses_give_equal_weights(form, losses):
    rounds = start(form=form)
    for _ in range(3):
        np.testing.assert_allclose(weights(rounds, losses), 1 / 3, atol=1e-6)


@pytest.mark.parametrize("cdf", CDFS)
def test_responses_are_distribution_functions(cdf):
    x = np.array([0, 1e-9, 0.5, 1, 1.5, 3, 1e9])
    values = CDFS[cdf](x)
    assert (np.diff(values) >= 0).all()
    assert values.min() >= 0
    assert values[-1] == pytest.approx(1)
    rounds = start(cdf=cdf)
    assert weights(rounds, (3.0, 2.0, 1.0)).argsort().tolist() == [2, 1, 0]


def test_responses_at_the_mean_match_a_hand_computation():
    at_mean = {name: float(cdf(np.ones(1))[0]) for name, cdf in CDFS.items()}
    e = np.exp(-1)
    expected = {"weibull": 1 - e, "exponential": 1 - e, "frechet": e, "gumbel": e}
    assert at_mean == pytest.approx(expected | {"normal": 0.5, "logistic": 0.5})


@pytest.mark.parametrize("losses", [(0.1, 0.2, 1.2), (1e9, 1.0, 0.0)])
def test_the_worst_clients_weight_rises_every_round(losses):
    for form in ("silo", "device"):
        rounds, worst = start(form=form), int(np.argmax(losses))
        path = [weights(rounds, losses)[worst] for _ in range(5)]
        assert (np.diff(path) > 0).all()
