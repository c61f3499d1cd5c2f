"""Clients' weights that a strategy keeps from round to round, with partial participation.

In the papers all clients take part in every round. Here only the weights of a round's clients
change, and their sum is kept. A stored weight is a multiple of the client's fair share (``fair``:
an equal share, or its number of examples), so that a new client's weight is 1.

>>> stored = {}
>>> store_weights(stored, (0, 1), np.ones(2), np.array([0.9, 0.1]))
>>> stored
{0: 1.8, 1: 0.2}
>>> current_weights(stored, (1, 7), np.ones(2)).round(4).tolist()
[0.1667, 0.8333]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairflower.numerics import Vector


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

    If the sum was not positive, it becomes that of their fair shares.
    """
    mass = _unnormalized_weights(stored, clients, fair).sum()
    stored.update(zip(clients, (weights * mass / fair).tolist(), strict=True))


def _unnormalized_weights(stored: dict[int, float], clients: Sequence[int], fair: Vector) -> Vector:
    units = fair * np.array([stored.get(client, 1.0) for client in clients])
    return units if units.sum() > 0 else fair
