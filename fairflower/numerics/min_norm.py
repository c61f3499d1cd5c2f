"""The shortest vector in the convex hull of K vectors: a quadratic program that many methods solve.

    min_w ||sum_k w_k v_k||^2 = w' G w    s.t.  sum w = 1,  lower <= w <= upper

G is the K x K Gram matrix, so the size of the problem is the number of clients and does not depend
on the dimension of the vectors (Desideri 2012, MGDA).
"""

import warnings
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairflower.errors import logger, require
from fairflower.numerics import Matrix, Vector
from fairflower.numerics.threads import one_thread

#: Solvers, in the order in which they are tried (benchmarks/qp.py), with cvxpy's options. Clarabel,
#: an interior-point method, gives identical clients weights that agree to six digits. scipy's
#: active-set NNLS is faster and handles norms that differ by nine orders of magnitude. But it gives
#: the whole weight of several identical clients to one of them, and it does not support bounds.
SOLVERS: dict[str, dict[str, Any]] = {
    "CLARABEL": {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11},
    "NNLS": {},
    "OSQP": {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iter": 20_000},
    "SCS": {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iters": 20_000},
}

#: Maximum residual of an accepted solution. If the residual is larger, the next solver is tried.
TOLERANCE = 1e-6

#: Eigenvalues below this value count as 0 in Gram matrices of unit vectors.
RANK = 1e-8


class MinNorm(NamedTuple):
    """Solution of the quadratic program."""

    #: Shape (K,), on the simplex, within the bounds.
    weights: Vector
    #: ||sum_k w_k v_k||, not squared.
    norm: float
    #: Error bound: w'Gw exceeds its minimum by at most ``residual`` times the squared norm of the
    #: best initial mixture (a single client as far as the bounds allow, or all clients equally). It
    #: is zero at the optimum.
    residual: float
    #: Name of the solver; ``"closed form"`` if an initial mixture is already zero; ``"uniform"`` if
    #: all solvers failed, so that the weights are the best initial mixture.
    solver: str


def min_norm_weights(
    gram: ArrayLike, lower: float | ArrayLike = 0.0, upper: float | ArrayLike = 1.0
) -> MinNorm:
    """Return the weights of the shortest combination of vectors with Gram matrix ``gram``.

    If all solvers fail, they are the best initial mixture, and a warning is logged. Raises
    ``ValueError`` if ``gram`` is not a finite square matrix, or no weights satisfy the bounds; and
    ``NotInstalled`` without the extra ``solvers``.

    Parameters
    ----------
    gram : array of shape (K, K)
        Inner products <v_i, v_j>, in double precision.
    lower, upper : float or array of shape (K,)
        Bounds on each weight.

    See Also
    --------
    quadratic_weights : Minimizes a general quadratic objective.
    proportional_descent : Returns a step that descends in given proportions.

    Examples
    --------
    >>> solution = min_norm_weights([[1.0, 0.0], [0.0, 4.0]])  # orthogonal: w ~ 1 / |v|^2
    >>> solution.weights.round(3).tolist(), round(solution.norm, 3)
    ([0.8, 0.2], 0.894)
    """
    require("solvers", "The quadratic program")
    g: Matrix = np.array(gram, np.float64)
    if g.ndim != 2 or g.shape[0] != g.shape[1] or not np.isfinite(g).all():
        raise ValueError(f"gram: expected a finite square matrix, got shape {g.shape}.")
    size = len(g)
    low = np.broadcast_to(np.asarray(lower, np.float64), size).clip(0, 1)
    high = np.broadcast_to(np.asarray(upper, np.float64), size).clip(0, 1)
    if (low > high).any() or low.sum() > 1 + 1e-9 or high.sum() < 1 - 1e-9:
        raise ValueError(
            f"lower = {low}, upper = {high}: no weights that sum to 1 satisfy these bounds."
        )

    g = (g + g.T) / 2
    start = _initial_weights(g.diagonal(), low, high)
    values = ((start @ g) * start).sum(axis=1)
    simple, scale = start[values.argmin()], float(values.min())
    rounding = size * np.finfo(np.float64).eps * float(simple @ np.abs(g) @ simple)
    if scale <= rounding:  # the vectors cancel
        return MinNorm(simple, 0.0, 0.0, "closed form")
    scaled = g / scale
    solution = MinNorm(simple, sqrt(scale), _residual(scaled, simple, low, high), "uniform")
    for solver in SOLVERS:
        weights = _solve(scaled, low, high, solver)
        if weights is None:
            continue
        residual = _residual(scaled, weights, low, high)
        better = solution.solver == "uniform" and float(weights @ scaled @ weights) <= 1 + 1e-6
        if residual < solution.residual or better:
            norm = sqrt(max(float(weights @ g @ weights), 0.0))
            solution = MinNorm(weights, norm, residual, solver)
        if residual < TOLERANCE:
            return solution
    logger.warning(
        "The min-norm QP over %d clients was solved only to a residual of %.1e (%s).",
        size,
        solution.residual,
        solution.solver,
    )
    return solution


def quadratic_weights(matrix: ArrayLike, linear: ArrayLike) -> Vector:
    """Return the weights w on the simplex, shape (K,), that minimize w'Aw / 2 + b'w.

    ``matrix`` is A, shape (K, K), symmetric and positive definite, and ``linear`` b, shape (K,).
    Because the weights sum to 1, this is the min-norm problem of A + 1b' + b1' + c 11', where c is
    chosen so that the matrix is a Gram matrix.

    >>> quadratic_weights([[2.0, 0.0], [0.0, 2.0]], [0.0, 1.0]).round(3).tolist()
    [0.75, 0.25]
    """
    A, b = np.asarray(matrix, np.float64), np.asarray(linear, np.float64)
    b = b - b.mean()
    c = float(b @ np.linalg.solve(A, b))
    return min_norm_weights(A + np.add.outer(b, b) + c).weights


def proportional_descent(gram: ArrayLike, share: ArrayLike) -> Vector:
    """Return coefficients c, shape (K,), of the shortest d = sum_k c_k v_k with given descents.

    The descents are <d, v_k> = ||d||^2 share_k for all k. So d is the shortest vector in the affine
    hull of the v_k / share_k, and c = G^-1 share / (share' G^-1 share). If d does not exist because
    the vectors are linearly dependent, c gives a d close to 0. Zero vectors have coefficient 0.
    ``gram`` is G, the inner products <v_i, v_j> in double precision, shape (K, K). The shares,
    shape (K,), are non-negative, and positive for at least one vector.

    >>> proportional_descent([[1.0, 0.0], [0.0, 4.0]], [1.0, 1.0]).round(3).tolist()
    [0.8, 0.2]
    """
    g, f = np.asarray(gram, np.float64), np.asarray(share, np.float64)
    norms = np.sqrt(g.diagonal())
    moved = np.flatnonzero(norms > 0)
    coefficients = np.zeros(len(g))
    if not f[moved].any():
        return coefficients
    # Use unit vectors, in units of the shortest vector, so that no square overflows or underflows.
    ratio = norms[moved].min() / norms[moved]
    target = ratio * f[moved]
    values, vectors = np.linalg.eigh(cosines(g)[np.ix_(moved, moved)])
    a = vectors @ ((target @ vectors) / np.maximum(values, RANK))
    coefficients[moved] = ratio * a / (target @ a)
    return coefficients


def cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines between all pairs of vectors, shape (K, K), from their Gram matrix.

    The cosine is 0 if one of the vectors is zero.

    >>> cosines(np.array([[1.0, 1.0], [1.0, 4.0]])).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    norms = np.sqrt(gram.diagonal())
    scale = np.where(norms > 0, norms, 1)
    return np.asarray(gram / np.outer(scale, scale))


def _initial_weights(squares: Vector, low: Vector, high: Vector) -> Matrix:
    """Return feasible weights as rows: equal weights, then the largest weight for each client.

    If there are zero vectors, the first row weights them equally, which is optimal.
    """
    uniform = np.full(len(low), 1 / len(low))
    room = high - low
    even = low + room * ((1 - low.sum()) / max(float(room.sum()), 1e-300))
    zero = (squares <= 0) / max(int((squares <= 0).sum()), 1)
    mixtures = [m for m in (zero, uniform, even) if m.any() and ((low <= m) & (m <= high)).all()]
    for i in range(len(low)):
        order = np.argsort(np.arange(len(low)) != i, kind="stable")
        mixtures.append(_greedy_weights(low, high, order))
    return np.array(mixtures)


def _greedy_weights(low: Vector, high: Vector, order: NDArray[np.int64]) -> Vector:
    """Return feasible weights that are as large as possible for the first clients in ``order``."""
    weights = low.copy()
    left = 1 - low.sum()
    for i in order.tolist():
        step = min(high[i] - low[i], left)
        weights[i] += step
        left -= step
    return np.asarray(weights)


def _residual(gram: Matrix, weights: Vector, low: Vector, high: Vector) -> float:
    """Return the Frank-Wolfe gap: the gain from moving to the best corner, 0 at the optimum."""
    slope = gram @ weights
    corner = _greedy_weights(low, high, np.argsort(slope, kind="stable"))
    return max(float(slope @ (weights - corner)), 0.0)


def _solve(gram: Matrix, low: Vector, high: Vector, solver: str) -> Vector | None:
    """Return a solver's weights, or None if it fails or does not support bounds."""
    # With v_i = s_i w_i, the vectors have at most unit norm. This keeps clients of very different
    # scale within the solvers' tolerances.
    s = np.maximum(np.sqrt(gram.diagonal().clip(0)), 1e-6)
    values, vectors = np.linalg.eigh(gram / np.outer(s, s))
    factor: Matrix = (vectors * np.sqrt(values.clip(0))).T
    if solver == "NNLS":
        return None if low.any() or (high < 1).any() else _nnls(factor, s)
    return _cvxpy(factor, s, low, high, solver)


def _nnls(factor: Matrix, s: Vector) -> Vector | None:
    """Minimize |F v|^2 + (v / s - 1)^2 over v >= 0, which solves the QP up to scale."""
    from scipy.optimize import nnls  # late, like cvxpy: seconds to import

    system = np.vstack([factor, 1 / s])
    goal = np.append(np.zeros(len(s)), 1.0)
    try:
        with one_thread():  # scipy brings libraries of its own
            v, _ = nnls(system, goal, maxiter=100 * len(s))
    except RuntimeError:
        return None
    weights = v / s
    return np.asarray(weights / weights.sum()) if weights.sum() > 0 else None


def _cvxpy(factor: Matrix, s: Vector, low: Vector, high: Vector, solver: str) -> Vector | None:
    import cvxpy as cp  # late: slow to import, and needed only by methods with a QP

    problem = _problem(len(s))
    data = {"factor": factor, "inverse": 1 / s, "low": low * s, "high": high * s}
    for name, values in data.items():
        problem.param_dict[name].value = values
    try:
        with one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inaccurate solutions are judged by their residual
            # With a warm start, the last bits would depend on the previous problem.
            problem.solve(solver=solver, warm_start=False, **SOLVERS[solver])
    except (cp.error.SolverError, ValueError, ArithmeticError):
        return None
    v = problem.var_dict["v"].value
    if v is None or not np.isfinite(v).all():
        return None
    weights = (v / s).clip(low, high)
    return _onto_simplex(weights, low, high)


def _onto_simplex(weights: Vector, low: Vector, high: Vector) -> Vector:
    """Remove the solver's rounding errors, so that weights sum to 1 and are within the bounds."""
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
    """Return the QP for K clients. Its data are parameters, so that cvxpy compiles it only once."""
    import cvxpy as cp

    v = cp.Variable(size, name="v")
    factor = cp.Parameter((size, size), name="factor")
    inverse, low, high = (cp.Parameter(size, name=name) for name in ("inverse", "low", "high"))
    constraints = [inverse @ v == 1, v >= low, v <= high]
    squares = cp.sum_squares(factor @ v)  # type: ignore[attr-defined]
    return cp.Problem(cp.Minimize(squares), constraints)
