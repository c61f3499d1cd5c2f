"""What rules share that look for a direction in the span of the clients' updates.

They work on the updates' Gram matrix, give each update a coefficient, and touch the model
once, at the end (`Cohort.move`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import acos, degrees, sqrt

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.errors import renamed

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

#: Of the mean length: a shorter point of the updates' hull is 0 up to the solvers' rounding.
STATIONARY = 1e-4


def with_absent_clients(
    cohort: Cohort, seen: Mapping[int, int], memory: Mapping[int, Arrays], oldest: int
) -> tuple[Cohort, NDArray[np.int64]]:
    """Put clients that sit out behind the cohort, as if they moved as they did last.

    ``memory`` has the parameters' updates by client, ``seen`` the rounds that they are from. The M
    models of the cohort that comes back are the cohort's K, in their order, and those of absent
    clients that were seen ``oldest`` rounds ago or later, by their ids; the rest of it is the
    cohort's. Beside it, shape (M,), how many rounds ago each was seen; 0 for the cohort's own.
    """
    now, present = cohort.server_round, set(cohort.client_ids)
    absent = [k for k in sorted(memory) if k not in present and now - seen[k] <= oldest]
    ages = np.array([0] * len(cohort) + [now - seen[k] for k in absent])
    recalled = [
        {n: a + memory[k][n] if n in memory[k] else a for n, a in cohort.received.items()}
        for k in absent
    ]
    return replace(cohort, returned=(*cohort.returned, *recalled)), ages


def store_updates(cohort: Cohort, seen: dict[int, int], memory: dict[int, Arrays]) -> None:
    """Keep this round's updates for `with_absent_clients`."""
    for k, client in enumerate(cohort.client_ids):
        returned, received = cohort.returned[k], cohort.received
        memory[client] = {n: returned[n] - received[n] for n in cohort.parameters}
        seen[client] = cohort.server_round


def inequality_gradient(losses: Vector) -> Vector:
    """Find how much more unequal the losses get as each of them rises, shape (K,).

    The gradient of -cos(1, F) with respect to the losses F, positive for those that are too
    large: ((sum F / ||F||^2) F - 1) / (||1|| ||F||). Zero where all are equal.

    >>> inequality_gradient(np.array([3.0, 1.0])).round(4).tolist()
    [0.0447, -0.1342]
    """
    F = np.maximum(losses, 0)
    if F.max() == F.min():
        return np.zeros(len(F))
    largest = F.max()
    F = F / largest  # so that no square overflows
    return np.asarray((F * (F.sum() / (F @ F)) - 1) / sqrt(len(F) * float(F @ F)) / largest)


def inequality_angle(losses: Vector) -> float:
    """The angle between losses and (1, ..., 1), in degrees: how unequal they are.

    >>> round(inequality_angle(np.array([3.0, 1.0])), 2), inequality_angle(np.zeros(2))
    (26.57, 0.0)
    """
    F = np.maximum(losses, 0)
    F = F / F.max() if F.any() else np.ones(len(F))
    return degrees(acos(min(float(F.sum()) / sqrt(len(F) * float(F @ F)), 1.0)))


def rescale_to_length(c: Vector, gram: Matrix, like: Vector) -> Vector:
    """The direction with coefficients ``c``, as long as that with coefficients ``like``."""
    before, after = float(like @ gram @ like), float(c @ gram @ c)
    return c * sqrt(before / after) if after > 0 else np.zeros_like(c)


__getattr__ = renamed(
    __name__,
    angle="inequality_angle",
    equalising="inequality_gradient",
    recall="with_absent_clients",
    remember="store_updates",
    stretched="rescale_to_length",
)
