"""The Euclidean projection onto the simplex."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def project(point: ArrayLike) -> NDArray[np.float64]:
    """Return the point of the simplex nearest to ``point``, shape (K,): non-negative, sum 1.

    The projection is ``max(v - theta, 0)``, where theta makes the sum 1. Sorting shows which
    coordinates stay positive (Duchi et al., ICML 2008, Fig. 1).

    Raises
    ------
    ValueError
        If ``point`` is empty, not a vector, or not finite.

    Examples
    --------
    >>> from fairflower.numerics.simplex import project
    >>> project([0.5, 0.9, -3.0]).round(4).tolist()
    [0.3, 0.7, 0.0]
    """
    v = np.asarray(point, np.float64)
    if v.ndim != 1 or not v.size or not np.isfinite(v).all():
        raise ValueError(f"Expected a non-empty vector of finite numbers, got {point!r}.")
    # A common shift does not change the projection, and coordinates more than 1 below the largest
    # become 0. Clipping keeps the sums precise for huge coordinates.
    v = np.maximum(v - v.max(), -1)
    u = np.sort(v)[::-1]
    theta = (u.cumsum() - 1) / np.arange(1, len(u) + 1)
    w = np.maximum(v - theta[np.flatnonzero(u > theta)[-1]], 0)
    return np.asarray(w / w.sum())
