"""The smallest vector in the convex hull of K vectors: the QP of every method here.

    min_w ||sum_k w_k v_k||^2 = w' G w    s.t.  sum w = 1,  lower <= w <= upper

G is the K x K Gram matrix, so the size of the problem is the number of clients,
whatever the length of the vectors (Desideri 2012, MGDA).
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairflower.errors import logger, require
from fairflower.numerics.threads import one_thread

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

#: In the order in which they are tried (benchmarks/qp.py). Clarabel, an interior-point
#: method, gives identical clients identical weights. scipy's active-set NNLS is faster
#: and masters lengths that differ by nine orders of magnitude, but gives all of what
#: identical clients share to one of them, and knows no bounds.
SOLVERS = ("CLARABEL", "NNLS", "OSQP", "SCS")

#: A solution with a larger residual is left to the next solver.
TOLERANCE = 1e-6

#: Eigenvalues of unit vectors' Gram matrices below it are 0 but for rounding.
RANK = 1e-8


class MinNorm(NamedTuple):
    """Solution of the QP."""

    #: Shape (K,), on the simplex, within the bounds.
    weights: Vector
    #: ||sum_k w_k v_k||, not squared.
    norm: float
    #: How far from optimal at most: w'Gw exceeds its minimum by no more than ``residual``
    #: times ``scale``, the square norm of the best simple mixture (a client alone as far as
    #: the bounds allow, or all alike). Zero at the optimum.
    residual: float
    #: Who solved it, ``"uniform"`` if nobody could.
    solver: str


def min_norm_weights(
    gram: ArrayLike, lower: float | ArrayLike = 0.0, upper: float | ArrayLike = 1.0
) -> MinNorm:
    """Weights of the smallest combination of vectors with Gram matrix ``gram``.

    Parameters
    ----------
    gram : array of shape (K, K)
        Inner products <v_i, v_j>, in double precision.
    lower, upper : float or array of shape (K,)
        Bounds of each weight.

    Returns
    -------
    MinNorm
        Never raises for a hard problem: if all solvers fail, the feasible weights
        nearest to uniform, with a warning.

    Raises
    ------
    ValueError
        If ``gram`` is not a finite square matrix, or no weights fit the bounds.
    NotInstalled
        Without the extra ``solvers``.

    Examples
    --------
    >>> solution = min_norm_weights([[1.0, 0.0], [0.0, 4.0]])  # orthogonal: w ~ 1 / |v|^2
    >>> solution.weights.round(3).tolist(), round(solution.norm, 3)
    ([0.8, 0.2], 0.894)
    """
    require("solvers", "The QP")
    g: Matrix = np.array(gram, np.float64)
    if g.ndim != 2 or g.shape[0] != g.shape[1] or not np.isfinite(g).all():
        raise ValueError(f"Expected a finite square Gram matrix, got shape {g.shape}.")
    size = len(g)
    low = np.broadcast_to(np.asarray(lower, np.float64), size).clip(0, 1)
    high = np.broadcast_to(np.asarray(upper, np.float64), size).clip(0, 1)
    if (low > high).any() or low.sum() > 1 + 1e-9 or high.sum() < 1 - 1e-9:
        raise ValueError(f"No weights with sum 1 lie between {low} and {high}.")

    g = (g + g.T) / 2
    start = _simple_mixtures(g.diagonal(), low, high)
    values = np.einsum("mi,ij,mj->m", start, g, start)
    simple, scale = start[values.argmin()], float(values.min())
    if scale <= 1e-24 * float(np.abs(g).max()):
        return MinNorm(simple, 0.0, 0.0, "closed form")
    scaled = g / scale
    found = MinNorm(simple, sqrt(scale), _residual(scaled, simple, low, high), "uniform")
    for solver in SOLVERS:
        with one_thread():  # the same bits on any number of cores
            weights = _solve(scaled, low, high, solver)
        if weights is None:
            continue
        residual = _residual(scaled, weights, low, high)
        if residual < found.residual or found.solver == "uniform":
            norm = sqrt(max(float(weights @ g @ weights), 0.0))
            found = MinNorm(weights, norm, residual, solver)
        if residual < TOLERANCE:
            return found
    logger.warning(
        "The min-norm QP over %d clients was solved only to a residual of %.1e (%s).",
        size,
        found.residual,
        found.solver,
    )
    return found


def quadratic_weights(matrix: ArrayLike, linear: ArrayLike) -> Vector:
    """Weights w on the simplex, shape (K,), that minimise w'Aw / 2 + b'w.

    As the sum of w is 1, it is the min-norm QP of A + 1b' + b1' + c 11', with the c that makes
    this a Gram matrix. A, shape (K, K), is symmetric and positive definite.

    >>> quadratic_weights([[2.0, 0.0], [0.0, 2.0]], [0.0, 1.0]).round(3).tolist()
    [0.75, 0.25]
    """
    A, b = np.asarray(matrix, np.float64), np.asarray(linear, np.float64)
    b = b - b.mean()
    c = float(b @ np.linalg.solve(A, b))
    return min_norm_weights(A + np.add.outer(b, b) + c).weights


def proportional_descent(gram: ArrayLike, share: ArrayLike) -> Vector:
    """Coefficients c of the shortest d = sum_k c_k v_k with <d, v_k> = ||d||^2 share_k for all k.

    It is the shortest vector of the affine hull of v_k / share_k: c = G^-1 share, over
    share' G^-1 share, G being ``gram``, shape (K, K), in double precision. Shares, shape (K,), are
    not negative, and not 0 for all vectors. Where vectors depend on each other so that there is
    none, c makes d as good as 0; vectors that are 0 have no part in it.

    >>> proportional_descent([[1.0, 0.0], [0.0, 4.0]], [1.0, 1.0]).round(3).tolist()
    [0.8, 0.2]
    """
    g, f = np.asarray(gram, np.float64), np.asarray(share, np.float64)
    lengths = np.sqrt(g.diagonal())
    moved = np.flatnonzero(lengths > 0)
    coefficients = np.zeros(len(g))
    if not f[moved].any():
        return coefficients
    # For unit vectors, in units of the shortest: so no square over- or underflows.
    ratio = lengths[moved].min() / lengths[moved]
    target = ratio * f[moved]
    with one_thread():
        values, vectors = np.linalg.eigh(cosines(g)[np.ix_(moved, moved)])
        a = vectors @ ((target @ vectors) / np.maximum(values, RANK))
    coefficients[moved] = ratio * a / (target @ a)
    return coefficients


def cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cosine between each two vectors, shape (K, K); 0 where one of them is 0."""
    lengths = np.sqrt(gram.diagonal())
    scale = np.where(lengths > 0, lengths, 1)
    return np.asarray(gram / np.outer(scale, scale))


def _simple_mixtures(squares: Vector, low: Vector, high: Vector) -> Matrix:
    """Feasible weights to begin with, one row each: as even as allowed, one client each.

    Where vectors are zero, all such alike comes first: it is optimal.
    """
    uniform = np.full(len(low), 1 / len(low))
    room = high - low
    even = low + room * ((1 - low.sum()) / max(float(room.sum()), 1e-300))
    zero = (squares <= 0) / max(int((squares <= 0).sum()), 1)
    mixtures = [m for m in (zero, uniform, even) if m.any() and ((low <= m) & (m <= high)).all()]
    for i in range(len(low)):
        mixtures.append(_fill(low, high, np.argsort(np.arange(len(low)) != i, kind="stable")))
    return np.array(mixtures)


def _fill(low: Vector, high: Vector, order: NDArray[np.int64]) -> Vector:
    """The weights that give as much as possible to the clients that come first."""
    weights = low.copy()
    left = 1 - low.sum()
    for i in order.tolist():
        step = min(high[i] - low[i], left)
        weights[i] += step
        left -= step
    return np.asarray(weights)


def _residual(gram: Matrix, weights: Vector, low: Vector, high: Vector) -> float:
    """Frank-Wolfe gap: what moving towards the best corner could gain; zero iff optimal."""
    slope = gram @ weights
    corner = _fill(low, high, np.argsort(slope, kind="stable"))
    return max(float(slope @ (weights - corner)), 0.0)


def _solve(gram: Matrix, low: Vector, high: Vector, solver: str) -> Vector | None:
    """Weights by one solver, None if it fails or does not know bounds."""
    # In units v_i = s_i w_i every vector has unit length (at most), which keeps
    # clients of very different scale within the solvers' tolerances.
    s = np.maximum(np.sqrt(gram.diagonal().clip(0)), 1e-6)
    values, vectors = np.linalg.eigh(gram / np.outer(s, s))
    factor: Matrix = (vectors * np.sqrt(values.clip(0))).T
    if solver == "NNLS":
        return None if low.any() or (high < 1).any() else _nnls(factor, s)
    return _cvxpy(factor, s, low, high, solver)


def _nnls(factor: Matrix, s: Vector) -> Vector | None:
    """Minimise |F v|^2 + (v / s - 1)^2 over v >= 0: by homogeneity the QP's v, up to scale."""
    from scipy.optimize import nnls  # late, like cvxpy: seconds to import

    system = np.vstack([factor, 1 / s])
    goal = np.append(np.zeros(len(s)), 1.0)
    try:
        v, _ = nnls(system, goal, maxiter=100 * len(s))
    except RuntimeError:
        return None
    weights = v / s
    return np.asarray(weights / weights.sum()) if weights.sum() > 0 else None


def _cvxpy(factor: Matrix, s: Vector, low: Vector, high: Vector, solver: str) -> Vector | None:
    import cvxpy as cp  # late: slow to import, and only the methods with a QP need it

    problem = _problem(len(s))
    data = {"factor": factor, "inverse": 1 / s, "low": low * s, "high": high * s}
    for name, values in data.items():
        problem.param_dict[name].value = values
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inaccurate solutions are judged by their residual
            # A warm start would let the last bits depend on what was solved before.
            problem.solve(solver=solver, warm_start=False, **_OPTIONS[solver])
    except (cp.error.SolverError, ValueError, ArithmeticError):
        return None
    v = problem.var_dict["v"].value
    if v is None or not np.isfinite(v).all():
        return None
    weights = (v / s).clip(low, high)
    return _onto_simplex(weights, low, high)


def _onto_simplex(weights: Vector, low: Vector, high: Vector) -> Vector:
    """Take away the solver's rounding: exact sum, within the bounds."""
    for _ in range(3):
        free = (weights > low) & (weights < high)
        excess = weights.sum() - 1
        if not free.any() or abs(excess) < 1e-15:
            break
        weights[free] -= excess * weights[free] / weights[free].sum()
        weights = weights.clip(low, high)
    return weights


@lru_cache(maxsize=8)
def _problem(size: int) -> Any:
    """The QP for K clients with its data as parameters: cvxpy compiles it once."""
    import cvxpy as cp

    v = cp.Variable(size, name="v")
    factor = cp.Parameter((size, size), name="factor")
    inverse, low, high = (cp.Parameter(size, name=name) for name in ("inverse", "low", "high"))
    constraints = [inverse @ v == 1, v >= low, v <= high]
    squares = cp.sum_squares(factor @ v)  # type: ignore[attr-defined]
    return cp.Problem(cp.Minimize(squares), constraints)


_OPTIONS: dict[str, dict[str, Any]] = {
    "CLARABEL": {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11},
    "OSQP": {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iter": 20_000},
    "SCS": {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iters": 20_000},
}
