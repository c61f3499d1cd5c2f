"""General solvers on the simplex, as references for specialized solvers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize


def smallest(objective: Callable[[np.ndarray], float], size: int) -> np.ndarray:
    """Return the point of the simplex that minimizes an objective."""
    return minimize(
        objective,
        np.full(size, 1 / size),
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-16, "maxiter": 1000},
    ).x


def shortest(vectors: np.ndarray) -> np.ndarray:
    """Return the shortest vector of a convex hull."""
    scaled = vectors / np.linalg.norm(vectors, axis=1).min()
    return np.asarray(smallest(lambda w: w @ scaled @ scaled.T @ w, len(vectors)) @ vectors)
