"""Weights that clients keep from round to round, when not all of them take part in each.

The papers' rules carry on one weight per client of a fixed group. Here the clients that
are present share out among themselves what they hold together; those that are absent
keep theirs. Held is a multiple of a client's fair share (``fair``: equal parts, or its
examples), so a client never seen before holds 1.

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
    """What the clients that are present hold, normalised, shape (K,).

    Their ``fair`` shares, shape (K,), are positive, up to a common factor. Clients that hold
    nothing together start anew.
    """
    units = _unnormalized_weights(held, clients, fair)
    return np.asarray(units / units.sum())


def store_weights(
    held: dict[int, float], clients: Sequence[int], fair: Vector, weights: Vector
) -> None:
    """Let the clients hold ``weights``, shape (K,) on the simplex, of what they held together."""
    mass = _unnormalized_weights(held, clients, fair).sum()
    held.update(zip(clients, (weights * mass / fair).tolist(), strict=True))


def _unnormalized_weights(held: dict[int, float], clients: Sequence[int], fair: Vector) -> Vector:
    units = fair * np.array([held.get(client, 1.0) for client in clients])
    return units if units.sum() > 0 else fair


__getattr__ = renamed(__name__, shares="current_weights", hold="store_weights")
