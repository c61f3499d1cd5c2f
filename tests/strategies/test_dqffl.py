"""Dq-FFL against a plain loop, and its special cases RFL-Self and q-FFL."""

from __future__ import annotations

import numpy as np
import pytest
from reference_solvers import shortened

from fairflower.strategies import QFFL, DqFFL, FairRFL
from fairflower.testing import make_cohort
from fairflower.testing.rounds import Rounds

LR = 0.05  # of the clients, as `Rounds` sends it
TINY = 1e-10


def recovered(updates: np.ndarray, tau: float, downscale: bool) -> np.ndarray:
    """The updates after the defense."""
    norms = np.linalg.norm(updates, axis=1)
    middle, m = np.median(norms), np.median(updates, axis=0)
    mad = 1.4826 * np.median(abs(norms - middle))
    out = updates.copy()
    for k in np.flatnonzero((norms - middle) / mad > tau):
        out[k] *= middle / norms[k]
        if not downscale:
            out[k] = shortened(updates[k], m, middle)
    return out


def loop(model, rounds, variant, q, downscale):
    """q-FedAvg (Algorithm 2) with a power for each client."""
    last: dict[int, float] = {}
    for updates, losses in rounds:
        F = losses + TINY
        l_med = np.median(list(last.values())) if last else 1.0
        share = np.array([last.get(k, l_med) / l_med for k in range(len(F))])
        powers = q / share if variant == "paper" else q * share
        last = dict(enumerate(F))
        moves = recovered(updates, 2.5, downscale)
        L, norms = 1 / LR, np.linalg.norm(moves, axis=1)
        h = powers * F ** (powers - 1) * (L * norms) ** 2 + L * F**powers
        model = model + (F**powers)[:, None].T @ (L * moves) / h.sum()
    return model.ravel()


def made_up_rounds():
    """Yield the updates and losses of six clients in three rounds; client 2 is selfish."""
    random = np.random.default_rng(4)
    for _ in range(3):
        updates = random.normal(size=(6, 5)) * 0.1 + 0.1
        updates[2] *= 25
        yield updates, random.uniform(0.2, 2.5, 6)


def run(strategy, rounds) -> tuple[np.ndarray, dict]:
    simulated = None
    for updates, losses in rounds:
        simulated = simulated or Rounds(
            strategy, {"x": np.zeros(updates.shape[1])}, range(len(updates))
        )
        metrics = {k: {"received_loss": float(loss)} for k, loss in enumerate(losses)}
        model = simulated.step({k: {"x": row} for k, row in enumerate(updates)}, metrics=metrics)
    return model["x"], strategy.diagnostics


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("recovery", ["median", "downscale"])
@pytest.mark.parametrize("q", [0.5, 1.0])
def test_steps_match_a_plain_loop(variant, recovery, q):
    rounds = list(made_up_rounds())
    model, diagnostics = run(DqFFL(q=q, variant=variant, recovery=recovery), rounds)
    expected = loop(np.zeros(5), rounds, variant, q, recovery == "downscale")
    np.testing.assert_allclose(model, expected, rtol=1e-9)
    assert diagnostics["kept"][2] < 0.5


def test_the_variants_have_inverse_powers():
    rounds = list(made_up_rounds())
    paper, released = (run(DqFFL(q=1.0, variant=v), rounds)[1] for v in ("paper", "released"))
    np.testing.assert_allclose(paper["powers"] * released["powers"], 1)


def test_q_0_equals_fairrfl():
    rounds = list(made_up_rounds())
    np.testing.assert_allclose(run(DqFFL(q=0.0), rounds)[0], run(FairRFL(), rounds)[0], rtol=1e-9)


def test_the_first_round_without_selfish_clients_equals_qffl():
    (first, *_) = made_up_rounds()
    for rule in ("qfedavg", "weights"):
        models = [run(kind, [first])[0] for kind in (DqFFL(tau=1e9, rule=rule), QFFL(rule=rule))]
        np.testing.assert_allclose(*models, rtol=1e-12)


def test_new_clients_get_the_default_power_and_absent_clients_keep_their_loss():
    strategy = DqFFL(rule="weights", min_clients=1)
    rounds = Rounds(strategy, {"x": np.zeros(2)}, range(3))

    def step(losses):
        moves = {k: {"x": np.array([1.0, k])} for k in losses}
        rounds.step(moves, metrics={k: {"received_loss": v} for k, v in losses.items()})
        return strategy.diagnostics["powers"]

    np.testing.assert_array_equal(step({0: 1.0, 1: 4.0}), 1)
    np.testing.assert_allclose(step({1: 2.0, 2: 3.0}), 1)  # the median of the known losses is 4
    np.testing.assert_allclose(step({0: 1.0, 1: 1.0, 2: 1.0}), (2.0, 1.0, 2 / 3))


def test_weigh_returns_the_weights_that_merge_uses() -> None:
    cohorts = [
        make_cohort(updates=[[1.0], [5.0]], received_loss=losses, server_round=r)
        for r, losses in enumerate(([1.0, 3.0], [2.0, 2.5]), start=1)
    ]
    strategy = DqFFL(rule="weights")
    for cohort in cohorts:
        weights = strategy.weigh(cohort)
        strategy.merge(cohort)
        assert strategy.diagnostics["weights"].tolist() == pytest.approx(weights.tolist())
    assert weights.tolist() != pytest.approx((np.array([2.0, 2.5]) / 4.5).tolist()), "not q-FFL's"
