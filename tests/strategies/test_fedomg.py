"""FedOMG: its weights by a cone program, its step's optimality, and the released code's descent."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairflower.strategies import FedOMG
from fairflower.strategies.fedomg import agreeing_weights
from fairflower.testing import make_cohort

CASES = st.integers(0, 10_000), st.integers(2, 7), st.integers(2, 9)


def objective(updates: np.ndarray, w: np.ndarray, kappa: float) -> float:
    g, g_w = updates.mean(0), w @ updates
    return float(g_w @ g + kappa * np.linalg.norm(g) * np.linalg.norm(g_w))


@given(*CASES, st.floats(0.01, 1))
def test_the_weights_are_those_of_a_cone_program(seed, clients, size, kappa):
    updates = np.random.default_rng(seed).normal(size=(clients, size))
    g = updates.mean(0)
    w = cp.Variable(clients)
    radius = kappa * np.linalg.norm(g)
    value = (updates @ g) @ w + radius * cp.norm(updates.T @ w)
    best = cp.Problem(cp.Minimize(value), [cp.sum(w) == 1, w >= 0]).solve(solver="CLARABEL")
    found = agreeing_weights(updates @ updates.T, kappa)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)
    assert objective(updates, found, kappa) == pytest.approx(best, abs=1e-5)


@given(*CASES)
def test_no_step_in_the_ball_around_the_mean_agrees_better(seed, clients, size):
    random = np.random.default_rng(seed)
    updates = random.normal(size=(clients, size))
    g, kappa = updates.mean(0), 0.5
    step = FedOMG(kappa=kappa).merge(make_cohort(updates=updates.tolist()))["w"]
    radius = kappa * np.linalg.norm(g)
    ball = random.normal(size=(300, size))
    ball *= radius / np.linalg.norm(ball, axis=1, keepdims=True)
    if np.linalg.norm(step - g) > 0.5 * radius:  # otherwise no direction improves all clients
        assert np.linalg.norm(step - g) == pytest.approx(radius, rel=1e-3)
        others = np.min((g + ball) @ updates.T, axis=1)
        assert np.min(updates @ step) >= others.max() - 1e-3 * (1 + abs(others.max()))


def test_the_step_is_that_of_the_released_codes_descent():
    """Descent on the logits of w with many small steps, and without its terms of 1e-4."""
    updates = np.random.default_rng(1).normal(0.5, 1, (4, 12))
    G = torch.tensor(updates @ updates.T)
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5, momentum=0.5)
    mean = G.mean()
    for _ in range(300):
        w = torch.softmax(logits, 0)
        loss = w @ G.mean(1) + 0.4 * mean.sqrt() * (w @ G @ w).sqrt()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    w = torch.softmax(logits.detach(), 0)
    share = 0.25 + 0.4 * mean.sqrt() / (w @ G @ w).sqrt() * w
    expected = share.numpy() @ updates
    merged = FedOMG(kappa=0.4).merge(make_cohort(updates=updates.tolist()))
    np.testing.assert_allclose(merged["w"], expected, atol=2e-3)


def test_limits():
    updates = [[3.0, 1.0], [-1.0, 0.5]]
    cohort = make_cohort(updates=updates)
    np.testing.assert_allclose(FedOMG(kappa=0).merge(cohort)["w"], [1, 0.75], atol=1e-6)
    same = make_cohort(updates=[[2.0, 0.0]] * 3)
    np.testing.assert_allclose(FedOMG().merge(same)["w"], [3, 0], atol=1e-5)
    opposite = make_cohort(updates=[[1.0, 0.0], [-1.0, 0.0]])
    assert not FedOMG().merge(opposite)["w"].any()
