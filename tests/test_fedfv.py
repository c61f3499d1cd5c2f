"""FedFV against the authors' function and a plain vector implementation."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from conftest import Rounds
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflower.strategies import FedFV

GRADIENTS = np.array([(1, 0, 0.5), (-0.6, 1, 0.2), (0.2, -1, 0.4), (0.3, 0.3, -1)])
LOSSES = (0.3, 1.2, 0.7, 2.0)
GOLDEN = {
    0.0: (0.230054, 0.056786, 0.026938),
    0.1: (0.234124, 0.035513, -0.028280),
    0.5: (0.228777, 0.058854, 0.032747),
}


def step(rounds: Rounds, gradients, losses) -> np.ndarray:
    """One round; how far the model moved against the gradients."""
    before = rounds.model["x"].astype(float)
    after = rounds.step(
        {k: {"x": -g} for k, g in gradients.items()},
        metrics={k: {"received_loss": loss} for k, loss in losses.items()},
    )["x"]
    return before - after


@pytest.mark.parametrize("alpha", GOLDEN)
def test_the_authors_numbers(alpha):
    rounds = Rounds(FedFV(alpha=alpha, tau=1), {"x": np.zeros(3, np.float32)}, range(4))
    moved = step(rounds, dict(enumerate(GRADIENTS)), dict(enumerate(LOSSES)))
    np.testing.assert_allclose(moved, GOLDEN[alpha], atol=2e-6)


def by_vectors(g, losses, alpha, tau, server_round, memory):
    """Algorithms 1-3 on the vectors themselves; memory: list of (age, gradient)."""
    order = np.argsort(losses, kind="stable")
    kept = set(order[ceil((len(g) - 1) * (1 - alpha)) :]) if alpha else set()
    hats = []
    for i in range(len(g)):
        hat = g[i].copy()
        for j in order:
            if i not in kept and j != i and hat @ g[j] < 0:
                hat -= g[j] * (hat @ g[j]) / (g[j] @ g[j])
        hats.append(hat)
    out = np.mean(hats, axis=0)
    if server_round >= tau:
        for age in range(tau - 1, -1, -1):
            aged = list(g) if age == 0 else [v for a, v in memory if a == age]
            conflicting = [v for v in aged if out @ v < 0]
            if conflicting and out @ sum(conflicting) < 0:
                total = sum(conflicting)
                out = out - total * (out @ total) / (total @ total)
    norm = np.linalg.norm(out)
    return out * np.linalg.norm(np.mean(g, axis=0)) / norm if norm else out


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 9999), alpha=st.sampled_from([0.0, 0.1, 0.5]), tau=st.integers(0, 3))
def test_the_span_gives_what_the_vectors_give(seed, alpha, tau):
    random = np.random.default_rng(seed)
    rounds = Rounds(FedFV(alpha=alpha, tau=tau, min_clients=1), {"x": np.zeros(8)}, range(5))
    seen: dict[int, tuple[int, np.ndarray]] = {}
    for server_round in range(1, 6):
        present = sorted(random.choice(5, random.integers(1, 6), replace=False).tolist())
        g = {k: random.normal(size=8) for k in present}
        losses = {k: float(random.random()) for k in present}
        memory = [(server_round - r, v) for k, (r, v) in seen.items() if k not in present]
        expected = by_vectors(
            list(g.values()), list(losses.values()), alpha, tau, server_round, memory
        )
        np.testing.assert_allclose(step(rounds, g, losses), expected, atol=1e-9)
        seen |= {k: (server_round, v) for k, v in g.items()}


def test_step_counters_do_not_hide_conflicts():
    """With BatchNorm's counter in the products, as released, nothing ever conflicts."""
    model = {"w": np.zeros(2), "bn.num_batches_tracked": np.array(0, np.int64)}
    moves, losses = [np.array([1.0, 0.2]), np.array([-0.5, 0.4])], [1.0, 2.0]
    after = Rounds(FedFV(alpha=0.0), model, range(2)).step(
        {k: {"w": move, "bn.num_batches_tracked": 300} for k, move in enumerate(moves)},
        metrics={k: {"received_loss": loss} for k, loss in enumerate(losses)},
    )
    expected = -by_vectors([-move for move in moves], losses, 0.0, 1, 1, [])
    np.testing.assert_allclose(after["w"], expected, atol=1e-9)
    assert np.abs(expected - np.mean(moves, axis=0)).max() > 0.1
    assert after["bn.num_batches_tracked"] == 300


@pytest.mark.parametrize("bad", [{"alpha": 2.0}, {"tau": -1}, {"tau": 1.5}])
def test_arguments_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        FedFV(**bad)
