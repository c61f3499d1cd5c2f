"""Clients' weights, non-negative with sum 1: projected, capped, and kept from round to round."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairflower.numerics import Vector


def on_simplex(weights: NDArray[np.float64]) -> bool:
    """Return whether weights are non-negative with sum 1; False if any is NaN."""
    return bool(weights.min() >= 0 and abs(weights.sum() - 1) < 1e-6)


def project(point: ArrayLike) -> NDArray[np.float64]:
    """Return the point of the simplex nearest to ``point``, shape (K,): non-negative, sum 1.

    The projection is ``max(v - theta, 0)``, where theta makes the sum 1. Sorting shows which
    coordinates stay positive (Duchi et al., ICML 2008, Fig. 1).

    Raises ``ValueError`` if ``point`` is empty, not a vector, or not finite.

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


def cap_weights(weights: Vector, cap: float) -> Vector:
    """Cap weights; the other clients share the excess in proportion to their weights.

    ``weights``, shape (K,), are non-negative with sum 1, as is the result; the same object is
    returned if no weight is above the cap. Raises ``ValueError`` if the cap is below 1 / K.

    >>> cap_weights(np.array([0.7, 0.2, 0.1]), 0.4).round(3).tolist()
    [0.4, 0.4, 0.2]
    """
    if cap * len(weights) < 1 - 1e-9:
        raise ValueError(f"{len(weights)} weights of at most {cap} cannot sum to 1.")
    capped = weights > cap
    if not capped.any():
        return weights
    shared = weights
    while (over := shared > cap * (1 + 1e-12)).any():
        capped |= over
        if capped.all():
            return np.full(len(weights), 1 / len(weights))
        rest = np.where(capped, 0.0, weights)
        if not rest.any():  # all others have weight 0: divide equally
            rest = np.where(capped, 0.0, 1.0)
        rest /= rest.max()
        shared = np.where(capped, cap, (1 - cap * int(capped.sum())) * rest / rest.sum())
    return shared.clip(0)


def softmax(logits: Vector) -> Vector:
    """Return exp(logits), normalized, shape (K,)."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def current_weights(stored: dict[int, float], clients: Sequence[int], fair: Vector) -> Vector:
    """Return the stored weights of a round's clients, normalized, shape (K,).

    ``fair`` contains the clients' fair shares, shape (K,), positive and not necessarily normalized.
    If the stored weights' sum is not positive, the normalized fair shares are returned.
    """
    units = _unnormalized_weights(stored, clients, fair)
    return np.asarray(units / units.sum())


def store_weights(
    stored: dict[int, float], clients: Sequence[int], fair: Vector, weights: Vector
) -> None:
    """Store new ``weights``, shape (K,), for a round's clients; their stored sum is unchanged.

    In the papers all clients take part in every round. Here only the weights of a round's clients
    change. A stored weight is a multiple of the client's fair share (``fair``: an equal share, or
    its number of examples), so that a new client's weight is 1. If the sum was not positive, it
    becomes that of the fair shares.

    >>> stored = {}
    >>> store_weights(stored, (0, 1), np.ones(2), np.array([0.9, 0.1]))
    >>> stored
    {0: 1.8, 1: 0.2}
    >>> current_weights(stored, (1, 7), np.ones(2)).round(4).tolist()
    [0.1667, 0.8333]
    """
    mass = _unnormalized_weights(stored, clients, fair).sum()
    stored.update(zip(clients, (weights * mass / fair).tolist(), strict=True))


def _unnormalized_weights(stored: dict[int, float], clients: Sequence[int], fair: Vector) -> Vector:
    units = fair * np.array([stored.get(client, 1.0) for client in clients])
    return units if units.sum() > 0 else fair
