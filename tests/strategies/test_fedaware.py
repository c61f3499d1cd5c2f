"""FedAWARE: momenta and the shortest combination by a quadratic program, with absent clients."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest

from fairflower.strategies import FedAWARE
from fairflower.testing.rounds import Rounds


def shortest(units: np.ndarray) -> np.ndarray:
    w = cp.Variable(len(units))
    problem = cp.Problem(cp.Minimize(cp.sum_squares(units.T @ w)), [cp.sum(w) == 1, w >= 0])
    problem.solve(solver="CLARABEL")
    return w.value @ units


@pytest.mark.parametrize(("alpha", "eta"), [(0.5, 1.0), (1.0, 0.3)])
def test_steps_are_those_of_momenta_of_all_clients_seen(alpha, eta):
    random = np.random.default_rng(0)
    strategy = FedAWARE(alpha=alpha, eta=eta, min_clients=1)
    rounds = Rounds(strategy, {"x": random.normal(size=12)}, range(4))
    momenta: dict[int, np.ndarray] = {}
    for present in ([0, 2], [1, 2], [3, 0], [0, 1, 2, 3], [2]):
        theta = rounds.model["x"].copy()
        moves = {k: random.normal(0.2, 1, 12) for k in present}
        for k, move in moves.items():
            momenta[k] = (1 - alpha) * momenta.get(k, np.zeros(12)) + alpha * move
        merged = rounds.step({k: {"x": move} for k, move in moves.items()})["x"]
        units = np.array([momenta[k] / np.linalg.norm(momenta[k]) for k in sorted(momenta)])
        np.testing.assert_allclose(merged - theta, eta * shortest(units), atol=1e-5)
    again = FedAWARE(alpha=alpha, eta=eta, min_clients=1)
    again.load_state_dict(strategy.state_dict())
    np.testing.assert_array_equal(again.momenta[3]["x"], strategy.momenta[3]["x"])
    np.testing.assert_allclose(again.momenta[3]["x"], momenta[3])


def test_opposite_clients_stop_the_model():
    rounds = Rounds(FedAWARE(), {"x": np.zeros(2)}, range(2))
    merged = rounds.step({0: {"x": np.array([5.0, 0])}, 1: {"x": np.array([-0.1, 0])}})
    np.testing.assert_allclose(merged["x"], 0, atol=1e-6)
