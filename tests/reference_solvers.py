"""General solvers on the simplex, as references for specialized solvers."""

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
