"""FedHEAL against the released code's numbers and the paper's equations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.strategies import Cohort, FedAvg, FedHEAL
from fairflower.testing.rounds import Rounds

MODEL = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}

# Displacements (local - global) of three clients over five rounds, and what the
# released functions compute from them (beta .4, tau .3).
MOVES = [
    [(0.1, -0.2, 0.3, 0.4, 0), (0.2, 0.2, -0.1, -0.3, 0.1), (-0.4, 0.1, 0.2, 0.2, -0.2)],
    [(0.1, 0.2, 0.3, -0.4, 0), (0.2, -0.2, -0.1, -0.3, 0.1), (-0.4, -0.1, -0.2, -0.2, 0.2)],
    [(-0.1, 0.2, 0.3, -0.4, 0), (-0.2, -0.2, -0.1, 0.3, 0.1), (0.4, -0.1, -0.2, -0.2, 0.2)],
    [(-0.1, -0.2, 0.3, 0.4, 0), (0.2, 0.2, 0.1, 0.3, -0.1), (0.4, 0.1, 0.2, 0.2, -0.2)],
    [(0.1, -0.2, -0.3, 0.4, 0), (0.2, 0.2, 0.1, -0.3, -0.1), (-0.4, 0.1, 0.2, -0.2, 0.2)],
]
GOLDEN = [
    (
        (0.774166, 0.616228, 0.741100),
        (0.341868, 0.320697, 0.337435),
        (-0.036648, 0.029509, 0.137978, 0.108025, -0.035417),
    ),
    (
        (0.316228, 0.539835, 0.400000),
        (0.326710, 0.338370, 0.334920),
        (-0.070271, 0.029509, 0.234471, -0.191975, 0.015459),
    ),
    (
        (0.760555, 0.323607, 0.506450),
        (0.343652, 0.324516, 0.331832),
        (-0.070271, 0.000153, 0.238749, -0.493725, 0.114277),
    ),
    (
        (0.774166, 0.582843, 0.741100),
        (0.352008, 0.314867, 0.333125),
        (0.090752, 0.026038, 0.490127, -0.191837, 0.017033),
    ),
    (
        (0.623607, 0.582843, 0.741100),
        (0.352319, 0.309975, 0.337707),
        (0.052896, 0.051340, 0.690127, -0.211443, 0.114916),
    ),
]
GOLDEN_TAU_4 = [
    *GOLDEN[:3],
    (
        (0.3, 0.2, 0.0),
        (0.377020, 0.328099, 0.294881),
        (0.129729, 0.000153, 0.538749, -0.493725, 0.114277),
    ),
    (None, (0.384344, 0.326916, 0.288740), (0.118050, 0.017542, 0.738749, -0.495810, 0.200073)),
]


def split(values):
    return {"a": np.array(values[:3], np.float32), "b": np.array(values[3:], np.float32)}


def joined(model):
    return np.concatenate([model["a"], model["b"]])


@pytest.mark.parametrize(("tau", "golden"), [(0.3, GOLDEN), (0.4, GOLDEN_TAU_4)])
def test_the_released_variant_matches_the_released_code(tau, golden):
    strategy = FedHEAL(tau=tau, beta=0.4, variant="released")
    rounds = Rounds(strategy, MODEL, range(3))
    for moves, (distances, weights, expected) in zip(MOVES, golden, strict=True):
        model = rounds.step({k: split(move) for k, move in enumerate(moves)})
        if distances is not None:
            np.testing.assert_allclose(strategy.diagnostics["distance"], distances, atol=2e-6)
        np.testing.assert_allclose(strategy.diagnostics["weights"], weights, atol=2e-6)
        np.testing.assert_allclose(joined(model), expected, atol=2e-6)


def test_averaging_with_given_masks_matches_the_papers_example():
    """The paper's one-step example: no, one, two and all clients keep a coordinate."""
    masks = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1]], bool)
    updates = [-np.full(4, u, np.float32) for u in (1, 2, 4)]
    model = {"x": np.zeros(4, np.float32)}
    cohort = Cohort(1, (0, 1, 2), np.ones(3), model, tuple({"x": u} for u in updates))
    merged = cohort.average(np.array([0.5, 0.3, 0.2]), lambda block, k: masks[k][block.part])
    np.testing.assert_allclose(merged["x"], [0, -4, -1.375, -1.9], rtol=1e-6)


def paper_round(history, updates, p, dp, tau, beta, itself=False):
    """Return one round of Eq. 5-12 with all clients present.

    itself: apply Eq. 6 before Eq. 7, so that the round is part of its own history.
    """
    kept = []
    for m, update in enumerate(updates):
        if itself:
            history[m].append(update)
        if not history[m]:
            kept.append(np.ones_like(update, bool))
            continue
        rose = np.array([u >= 0 for u in history[m]])
        share = rose.sum(0)
        t = len(history[m])
        # Compare whole numbers of rounds with tau * t in tenths, without rounding errors.
        consistent = np.where(update >= 0, share, t - share)
        kept.append(consistent * 10 >= round(tau * 10) * t)
    if not itself:
        for past, update in zip(history, updates, strict=True):
            past.append(update)
    d = np.array([((u * k) ** 2).sum() for u, k in zip(updates, kept, strict=True)])
    # If nothing is kept, the equation is 0/0; the weights then do not change.
    share = d / d.sum() if d.sum() > 0 else p
    dp = (1 - beta) * dp + beta * share
    p = (p + dp) / (p + dp).sum()
    step = np.zeros_like(updates[0])
    for i in range(step.size):
        mass = sum(p[m] for m in range(len(p)) if kept[m][i])
        if mass:
            step[i] = sum(p[m] * updates[m][i] for m in range(len(p)) if kept[m][i]) / mass
    return step, p, dp


@given(
    seed=st.integers(0, 10_000),
    tau=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]),
    beta=st.sampled_from([0.0, 0.4, 1.0]),
    variant=st.sampled_from(["paper", "algorithm1"]),
)
def test_the_paper_variants_match_the_papers_equations(seed, tau, beta, variant):
    random = np.random.default_rng(seed)
    clients, size = 3, 6
    examples = {k: int(n) for k, n in enumerate(random.integers(1, 50, clients))}
    p = np.array(list(examples.values())) / sum(examples.values())
    dp = np.zeros(clients)
    model = np.zeros(size)
    history = [[] for _ in range(clients)]
    strategy = FedHEAL(tau=tau, beta=beta, variant=variant)
    rounds = Rounds(strategy, {"x": model.astype(np.float32)}, range(clients))
    for _ in range(6):
        updates = [random.choice([-0.5, -0.25, 0.0, 0.25, 0.5], size) for _ in range(clients)]
        step, p, dp = paper_round(history, updates, p, dp, tau, beta, variant == "algorithm1")
        before = rounds.model["x"].astype(float)
        after = rounds.step({k: {"x": u} for k, u in enumerate(updates)}, examples)["x"]
        np.testing.assert_allclose(after - before, step, atol=1e-6)
        np.testing.assert_allclose(strategy.diagnostics["weights"], p, rtol=1e-5)


@pytest.mark.parametrize(
    ("variant", "kept"),
    [
        # c = 1 (nothing known), 1, 1, 0, 1/4, 3/5, 1/3, 4/7: Eq. 5.
        ("paper", [1, 1, 1, 0, 0, 1, 0, 1]),
        # c = 1, 1, 1, 1/4, 2/5, 2/3, 3/7, 5/8: Eq. 6 first, as in Algorithm 1.
        ("algorithm1", [1, 1, 1, 0, 1, 1, 1, 1]),
    ],
)
def test_kept_coordinates_follow_eq_5_or_algorithm_1(variant, kept):
    rounds = Rounds(FedHEAL(tau=0.4, beta=None, variant=variant), {"x": np.zeros(1)}, [0])
    moved = []
    for sign in (1, 1, 1, -1, -1, 1, -1, 1):
        before = rounds.model["x"].item()
        moved.append(int(rounds.step({0: {"x": np.full(1, 0.5 * sign)}})["x"].item() != before))
    assert moved == kept


def test_consistency_equal_to_tau_is_kept_except_by_the_released_variant():
    """c = 3/10 with tau = .3: rounding of binary fractions must not decide."""
    for variant, kept in (("paper", True), ("released", False)):
        strategy = FedHEAL(tau=0.3, beta=None, variant=variant)
        rounds = Rounds(strategy, {"x": np.zeros(1, np.float32)}, [0])
        for r in range(10):
            rounds.step({0: {"x": np.float32([0.5 if r < 3 else -0.5])}})
        before = rounds.model["x"].copy()
        after = rounds.step({0: {"x": np.float32([0.5])}})["x"]
        assert (after != before).all() == kept


def test_consistency_counts_only_rounds_with_participation():
    strategy = FedHEAL(tau=0.6, beta=None, fraction_train=1.0)
    rounds = Rounds(strategy, {"x": np.zeros(1, np.float32)}, [0, 1])
    up, down = {"x": np.float32([0.5])}, {"x": np.float32([-0.5])}
    rounds.step({0: up, 1: up})
    for _ in range(3):
        rounds.step({0: up})  # client 1 is away
    before = rounds.model["x"].copy()
    # Client 1 took part once and rose: 100 % of its own rounds, 25 % of the server's.
    after = rounds.step({0: down, 1: up})["x"]
    assert after == before + 0.5
    assert strategy.rounds == {0: 5, 1: 2}


def test_sign_counts_can_exceed_255():
    strategy = FedHEAL(tau=1.0, beta=None)
    rounds = Rounds(strategy, {"x": np.zeros(1, np.float32)}, [0])
    for _ in range(300):
        rounds.step({0: {"x": np.float32([0.5])}})
    assert strategy.rises[0]["x"] == 300
    assert rounds.model["x"] == 150


@pytest.mark.parametrize(
    "neutral",
    [
        {"tau": 0.0, "beta": 0.0},
        {"tau": None, "beta": None},
        {"tau": None, "beta": None, "variant": "released"},
    ],
    ids=str,
)
def test_neutral_settings_equal_fedavg(neutral):
    random = np.random.default_rng(0)
    model = {"x": random.normal(size=50).astype(np.float32)}
    one = Rounds(FedHEAL(fraction_train=0.5, **neutral), model, range(6))
    two = Rounds(FedAvg(fraction_train=0.5), model, range(6))
    for _ in range(6):
        asked = [m.metadata.dst_node_id - 1000 for m in one.ask()]
        one.round -= 1
        updates = {k: {"x": random.normal(size=50).astype(np.float32)} for k in asked}
        examples = {k: int(random.integers(1, 100)) for k in asked}
        np.testing.assert_allclose(
            one.step(updates, examples)["x"], two.step(updates, examples)["x"], atol=1e-6
        )


def test_the_released_variant_with_beta_0_is_uniform():
    strategy = FedHEAL(tau=None, beta=0.0, variant="released")
    rounds = Rounds(strategy, {"x": np.zeros(1, np.float32)}, range(3))
    rounds.step({k: {"x": np.float32([k])} for k in range(3)}, {0: 1, 1: 50, 2: 900})
    np.testing.assert_allclose(strategy.diagnostics["weights"], 1 / 3)


def test_released_shares_include_the_last_distance_of_absent_clients():
    strategy = FedHEAL(tau=None, beta=1.0, variant="released")
    rounds = Rounds(strategy, {"x": np.zeros(1, np.float32)}, [0, 1])
    rounds.step({0: {"x": np.float32([3])}, 1: {"x": np.float32([1])}})
    np.testing.assert_allclose(strategy.diagnostics["weights"], [1.25 / 2, 0.75 / 2])
    rounds.step({0: {"x": np.float32([1])}})
    # d = (1, stale 1): client 0 gets half; only it is merged, so its weight is 1.
    np.testing.assert_allclose(strategy.p[0], 1.25 + 0.5)
    np.testing.assert_allclose(strategy.diagnostics["weights"], [1.0])


def test_batchnorm_statistics_are_masked_only_by_the_released_variant():
    model = {"w": np.zeros(1, np.float32), "bn.running_mean": np.zeros(1, np.float32)}
    for variant, moved in (("paper", 1.0), ("released", 0.0)):
        strategy = FedHEAL(tau=0.9, beta=None, variant=variant)
        rounds = Rounds(strategy, model, [0])
        down = {name: np.float32([-1]) for name in model}
        rounds.step({0: down})
        before = rounds.model["bn.running_mean"].copy()
        after = rounds.step({0: {name: np.float32([1]) for name in model}})
        assert after["bn.running_mean"] - before == moved
        assert after["w"] == -1
