"""FedPW: the released class's numbers, a plain loop, and partial participation."""

from __future__ import annotations

import numpy as np
import pytest

from fairflower.strategies import FedPW, fedpw
from fairflower.testing.rounds import Rounds

#: theta - theta_k of three clients, the same in three rounds, and their losses in each.
U = np.array(
    [
        (0.10, -0.22, 0.31, 0.43, -0.54, 0.65, 0.71, -0.83, 0.92, -0.17, 0.26, -0.38),
        (0.21, -0.13, 0.27, -0.34, 0.06, 0.15, -0.37, 0.41, 0.52, -0.63, 0.18, 0.29),
        (0.46, -0.57, 0.68, 0.12, -0.23, -0.35, 0.44, 0.51, -0.07, 0.19, -0.28, 0.33),
    ]
)
LOSSES = ((2, 1, 0.5), (1.5, 0.5, 0.25), (1.2, 0.4, 0.2))
P = ((0.571429, 0.285714, 0.142857), (0.584228, 0.277181, 0.138591), (0.599695, 0.266870, 0.133435))
Q = (0.480175, 0.225741, 0.294084)
W = ((0.537086, 0.263144, 0.199770), (0.546141, 0.258352, 0.195507), (0.557366, 0.252304, 0.190330))
EMPHASIS = (0.623662, 0.633962, 0.645842)
MODELS = (
    "-.200863 .266236 -.373389 -.165451 .320185 -.318658 -.371867 .236010 -.616970 .219129 "
    "-.131073 .061857",
    "-.345050 .497827 -.822059 -.312451 .615101 -.605222 -.750059 .483674 -1.385000 .474735 "
    "-.358421 .194468",
    "-.485586 .728935 -1.269056 -.466336 .916079 -.900895 -1.136182 .745775 -2.162292 .728438 "
    "-.588153 .333100",
)


def start(size: int = 12, clients: int = 3, **arguments) -> Rounds:
    return Rounds(FedPW(min_clients=1, **arguments), {"x": np.zeros(size)}, range(clients))


def step(rounds: Rounds, u, losses) -> np.ndarray:
    """Run a round with theta - theta_k and losses, by client or for clients 0, 1, ..."""
    if not isinstance(u, dict):
        u, losses = dict(enumerate(u)), dict(enumerate(losses))
    moves = {k: {"x": -np.asarray(row)} for k, row in u.items()}
    return rounds.step(moves, metrics={k: {"train_loss": losses[k]} for k in u})["x"]


@pytest.mark.parametrize("variant", ["released", "adapted"])
def test_results_match_the_released_code(variant):
    rounds = start(variant=variant)
    for t in range(3):
        model = step(rounds, U, LOSSES[t])
        diagnostics = rounds.strategy.diagnostics
        np.testing.assert_allclose(diagnostics["loss_weights"], P[t], atol=1e-6)
        np.testing.assert_allclose(diagnostics["direction_weights"], Q, atol=1e-6)
        assert diagnostics["emphasis"] == pytest.approx(EMPHASIS[t], abs=1e-6)
        np.testing.assert_allclose(diagnostics["weights"], W[t], atol=1e-6)
        np.testing.assert_allclose(
            diagnostics["pruned"], (0.09, 0.27, 0.54) if t else 0, atol=1e-12
        )
        np.testing.assert_allclose(model, [float(x) for x in MODELS[t].split()], atol=2e-6)


def test_an_empty_array_is_left_unchanged() -> None:
    rounds = Rounds(FedPW(), {"x": np.zeros(12), "none": np.zeros((0, 3))}, range(3))
    moves = {k: {"x": -row, "none": np.zeros((0, 3))} for k, row in enumerate(U)}
    model = rounds.step(moves, metrics={k: {"train_loss": LOSSES[0][k]} for k in range(3)})
    assert model["none"].shape == (0, 3)
    np.testing.assert_allclose(model["x"], step(start(), U, LOSSES[0]))


SMALL = np.array(
    [
        (0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 0.7, -0.8),
        (0.2, -0.1, 0.25, -0.3, 0.05, 0.15, -0.35, 0.4),
        (0.45, -0.55, 0.65, 0.12, -0.22, -0.32, 0.42, 0.52),
    ]
)


def test_results_match_the_released_code_if_a_client_prunes_nothing():
    rounds = start(8)
    step(rounds, SMALL, LOSSES[0])
    np.testing.assert_allclose(
        rounds.strategy.diagnostics["weights"], (0.499025, 0.174418, 0.326556), atol=1e-6
    )
    model = step(rounds, SMALL * [[0.5], [1], [0.8]], LOSSES[1])
    np.testing.assert_allclose(
        rounds.strategy.diagnostics["weights"], (0.493974, 0.183640, 0.322386), atol=1e-6
    )
    expected = "-.409222 .488100 -.693221 -.230174 .436128 -.396818 -.534042 .149665"
    np.testing.assert_allclose(model, [float(x) for x in expected.split()], atol=2e-6)


def test_capped_weights_apply_to_pruned_updates():
    """Only client 0 moves the first coordinate; the pruned coordinates are zero."""
    rounds = start(4, drop=0.25, max_client_weight=0.4)
    u = [[10.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]]
    for t in (1, 2):
        assert step(rounds, u, [1.0, 1.0, 1.0])[0] == pytest.approx(-4.0 * t)
        np.testing.assert_allclose(rounds.strategy.diagnostics["weights"], (0.4, 0.3, 0.3))
    np.testing.assert_allclose(rounds.strategy.diagnostics["pruned"], 0.25)


class Loop:
    """The fact sheet's steps for one array, client by client and coordinate by coordinate."""

    def __init__(self, size: int, K: int, beta: float = 0.3, drop: float = 0.3) -> None:
        self.theta, self.K, self.beta, self.drop = np.zeros(size), K, beta, drop
        self.d, self.p, self.e, self.q = ([0.0] * K for _ in range(4))
        self.first: tuple[float, float] | None = None

    def step(self, u: np.ndarray, L: np.ndarray) -> np.ndarray:
        K, n = u.shape
        a = [sum(float(u[k] @ u[j]) for j in range(K)) for k in range(K)]
        means = sum(L) / K, sum(a) / K
        begins = self.first is None
        self.first = self.first or means
        b, c = (self.beta * now / then for now, then in zip(means, self.first, strict=True))
        for k in range(K):
            self.d[k] = (1 - b) * self.d[k] + b * L[k] / sum(L)
            self.e[k] = (1 - c) * self.e[k] + c * a[k] / sum(a)
            self.p[k] += self.d[k]
            self.q[k] += self.e[k]
        self.p = [x / sum(self.p) for x in self.p]
        self.q = [x / sum(self.q) for x in self.q]
        s, o = np.std(self.p, ddof=1), np.std(self.q, ddof=1)
        w = [s / (s + o) * x + o / (s + o) * y for x, y in zip(self.p, self.q, strict=True)]
        if not begins:
            u, m = u.copy(), []
            for k in range(K):
                share = min(1, K * self.drop / L[k] / sum(1 / x for x in L))
                order = sorted(range(n), key=lambda i: abs(u[k, i]))[: int(n * share)]
                m.append(np.mean([abs(u[k, i]) for i in order[::10]]))
                u[k, order] = 0
        g = sum(w[k] * u[k] for k in range(K))
        if not begins:
            unit = np.array([row / np.linalg.norm(row) for row in u])
            spread = []
            for i in range(n):
                norm = np.linalg.norm(unit[:, i])
                spread.append(np.std(unit[:, i] / norm, ddof=1) if norm else np.inf)
            best = sorted(range(n), key=lambda i: spread[i])[: int(n * self.drop)]
            factor = np.mean(m) / np.mean([abs(g[i]) for i in best[::10]])
            if factor < 1:
                g[best] *= 1 + factor
        self.theta = self.theta - g
        return self.theta


@pytest.mark.parametrize("seed", range(5))
def test_steps_match_a_plain_loop(seed):
    random = np.random.default_rng(seed)
    K, n = 5, 137
    rounds, loop = start(n, K), Loop(n, K)
    common = random.normal(size=n)
    for t in range(4):
        u = common + random.normal(size=(K, n))
        L = random.uniform(0.5, 1.5, K) / (t + 1)
        np.testing.assert_allclose(step(rounds, u, L), loop.step(u, L), rtol=1e-9, atol=1e-12)


def test_longer_updates_in_later_rounds_match_the_plain_loop() -> None:
    """b' is then above 2, so the sum of q + d' is negative in some rounds."""
    random = np.random.default_rng(5)
    rounds, loop = start(40), Loop(40, 3)
    common = random.normal(size=40)
    for t in range(5):
        u = (3 if t else 1) * (common + 0.3 * random.normal(size=(3, 40)))
        np.testing.assert_allclose(step(rounds, u, np.ones(3)), loop.step(u, np.ones(3)), rtol=1e-9)


def test_direction_weights_stay_close_when_clients_join() -> None:
    """All updates are equal, so b' is beta. Weights differ because new clients have d = 0."""
    rounds = start(2, 20)
    step(rounds, {k: [1.0, 2.0] for k in range(2)}, dict.fromkeys(range(2), 1.0))
    for _ in range(3):
        step(rounds, {k: [1.0, 2.0] for k in range(20)}, dict.fromkeys(range(20), 1.0))
        assert np.ptp(rounds.strategy.diagnostics["direction_weights"]) < 0.011


@pytest.mark.parametrize("variant", ["released", "adapted"])
def test_a_negative_stored_weight_counts_as_0_when_others_are_absent(variant) -> None:
    rounds = start(1, 3, variant=variant)
    for _ in range(2):
        step(rounds, [[1.0], [1.0], [-0.9]], (1, 1, 1))
    assert rounds.strategy.q[2] < 0
    step(rounds, {0: [1.0], 2: [1.0]}, {0: 1.0, 2: 1.0})
    actual = rounds.strategy.diagnostics["direction_weights"]
    assert 0 <= actual.min() <= actual.max() <= 1


def test_computing_arrays_in_blocks_gives_identical_results(monkeypatch):
    """Blocks of an array are computed by threads."""
    whole, parts = start(), start()
    for t in range(3):
        expected = step(whole, U, LOSSES[t])
        with monkeypatch.context() as patch:
            patch.setattr(fedpw, "BLOCK", 5)
            np.testing.assert_array_equal(step(parts, U, LOSSES[t]), expected)


@pytest.mark.parametrize("variant", ["released", "adapted"])
def test_a_fully_pruned_client_does_not_affect_the_agreement(variant):
    rounds = start(variant=variant, drop=0.4)
    before = step(rounds, U, (1, 1, 1))
    after = step(rounds, U, (1, 1, 1e-9))
    diagnostics = rounds.strategy.diagnostics
    assert diagnostics["pruned"][2] == 1
    w = diagnostics["weights"]
    np.testing.assert_allclose(after - before, -(w[0] * U[0] + w[1] * U[1]), atol=1e-9)


def test_equal_clients_with_loss_0_get_equal_weights():
    rounds = start(clients=4)
    for _ in range(3):
        model = step(rounds, [U[0]] * 4, [0.0] * 4)
        np.testing.assert_allclose(rounds.strategy.diagnostics["weights"], 0.25)
        assert np.isfinite(model).all()


@pytest.mark.parametrize("variant", ["released", "adapted"])
def test_a_client_opposed_to_all_others_gets_weight_0(variant):
    rounds = start(1, 3, variant=variant)
    step(rounds, [[1.0], [1.0], [-0.9]], (1, 1, 1))
    np.testing.assert_allclose(rounds.strategy.diagnostics["weights"], (0.5, 0.5, 0))


def test_drop_0_gives_the_weighted_mean():
    rounds = start(drop=0)
    for t in range(3):
        before = rounds.model["x"]
        after = step(rounds, U, LOSSES[t])
        np.testing.assert_allclose(after - before, -np.array(W[t]) @ U, atol=2e-6)


@pytest.mark.parametrize("variant", ["released", "adapted"])
def test_batchnorm_statistics_are_pruned_only_by_the_released_variant(variant):
    model = {"w": np.zeros(12), "bn.running_var": np.ones(12)}
    rounds = Rounds(FedPW(variant=variant), model, range(3))
    moves = {k: {"w": -row, "bn.running_var": 1 + np.abs(row)} for k, row in enumerate(U)}
    for t in range(2):
        before = rounds.model["bn.running_var"]
        metrics = {k: {"train_loss": LOSSES[t][k]} for k in range(3)}
        after = rounds.step(moves, metrics=metrics)["bn.running_var"]
    variances = np.array([moves[k]["bn.running_var"] for k in range(3)])
    if variant == "released":
        for row, count in zip(variances, (1, 3, 6), strict=True):
            row[np.argsort(row)[:count]] = 0
    np.testing.assert_allclose(after - before, rounds.strategy.diagnostics["weights"] @ variances)


def test_absent_clients_keep_their_weights_and_new_clients_start_at_the_mean():
    rounds = start(clients=4)
    step(rounds, U, LOSSES[0])
    kept = rounds.strategy.p[2]
    step(rounds, {0: U[0], 1: U[1], 3: U[2]}, {0: 1.5, 1: 0.5, 3: 0.25})
    assert rounds.strategy.p[2] == kept
    held = np.array([*(3 * np.array(P[0][:2])), 1.0])
    b = 0.3 * 0.75 / (3.5 / 3)
    d = (1 - b) * np.array([0.3 * 4 / 7, 0.3 * 2 / 7, 0]) + b * np.array([6, 2, 1]) / 9
    p = held / held.sum() + d
    np.testing.assert_allclose(rounds.strategy.diagnostics["loss_weights"], p / p.sum(), rtol=1e-6)
