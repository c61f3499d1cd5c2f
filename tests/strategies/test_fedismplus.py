"""FedISM+: known radii and weights, and the radius that is sent to clients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from replies import weights_by

from fairflower.strategies import FedISM, FedISMPlus
from fairflower.testing.rounds import Rounds

weights = partial(weights_by, "sharpness")

#: Of the quadratic losses below, at rho_0, rho_149 and rho_299 of 300 rounds.
SHARPNESS = {
    0: (0.002891, 0.005782, 0.011603),
    149: (0.035980, 0.071961, 0.146679),
    299: (0.051250, 0.102500, 0.210354),
}
WEIGHTS = (
    (0.047375, 0.189499, 0.763127),
    (0.046815, 0.187260, 0.765924),
    (0.046294, 0.185178, 0.768528),
)


def losses(rho: float) -> tuple[np.ndarray, np.ndarray]:
    """F_k = sum_i a_ki (theta_i - c_ki)^2 / 2 at theta = 0, and at distance rho along g."""
    a = np.array([[1, 4], [2, 2], [8, 0.5]])
    c = np.array([[1, 0], [0, 1], [-0.5, 0.5]])
    g = -a * c
    step = rho * g / (np.linalg.norm(g, axis=1, keepdims=True) + 1e-12)
    return (a * c**2).sum(1) / 2, (a * (step - c) ** 2).sum(1) / 2


def start(clients: int = 3, **arguments) -> Rounds:
    return Rounds(FedISMPlus(min_clients=1, **arguments), {"x": np.zeros(1)}, range(clients))


def test_radii_match_known_values():
    strategy = FedISMPlus(rounds=300)
    actual = [strategy.radius(t + 1) for t in (0, 74, 149, 299)]
    np.testing.assert_allclose(actual, (0.00288675, 0.025, 0.03535534, 0.05), rtol=1e-6)
    assert strategy.radius(400) == 0.05  # more rounds than planned


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_weights_of_quadratic_losses_match_known_values(variant):
    rounds = start(rounds=300, variant=variant)
    for (t, expected), w in zip(SHARPNESS.items(), WEIGHTS, strict=True):
        received, perturbed = losses(rounds.strategy.radius(t + 1))
        S = perturbed - received
        np.testing.assert_allclose(S, expected, atol=6e-7)
        np.testing.assert_allclose(weights(rounds, S), w, atol=1e-6)


def test_the_perturbed_loss_can_be_the_state():
    rounds = start(rounds=4, state="perturbed_loss", q=1.0, beta=1.0)
    assert rounds.strategy.measurements == ("perturbed_loss",)
    _, perturbed = losses(rounds.strategy.radius(1))
    actual = weights_by("perturbed_loss", rounds, perturbed)
    np.testing.assert_allclose(actual, perturbed / perturbed.sum())
    np.testing.assert_array_equal(rounds.strategy.diagnostics["perturbed_loss"], perturbed)


def test_p_0_equals_fedism():
    plus, plain = start(p=0), Rounds(FedISM(), {"x": np.zeros(1)}, range(3))
    for S in ((0.02, 0.05, 0.1), (0.1, 0.05, 0.02)):
        np.testing.assert_array_equal(weights(plus, S), weights(plain, S))
        assert plus.strategy.diagnostics["rho"] == 0.05


def test_clients_receive_the_radius_of_the_round_also_after_resuming():
    rounds = start(2)
    rounds.config["num-server-rounds"] = 4
    for t in (1, 2):
        radii = [m.content.config_records["config"]["rho"] for m in rounds.ask()]
        assert radii == [0.05 * (t / 4) ** 0.5] * 2
    resumed = start(2)
    resumed.round, resumed.config = 2, rounds.config
    assert resumed.ask()[0].content.config_records["config"]["rho"] == 0.05 * 0.75**0.5


def test_a_rounds_argument_overrides_the_config_and_no_rounds_give_a_constant_radius():
    explicit, none = start(rounds=100), start()
    explicit.config["num-server-rounds"] = 4
    for rounds, rho in ((explicit, 0.005), (none, 0.05)):
        assert rounds.ask()[0].content.config_records["config"]["rho"] == pytest.approx(rho)
