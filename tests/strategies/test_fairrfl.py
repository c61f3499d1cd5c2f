"""FairRFL: the paper's example, a plain bisection, and cases that the paper leaves open."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference_solvers import shortened

from fairflower.strategies import FairRFL
from fairflower.testing.rounds import Rounds

#: The paper's example.
UPDATES = np.array([(0.95, 0.55), (-0.2, 0.9), (-0.6, 0.55), (-1.2, 0.1), (1.40, 1.46)])
SCORES = (0, -0.674491, -1.088975, 0.408425, 3.549712)


def step(updates, **arguments) -> tuple[np.ndarray, dict]:
    updates = np.asarray(updates, float)
    rounds = Rounds(FairRFL(**arguments), {"x": np.zeros(updates.shape[1])}, range(len(updates)))
    model = rounds.step({k: {"x": row} for k, row in enumerate(updates)})
    return model["x"], rounds.strategy.diagnostics


def test_results_match_the_papers_example():
    model, diagnostics = step(UPDATES)
    np.testing.assert_allclose(diagnostics["score"], SCORES, atol=1e-6)
    np.testing.assert_allclose(diagnostics["kept"], (1, 1, 1, 1, 0.454077), atol=1e-6)
    np.testing.assert_allclose(model, (-0.104695, 0.612642), atol=1e-6)
    last = 5 * model - UPDATES[:4].sum(axis=0)
    np.testing.assert_allclose(last, (0.526523, 0.963210), atol=3e-6)


def test_recovery_downscale_only_shortens_updates():
    model, diagnostics = step(UPDATES, recovery="downscale")
    factor = 1.097725 / 2.022770
    np.testing.assert_allclose(diagnostics["kept"], (1, 1, 1, 1, factor), atol=1e-6)
    np.testing.assert_allclose(model, (UPDATES[:4].sum(0) + factor * UPDATES[4]) / 5, atol=1e-6)


@given(st.integers(0, 10_000), st.integers(4, 9), st.integers(1, 40))
def test_recovery_matches_a_plain_bisection(seed, clients, size):
    random = np.random.default_rng(seed)
    updates = random.normal(size=(clients, size))
    updates[0] *= 30
    model, diagnostics = step(updates)
    middle, norm = np.median(updates, axis=0), np.median(np.linalg.norm(updates, axis=1))
    selfish = np.flatnonzero(diagnostics["score"] > 2.5)
    expected = updates.copy()
    for k in selfish:
        if np.linalg.norm(middle) > norm:
            assume(False)  # tested below
        expected[k] = shortened(updates[k], middle, norm)
        assert np.linalg.norm(expected[k]) == pytest.approx(norm)
    np.testing.assert_allclose(model, expected.mean(0), atol=1e-9)


def test_updates_are_downscaled_if_the_median_update_is_too_long():
    """The coordinate-wise median is (3, 3); the median norm is 3."""
    updates = [(3, 0), (0, 3), (3, 3), (0, 3), (3, 0), (3, 3), (300, 300)]
    model, diagnostics = step(updates)
    expected = np.array(updates, float)
    for k in np.flatnonzero(diagnostics["score"] > 2.5):
        expected[k] *= 3 / np.linalg.norm(expected[k])
    assert diagnostics["score"][6] > 2.5
    np.testing.assert_allclose(model, expected.mean(0), rtol=1e-9)


def test_short_and_equal_updates_are_kept():
    updates = np.array([(1, 0), (0, 1), (-1, 0), (0.6, 0.8), (0, 0.001)])
    model, diagnostics = step(updates)
    np.testing.assert_array_equal(diagnostics["kept"], 1)
    np.testing.assert_allclose(model, updates.mean(0))
    _, diagnostics = step(np.zeros((3, 2)))
    np.testing.assert_array_equal(diagnostics["score"], 0)


def test_tau_is_the_threshold_of_the_score():
    for tau, kept in ((3.5, 0.454077), (3.6, 1.0)):
        assert step(UPDATES, tau=tau)[1]["kept"][4] == pytest.approx(kept, abs=1e-6)


def test_batchnorm_statistics_are_averaged_equally_and_excluded_from_the_score():
    model = {"x": np.zeros(2), "bn.running_mean": np.zeros(1)}
    rounds = Rounds(FairRFL(), model, range(5))
    moves = {
        k: {"x": row, "bn.running_mean": np.array([100.0 * (k == 1)])}
        for k, row in enumerate(UPDATES)
    }
    merged = rounds.step(moves, examples={k: 10**k for k in range(5)})
    np.testing.assert_allclose(rounds.strategy.diagnostics["score"], SCORES, atol=1e-6)
    np.testing.assert_allclose(merged["x"], (-0.104695, 0.612642), atol=1e-6)
    assert merged["bn.running_mean"][0] == pytest.approx(20)
