"""Clients' weights that a strategy keeps from round to round, with partial participation.

The papers keep a weight for each client of a fixed group. Here the clients of a round divide the
sum of their weights; absent clients keep their weights. A stored weight is a multiple of the
client's fair share (``fair``: equal parts, or its examples), so a new client's weight is 1.

>>> held = {}
>>> store_weights(held, (0, 1), np.ones(2), np.array([0.9, 0.1]))
>>> held
{0: 1.8, 1: 0.2}
>>> current_weights(held, (1, 7), np.ones(2)).round(4).tolist()
[0.1667, 0.8333]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import renamed

Vector = NDArray[np.float64]


def current_weights(held: dict[int, float], clients: Sequence[int], fair: Vector) -> Vector:
    """Return the stored weights of a round's clients, normalized, shape (K,).

    ``fair`` has the clients' fair shares, shape (K,), positive, up to a common factor. If all
    stored weights are 0, the fair shares are returned.
    """
    units = _unnormalized_weights(held, clients, fair)
    return np.asarray(units / units.sum())


def store_weights(
    held: dict[int, float], clients: Sequence[int], fair: Vector, weights: Vector
) -> None:
    """Store new ``weights`` of a round's clients, shape (K,); the sum of their weights is kept."""
    mass = _unnormalized_weights(held, clients, fair).sum()
    held.update(zip(clients, (weights * mass / fair).tolist(), strict=True))


def _unnormalized_weights(held: dict[int, float], clients: Sequence[int], fair: Vector) -> Vector:
    units = fair * np.array([held.get(client, 1.0) for client in clients])
    return units if units.sum() > 0 else fair


__getattr__ = renamed(__name__, shares="current_weights", hold="store_weights")
