"""The min-norm QP against closed forms, brute force and an independent solver."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from fairflower.numerics import min_norm as qp
from fairflower.numerics.min_norm import min_norm_weights


def objective(gram, weights) -> float:
    return float(weights @ gram @ weights)


def by_enumeration(gram) -> float:
    """Return the smallest w'Gw on the simplex: the best stationary point over all supports."""
    # Unit vectors keep badly scaled systems solvable: v = s w.
    s = np.sqrt(gram.diagonal())
    unit = gram / np.outer(s, s)
    size = len(gram)
    supports = chain.from_iterable(combinations(range(size), n) for n in range(1, size + 1))
    best = np.inf
    for support in map(list, supports):
        c, a = unit[np.ix_(support, support)], 1 / s[support]
        a /= a.max()
        # Stationary on the support: C v = nu a, a'v = 1.
        system = np.block([[c, -a[:, None]], [a, 0]])
        v = np.linalg.lstsq(system, np.append(np.zeros(len(support)), 1), rcond=None)[0][:-1]
        v = v.clip(0)
        if v.any():
            v /= (v / s[support]).sum()
            best = min(best, objective(c, v))
    return best


def vectors(random, size, kind) -> np.ndarray:
    rows = random.standard_normal((size, 3 if kind == "rank-deficient" else size + 5))
    if kind == "positive":
        rows = np.abs(rows)
    if kind == "near-duplicate":
        rows = rows[:1] + 1e-5 * rows
    if kind == "badly scaled":
        rows *= 10.0 ** random.uniform(-6, 3, (size, 1))  # Gram entries 1e-12 ... 1e6
    return rows


KINDS = ["random", "positive", "rank-deficient", "near-duplicate", "badly scaled"]


@given(seed=st.integers(0, 10_000), size=st.integers(1, 6), kind=st.sampled_from(KINDS))
def test_small_problems_agree_with_enumeration(seed, size, kind):
    rows = vectors(np.random.default_rng(seed), size, kind)
    gram = rows @ rows.T
    solution = min_norm_weights(gram)
    assert solution.weights.min() >= 0
    assert solution.weights.sum() == pytest.approx(1)
    assert solution.residual < 1e-6
    # Relative to what one client alone gives: the scale on which weights matter.
    scale = gram.diagonal().min()
    assert objective(gram, solution.weights) / scale <= by_enumeration(gram) / scale + 1e-6
    assert solution.norm == pytest.approx(np.sqrt(max(objective(gram, solution.weights), 0)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 20, 50, 200])
def test_large_problems_agree_with_an_active_set_solver(size, kind):
    random = np.random.default_rng(size)
    rows = vectors(random, size, kind)
    gram = rows @ rows.T
    solution = min_norm_weights(gram)
    assert solution.residual < 1e-6
    scale = gram.diagonal().min()
    gram /= scale
    s = np.sqrt(gram.diagonal())
    values, basis = np.linalg.eigh(gram / np.outer(s, s))
    other = qp._nnls((basis * np.sqrt(values.clip(0))).T, s)
    # Mean of the two: convexity bounds how far either can be from the optimum.
    assert objective(gram, solution.weights) <= objective(gram, other) + 1e-6
    if kind == "random":  # full rank: the solution is unique
        np.testing.assert_allclose(solution.weights, other, atol=1e-6)


@given(seed=st.integers(0, 10_000), epsilon=st.sampled_from([0.02, 0.1, 0.5]))
def test_bounded_problems_agree_with_slsqp(seed, epsilon):
    random = np.random.default_rng(seed)
    rows = vectors(random, 5, "random")
    gram = rows @ rows.T
    prior = random.dirichlet(np.ones(5))
    low, high = (prior - epsilon).clip(0), (prior + epsilon).clip(max=1)
    solution = min_norm_weights(gram, prior - epsilon, prior + epsilon)
    assert (solution.weights >= low - 1e-9).all()
    assert (solution.weights <= high + 1e-9).all()
    assert solution.weights.sum() == pytest.approx(1)
    other = minimize(
        lambda w: objective(gram, w),
        prior,
        jac=lambda w: 2 * gram @ w,
        bounds=list(zip(low, high, strict=True)),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert objective(gram, solution.weights) <= other.fun + 1e-6 * gram.diagonal().max()


@given(seed=st.integers(0, 10_000), epsilon=st.sampled_from([0.02, 0.1, 0.5, 1.0]))
def test_the_residual_with_bounds_matches_a_linear_program(seed, epsilon):
    """For the initial weights, because all solvers are disabled."""
    random = np.random.default_rng(seed)
    rows, prior = vectors(random, 5, "random"), random.dirichlet(np.ones(5))
    gram = rows @ rows.T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qp, "_solve", lambda *_: None)
        solution = min_norm_weights(gram, prior - epsilon, prior + epsilon)
    bounds = np.stack([prior - epsilon, prior + epsilon], axis=1).clip(0, 1)
    assert solution.weights.sum() == pytest.approx(1)
    assert (bounds[:, 0] <= solution.weights + 1e-12).all()
    assert (solution.weights <= bounds[:, 1] + 1e-12).all()
    assert solution.norm**2 == pytest.approx(objective(gram, solution.weights))
    slope = gram @ solution.weights / solution.norm**2
    best = linprog(slope, A_eq=np.ones((1, 5)), b_eq=[1], bounds=bounds).fun
    assert solution.residual == pytest.approx(max(slope @ solution.weights - best, 0), abs=1e-7)


def test_solutions_match_closed_forms():
    orthogonal = min_norm_weights(np.diag([1.0, 4.0, 4.0]))
    np.testing.assert_allclose(orthogonal.weights, [4 / 6, 1 / 6, 1 / 6], atol=1e-7)
    # <v_i, v_j> >= |v_i|^2 for all j: client i takes all.
    taken = min_norm_weights(np.outer([1, 2, 4, 8], [1, 2, 4, 8]))
    np.testing.assert_allclose(taken.weights, [1, 0, 0, 0], atol=1e-6)
    opposite = min_norm_weights([[1, -1], [-1, 1]])
    np.testing.assert_allclose(opposite.weights, [0.5, 0.5], atol=1e-6)
    assert opposite.norm == pytest.approx(0, abs=1e-5)


def test_identical_vectors_share_equally_and_zero_vectors_get_all_weight():
    np.testing.assert_allclose(min_norm_weights(np.full((7, 7), 3.0)).weights, 1 / 7, atol=1e-6)
    nothing = min_norm_weights(np.zeros((4, 4)))
    np.testing.assert_array_equal(nothing.weights, 0.25)
    assert nothing.norm == nothing.residual == 0
    some = min_norm_weights(np.diag([0.0, 2.0, 0.0]))
    np.testing.assert_array_equal(some.weights, [0.5, 0, 0.5])


def test_weights_do_not_depend_on_the_scale():
    rows = np.random.default_rng(0).standard_normal((6, 10))
    gram = rows @ rows.T
    weights = min_norm_weights(gram).weights
    for scale in (1e-20, 1e-9, 1e9, 1e20):
        np.testing.assert_allclose(min_norm_weights(scale * gram).weights, weights, atol=1e-7)


def test_a_failing_solver_is_replaced_by_the_next(monkeypatch):
    gram = np.diag([1.0, 4.0])
    used = []
    original = qp._solve

    def failing(scaled, low, high, solver):
        used.append(solver)
        return None if len(used) < 3 else original(scaled, low, high, solver)

    monkeypatch.setattr(qp, "_solve", failing)
    solution = min_norm_weights(gram)
    assert used == ["CLARABEL", "NNLS", "OSQP"]
    assert solution.solver == "OSQP"
    np.testing.assert_allclose(solution.weights, [0.8, 0.2], atol=1e-6)


def test_weights_are_uniform_with_a_warning_if_all_solvers_fail(monkeypatch, caplog):
    monkeypatch.setattr(qp, "_solve", lambda *_: None)
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        solution = min_norm_weights(np.array([[2.0, 1.0], [1.0, 2.0]]))
    assert solution.solver == "uniform"
    np.testing.assert_allclose(solution.weights, 0.5)
    assert "2 clients" in caplog.text


@pytest.mark.parametrize(
    ("gram", "bounds", "message"),
    [
        (np.ones((2, 3)), (0, 1), "square"),
        ([[1, np.nan], [np.nan, 1]], (0, 1), "finite"),
        (np.eye(3), (0.5, 1), "sum to 1"),
        (np.eye(3), (0, 0.2), "sum to 1"),
    ],
)
def test_invalid_problems_are_refused(gram, bounds, message):
    with pytest.raises(ValueError, match=message):
        min_norm_weights(gram, *bounds)


@pytest.mark.parametrize("solver", ["CLARABEL", "OSQP", "SCS"])
def test_a_solution_does_not_depend_on_earlier_problems(solver, monkeypatch):
    monkeypatch.setattr(qp, "SOLVERS", {solver: qp.SOLVERS[solver]})
    random = np.random.default_rng(0)
    grams = [v @ v.T for v in np.abs(random.normal(size=(4, 5, 30)))]
    alone = []
    for gram in grams:
        qp._problem.cache_clear()
        alone.append(min_norm_weights(gram).weights.tobytes())
    in_a_row = [min_norm_weights(gram).weights.tobytes() for gram in (*grams, *grams)]
    assert in_a_row == alone * 2


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 7), st.sampled_from([1e-3, 1.0, 100.0]))
def test_quadratic_weights_match_a_general_solver(seed, size, slope):
    random = np.random.default_rng(seed)
    root, b = random.normal(size=(size, size)), slope * random.normal(size=size)
    A = root @ root.T + 0.5 * np.eye(size)

    def value(w):
        return w @ A @ w / 2 + b @ w

    weights = qp.quadratic_weights(A, b)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    # At a minimum no corner is downhill.
    assert ((A @ weights + b) @ (np.eye(size) - weights).T).min() > -1e-4 * (1 + slope)
    general = minimize(
        value,
        np.full(size, 1 / size),
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )
    assert value(weights) <= general.fun + 1e-6 * (1 + slope)


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_proportional_descent_is_the_shortest_vector_of_the_affine_hull(seed, size):
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(size, 9)) * 10.0 ** random.integers(-3, 4, (size, 1))
    share = random.uniform(0.1, 3, size)
    d = qp.proportional_descent(vectors @ vectors.T, share) @ vectors
    np.testing.assert_allclose(vectors @ d, d @ d * share, rtol=1e-5)
    hull = vectors / share[:, None]
    others = random.normal(size=(50, size))
    others /= others.sum(axis=1, keepdims=True)
    assert np.linalg.norm(d) <= np.linalg.norm(others @ hull, axis=1).min() * (1 + 1e-9)


def test_zero_vectors_have_coefficient_0_in_proportional_descent():
    gram = np.diag([1.0, 0.0, 4.0])
    np.testing.assert_allclose(qp.proportional_descent(gram, [1, 5, 1]), [0.8, 0, 0.2])
    np.testing.assert_array_equal(qp.proportional_descent(gram, [0, 5, 0]), 0)
