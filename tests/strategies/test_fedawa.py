"""FedAWA: its logits by torch's Adam and automatic gradients, over rounds with absent clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fairflower.strategies import FedAWA
from fairflower.testing.rounds import Rounds

SIZES = {0: 30, 1: 10, 2: 60}


def learned(theta, moves, logits: list[float], lr: float) -> torch.Tensor:
    T = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    start, updates = torch.tensor(theta), torch.tensor(np.array(moves))
    adam = torch.optim.Adam([T], lr=lr, betas=(0.5, 0.999))
    w = torch.softmax(T, 0)
    apart = (updates - w @ updates).norm(dim=1)
    away = 1 - torch.cosine_similarity(start[None], start + updates, dim=1)
    (w * (apart + away)).sum().backward()
    adam.step()
    return T.detach()


@pytest.mark.parametrize("lr", [0.001, 0.05, 0.3])
def test_weights_and_logits_are_those_of_torch(lr):
    random = np.random.default_rng(0)
    start = random.normal(size=8)
    strategy = FedAWA(lr=lr, min_clients=1)
    rounds = Rounds(strategy, {"x": start}, range(3))
    logits: dict[int, float] = {}
    for present in ([0, 2], [0, 1, 2], [1, 2], [0, 1, 2]):
        theta = rounds.model["x"].copy()
        moves = {k: {"x": random.normal(size=8)} for k in present}
        merged = rounds.step(moves, examples=SIZES)["x"]
        total = sum(SIZES[k] for k in present)
        first = [logits.get(k, SIZES[k] / total) for k in present]
        T = learned(theta, [moves[k]["x"] for k in present], first, lr)
        logits.update(zip(present, T.tolist(), strict=True))
        w = torch.softmax(T, 0).numpy()
        np.testing.assert_allclose(strategy.diagnostics["weights"], w, rtol=1e-6)
        np.testing.assert_allclose(
            merged, theta + sum(w[i] * moves[k]["x"] for i, k in enumerate(present))
        )
    assert strategy.logits == pytest.approx(logits, rel=1e-6)


def test_a_client_against_the_others_loses_weight():
    strategy = FedAWA(lr=0.1)
    rounds = Rounds(strategy, {"x": np.ones(2)}, range(3))
    shares = []
    for _ in range(5):
        rounds.step(
            {
                0: {"x": np.array([1.0, 0])},
                1: {"x": np.array([1, 0.1])},
                2: {"x": np.array([-1.0, 0])},
            }
        )
        shares.append(strategy.diagnostics["weights"][2])
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.3
