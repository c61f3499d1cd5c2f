"""FedFV against the authors' function and a plain vector implementation."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.strategies import FedFV
from fairflower.testing.rounds import Rounds

GRADIENTS = np.array([(1, 0, 0.5), (-0.6, 1, 0.2), (0.2, -1, 0.4), (0.3, 0.3, -1)])
LOSSES = (0.3, 1.2, 0.7, 2.0)
# Results of the authors' functions in the first round: the code released with the paper
# (easyFL, May 2021), and the current code (FLGo), which uses this round's gradients twice.
GOLDEN = {
    ("paper", 0.0): (0.175572, 0.159986, -0.021302),
    ("paper", 0.1): (0.169026, 0.151874, -0.072384),
    ("paper", 0.5): (0.064255, 0.220864, -0.062973),
    ("released", 0.0): (0.230054, 0.056786, 0.026938),
    ("released", 0.1): (0.234124, 0.035513, -0.028280),
    ("released", 0.5): (0.228777, 0.058854, 0.032747),
}

# Six rounds with two or three of five clients: their gradients and losses.
HISTORY = [
    {0: ((-0.8, -1.3, -0.2), 1.0), 1: ((0.4, 1.1, 0.1), 1.0), 2: ((-0.6, -0.8, 0.7), 0.5)},
    {2: ((1.6, 0.3, -1.2), 0.0), 3: ((-1.0, 1.6, 0.2), 1.9)},
    {0: ((-1.7, -0.1, -1.2), 0.2), 3: ((-0.6, -0.5, -0.7), 1.7), 4: ((0.6, -0.1, -0.6), 0.7)},
    {1: ((0.4, 0.8, -1.6), 1.9), 4: ((-0.3, -1.0, -0.2), 0.8)},
    {1: ((-1.3, 0.0, 0.0), 1.9), 2: ((-0.3, -1.0, -0.4), 1.1), 3: ((-1.1, -1.4, 0.2), 0.5)},
    {0: ((-1.1, 1.2, 0.7), 1.5), 4: ((-2.0, 0.3, -1.1), 1.3)},
]
# Steps of both authors' functions in these rounds with alpha = 0.1: without Alg. 3, and
# with Alg. 3 for each (variant, tau, round) in which it changes the step.
WITHOUT = [
    (-0.062515, 0.427187, 0.275364),
    (0.092467, 1.042105, -0.384664),
    (-0.491682, -0.232978, -0.879756),
    (0.074263, -0.024754, -0.903533),
    (-0.9, -0.8, -0.066667),
    (-1.55, 0.75, -0.2),
]
CHANGED = {
    ("paper", 1, 2): (-0.590625, 0.488020, -0.809629),
    ("paper", 1, 6): (-1.608222, 0.589306, -0.267098),
    ("paper", 2, 3): (-0.373990, 0.221332, -0.938692),
    ("paper", 2, 6): (-1.608222, 0.589306, -0.267098),
    ("released", 1, 1): (-0.237859, 0.248837, 0.379111),
    ("released", 2, 2): (-0.590625, 0.488020, -0.809629),
    ("released", 2, 6): (-1.608222, 0.589306, -0.267098),
}


def step(rounds: Rounds, gradients, losses) -> np.ndarray:
    """Run one round; return the model's step against the gradients."""
    before = rounds.model["x"].astype(float)
    after = rounds.step(
        {k: {"x": -np.asarray(g)} for k, g in gradients.items()},
        metrics={k: {"received_loss": loss} for k, loss in losses.items()},
    )["x"]
    return before - after


@pytest.mark.parametrize(("variant", "alpha"), GOLDEN)
def test_the_first_step_matches_the_authors_code(variant, alpha):
    strategy = FedFV(alpha=alpha, tau=1, variant=variant)
    rounds = Rounds(strategy, {"x": np.zeros(3, np.float32)}, range(4))
    moved = step(rounds, dict(enumerate(GRADIENTS)), dict(enumerate(LOSSES)))
    np.testing.assert_allclose(moved, GOLDEN[variant, alpha], atol=2e-6)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("tau", [0, 1, 2])
def test_steps_match_the_authors_code_under_partial_participation(variant, tau):
    rounds = Rounds(FedFV(tau=tau, variant=variant, min_clients=1), {"x": np.zeros(3)}, range(5))
    for number, (present, plain) in enumerate(zip(HISTORY, WITHOUT, strict=True), 1):
        gradients = {k: g for k, (g, _) in present.items()}
        moved = step(rounds, gradients, {k: loss for k, (_, loss) in present.items()})
        expected = CHANGED.get((variant, tau, number), plain)
        np.testing.assert_allclose(moved, expected, atol=2e-6, err_msg=f"round {number}")


def by_vectors(rounds, alpha, tau, variant="paper"):
    """Return the last round's step by Algorithms 1-3 on the vectors themselves.

    rounds: for every round so far {client: (gradient, loss)}.
    """
    t = len(rounds) - 1  # Alg. 1 counts rounds from 0
    g = [np.asarray(gradient, float) for gradient, _ in rounds[-1].values()]
    order = np.argsort([loss for _, loss in rounds[-1].values()], kind="stable")
    kept = set(order[ceil((len(g) - 1) * (1 - alpha)) :]) if alpha else set()
    hats = []
    for i in range(len(g)):
        hat = g[i].copy()
        for j in order:
            if i not in kept and j != i and hat @ g[j] < 0:
                hat -= g[j] * (hat @ g[j]) / (g[j] @ g[j])
        hats.append(hat)
    out = np.mean(hats, axis=0)
    latest = {
        k: (s, gradient) for s, seen in enumerate(rounds) for k, (gradient, _) in seen.items()
    }
    later = variant == "released"
    if t + later >= tau:
        for age in [i - later for i in range(1, tau + 1)][::-1]:
            conflicting = [v for s, v in latest.values() if s == t - age and out @ v < 0]
            if conflicting and out @ sum(conflicting) < 0:
                total = sum(conflicting)
                out = out - total * (out @ total) / (total @ total)
    norm = np.linalg.norm(out)
    return out * np.linalg.norm(np.mean(g, axis=0)) / norm if norm else out


@given(
    seed=st.integers(0, 9999),
    alpha=st.sampled_from([0.0, 0.1, 0.5]),
    tau=st.integers(0, 3),
    variant=st.sampled_from(["paper", "released"]),
)
def test_steps_match_a_plain_vector_implementation(seed, alpha, tau, variant):
    random = np.random.default_rng(seed)
    strategy = FedFV(alpha=alpha, tau=tau, variant=variant, min_clients=1)
    rounds = Rounds(strategy, {"x": np.zeros(8)}, range(5))
    history: list[dict[int, tuple[np.ndarray, float]]] = []
    for _ in range(6):
        present = sorted(random.choice(5, random.integers(1, 6), replace=False).tolist())
        history.append({k: (random.normal(size=8), float(random.random())) for k in present})
        moved = step(
            rounds,
            {k: g for k, (g, _) in history[-1].items()},
            {k: loss for k, (_, loss) in history[-1].items()},
        )
        np.testing.assert_allclose(moved, by_vectors(history, alpha, tau, variant), atol=1e-9)
        recent = {k for present in history[-(tau + 1) :] for k in present}
        assert strategy.memory.keys() <= recent, "memory keeps the updates of recent clients only"


def test_tau_has_no_effect_under_full_participation():
    random = np.random.default_rng(0)
    ways = [Rounds(FedFV(tau=tau), {"x": np.zeros(8)}, range(4)) for tau in (0, 1, 3)]
    for _ in range(5):
        g = dict(enumerate(random.normal(size=(4, 8))))
        losses = dict(enumerate(random.random(4).tolist()))
        one, *others = [step(rounds, g, losses) for rounds in ways]
        assert all(np.array_equal(one, other) for other in others)


def test_batchnorm_counters_do_not_hide_conflicts():
    """In the released code, products include BatchNorm's counter, so nothing ever conflicts."""
    model = {"w": np.zeros(2), "bn.num_batches_tracked": np.array(0, np.int64)}
    moves, losses = [np.array([1.0, 0.2]), np.array([-0.5, 0.4])], [1.0, 2.0]
    after = Rounds(FedFV(alpha=0.0), model, range(2)).step(
        {k: {"w": move, "bn.num_batches_tracked": 300} for k, move in enumerate(moves)},
        metrics={k: {"received_loss": loss} for k, loss in enumerate(losses)},
    )
    present = {k: (-moves[k], losses[k]) for k in range(2)}
    expected = -by_vectors([present], 0.0, 1)
    np.testing.assert_allclose(after["w"], expected, atol=1e-9)
    assert np.abs(expected - np.mean(moves, axis=0)).max() > 0.1
    assert after["bn.num_batches_tracked"] == 300


@pytest.mark.parametrize("seed", range(4))
def test_updates_that_cancel_give_no_step(seed: int) -> None:
    v = np.random.default_rng(seed).normal(size=1000).astype(np.float32)
    rounds = Rounds(FedFV(alpha=0.0), {"x": np.zeros(1000, np.float32)}, range(2))
    losses = {0: {"received_loss": 1.0}, 1: {"received_loss": 2.0}}
    merged = rounds.step({0: {"x": v}, 1: {"x": np.float32(-0.3) * v}}, metrics=losses)["x"]
    assert not merged.any()


@pytest.mark.parametrize(("K", "alpha", "unchanged"), [(11, 0.7, 8), (21, 0.7, 15), (11, 0.1, 2)])
def test_the_number_of_unchanged_gradients_is_exact(K: int, alpha: float, unchanged: int) -> None:
    """K - ceil((K - 1)(1 - alpha)); in floating point 10 (1 - 0.7) is above 3."""
    gram = np.where(np.eye(K, dtype=bool), 1.0, -1.0 / K)
    strategy = FedFV(alpha=alpha)
    order = np.arange(K, dtype=float)  # client K - 1 has the largest loss
    alone = [strategy._mitigate(gram, order)]
    kept = K - ceil((K - 1) * (1 - Fraction(str(alpha))))
    assert kept == unchanged
    # Expected: the mean of all gradients, of which the last ``unchanged`` are not projected.
    changed = []
    for i in range(K):
        g = np.zeros(K)
        g[i] = 1
        for j in range(K) if i < K - unchanged else ():
            inner = gram[j] @ g
            if j != i and inner < 0:
                g[j] -= inner / gram[j, j]
        changed.append(g)
    np.testing.assert_allclose(alone[0], np.mean(changed, axis=0))
