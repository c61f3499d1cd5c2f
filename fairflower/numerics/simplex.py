"""The Euclidean projection onto the simplex."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def project(point: ArrayLike) -> NDArray[np.float64]:
    """Find the nearest weights, shape (K,): non-negative, summing to 1.

    ``max(v - theta, 0)`` with the theta that makes the sum 1; sorting tells which
    coordinates stay positive (Duchi et al., ICML 2008, Fig. 1). ``ValueError`` is
    raised for a point that is not a finite vector of at least one number.

    >>> project([0.5, 0.9, -3.0]).round(4).tolist()
    [0.3, 0.7, 0.0]
    """
    v = np.asarray(point, np.float64)
    if v.ndim != 1 or not v.size or not np.isfinite(v).all():
        raise ValueError(f"Expected a vector of finite numbers to project, got {point!r}.")
    # A common shift changes nothing, and what is 1 below the largest becomes 0 anyhow:
    # so cut, no sum loses precision to huge coordinates.
    v = np.maximum(v - v.max(), -1)
    u = np.sort(v)[::-1]
    theta = (u.cumsum() - 1) / np.arange(1, len(u) + 1)
    w = np.maximum(v - theta[np.flatnonzero(u > theta)[-1]], 0)
    return np.asarray(w / w.sum())
