"""General solvers, as references for specialized solvers and closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize


def minimize_on_simplex(objective: Callable[[np.ndarray], float], size: int) -> np.ndarray:
    """Return the point of the simplex that minimizes an objective."""
    return minimize(
        objective,
        np.full(size, 1 / size),
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-16, "maxiter": 1000},
    ).x


def min_norm_point(vectors: np.ndarray) -> np.ndarray:
    """Return the shortest vector of a convex hull."""
    scaled = vectors / np.linalg.norm(vectors, axis=1).min()
    return np.asarray(
        minimize_on_simplex(lambda w: w @ scaled @ scaled.T @ w, len(vectors)) @ vectors
    )


def shortened(update: np.ndarray, middle: np.ndarray, norm: float) -> np.ndarray:
    """Return the point nearest to ``update``, on its line to ``middle``, that has this norm.

    This is the recovery of FairRFL, by bisection. The result is ``middle`` if all points are
    longer.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        b = (low + high) / 2
        longer = np.linalg.norm(b * update + (1 - b) * middle) > norm
        low, high = (low, b) if longer else (b, high)
    return low * update + (1 - low) * middle
