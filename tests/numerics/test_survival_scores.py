"""Scores of survival models against scikit-survival, SciPy and definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau
from sksurv.metrics import brier_score, concordance_index_censored, concordance_index_ipcw
from sksurv.nonparametric import kaplan_meier_estimator
from sksurv.util import Surv

from fairflower.numerics.survival import (
    Bools,
    Floats,
    brier,
    concordance,
    integrated_brier,
    uncensored,
    uno_concordance,
)

Patients = tuple[Floats, Bools, Floats]


def patients(n: int = 60, seed: int = 0, tied: bool = False) -> Patients:
    """Return times, events and risks; with ``tied``, several have the same time or risk."""
    rng = np.random.default_rng(seed)
    time, risk = rng.exponential(100, n), rng.normal(size=n)
    if tied:
        time, risk = np.ceil(time / 20), risk.round()
    return time, rng.random(n) < 0.7, risk


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_concordance_is_that_of_scikit_survival(seed: int, tied: bool) -> None:
    time, event, risk = patients(seed=seed, tied=tied)
    expected = concordance_index_censored(event, time, risk)[0]
    assert concordance(time, event, risk) == pytest.approx(expected)


@given(st.integers(2, 30), st.integers(0, 10**6))
def test_without_censoring_concordance_is_kendalls_tau(n: int, seed: int) -> None:
    time, _, risk = patients(n, seed)
    tau = kendalltau(risk, -time).statistic
    assert concordance(time, np.ones(n, bool), risk) == pytest.approx((1 + tau) / 2)
    assert uno_concordance(time, np.ones(n, bool), risk, math.inf) == pytest.approx((1 + tau) / 2)


@given(st.integers(2, 30), st.integers(0, 10**6), st.booleans())
def test_opposite_risks_have_the_opposite_concordance(n: int, seed: int, tied: bool) -> None:
    time, event, risk = patients(n, seed, tied)
    for score in (concordance, lambda *a: uno_concordance(*a, math.inf)):
        both = score(time, event, risk) + score(time, event, -risk)
        assert math.isnan(both) or both == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_unos_concordance_is_that_of_scikit_survival(seed: int) -> None:
    time, event, risk = patients(seed=seed)
    known = Surv.from_arrays(event, time)
    for horizon in (50.0, 120.0):
        expected = concordance_index_ipcw(known, known, risk, tau=horizon)[0]
        assert uno_concordance(time, event, risk, horizon) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_brier_score_is_that_of_scikit_survival(seed: int) -> None:
    time, event, _ = patients(seed=seed)
    known = Surv.from_arrays(event, time)
    times = np.linspace(time.min() + 1, time.max() - 1, 6)
    survival = np.sort(np.random.default_rng(seed).random((60, 6)))[:, ::-1]
    _, expected = brier_score(known, known, survival, times)
    scores = [brier(time, event, survival[:, j], at) for j, at in enumerate(times)]
    np.testing.assert_allclose(scores, expected)
    mean = np.trapezoid([0, *expected], [0, *times]) / times[-1]
    late = np.append(times, time.max() + 5)  # after all patients, where nothing is known
    survival = np.column_stack([survival, survival[:, -1] / 2])
    assert integrated_brier(time, event, survival, late) == pytest.approx(mean)


@pytest.mark.parametrize("tied", [False, True])
def test_without_censoring_the_brier_score_is_the_mean_square(tied: bool) -> None:
    time, _, risk = patients(tied=tied)
    at, survival = float(np.median(time)), 1 / (1 + np.exp(risk))
    expected = np.mean((survival - (time > at)) ** 2)
    assert brier(time, np.ones(60, bool), survival, at) == pytest.approx(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_the_censoring_curve_is_kaplan_and_meiers_before_each_time(tied: bool) -> None:
    time, event, _ = patients(tied=tied)
    times, curve = kaplan_meier_estimator(event, time, reverse=True)
    np.testing.assert_allclose(uncensored(time, event, times), [1, *curve[:-1]])
    assert (uncensored(time, event, time[event]) > 0).all()


def test_scores_are_undefined_and_not_0_without_events_or_pairs() -> None:
    time, event, risk = patients()
    none = np.zeros_like(event)
    assert math.isnan(concordance(time, none, risk))
    assert math.isnan(uno_concordance(time, none, risk, math.inf))
    assert math.isnan(uno_concordance(time, event, risk, time.min()))
    assert math.isnan(integrated_brier(time, none, np.ones((60, 1)), np.ones(1)))
    assert math.isnan(integrated_brier(time, event, np.ones((60, 1)), time.max(keepdims=True)))
    last = np.arange(60) == np.argmax(time)  # nobody is observed for longer
    assert math.isnan(concordance(time, last, risk))
    assert math.isnan(concordance(time[:0], event[:0], risk[:0]))
