"""Functions for strategies that seek a direction in the span of the clients' updates.

These strategies compute a coefficient per update from the updates' Gram matrix, and change the
model once, with `Cohort.move`.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import acos, degrees, sqrt

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.numerics import Matrix, Vector

#: Norm below which the shortest vector in a hull counts as 0, in units of the updates' mean
#: norm (in FedLF's paper variant: of the shortest update).
STATIONARY = 1e-4


def with_absent_clients(
    cohort: Cohort, memory: Mapping[int, Arrays], last: Mapping[int, int], oldest: int
) -> tuple[Cohort, NDArray[np.int64]]:
    """Append absent clients to a cohort, each with the last update that it sent.

    Returns the cohort with M models, the round's K clients first, then absent clients by id; and
    the age of each update in rounds, shape (M,), 0 for the round's clients and at most ``oldest``.
    ``memory`` has the update of each client's parameters (`store_updates`), and ``last`` the round
    in which the client was merged last (``FairStrategy.merged_rounds``, which ``aggregate_train``
    notes: a strategy whose ``merge`` alone is called knows no absent clients).
    """
    age = {k: cohort.server_round - last.get(k, 0) for k in memory.keys() - set(cohort.client_ids)}
    absent = [k for k in sorted(age) if age[k] <= oldest]
    ages = np.array([0] * len(cohort) + [age[k] for k in absent])
    recalled = [
        {n: a + memory[k][n] if n in memory[k] else a for n, a in cohort.received.items()}
        for k in absent
    ]
    return replace(cohort, returned=(*cohort.returned, *recalled)), ages


def store_updates(cohort: Cohort, memory: dict[int, Arrays]) -> None:
    """Store this round's updates for `with_absent_clients`."""
    for k, client in enumerate(cohort.client_ids):
        returned, received = cohort.returned[k], cohort.received
        memory[client] = {n: returned[n] - received[n] for n in cohort.parameters}


def inequality_gradient(losses: Vector) -> Vector:
    """Return the gradient of the losses' inequality -cos(1, F) with respect to F, shape (K,).

    The gradient is ((sum F / ||F||^2) F - 1) / (||1|| ||F||): positive for large losses, negative
    for small losses, and zero if all losses are equal.

    >>> inequality_gradient(np.array([3.0, 1.0])).round(4).tolist()
    [0.0447, -0.1342]
    """
    F = np.maximum(losses, 0)
    if F.max() == F.min():
        return np.zeros(len(F))
    largest = F.max()
    F = F / largest  # squares must not overflow
    return np.asarray((F * (F.sum() / (F @ F)) - 1) / sqrt(len(F) * float(F @ F)) / largest)


def inequality_angle(losses: Vector) -> float:
    """Return the angle between losses and (1, ..., 1), in degrees; 0 if all are equal.

    >>> round(inequality_angle(np.array([3.0, 1.0])), 2), inequality_angle(np.zeros(2))
    (26.57, 0.0)
    """
    F = np.maximum(losses, 0)
    F = F / F.max() if F.any() else np.ones(len(F))
    return degrees(acos(min(float(F.sum()) / sqrt(len(F) * float(F @ F)), 1.0)))


def rescale_to_norm(c: Vector, gram: Matrix, like: Vector) -> Vector:
    """Return coefficients ``c``, scaled so that their step is as long as that of ``like``, (K,).

    If the step of ``c`` is shorter than `STATIONARY` times the norms that cancel in it, its
    direction is rounding noise, and the result is zero.
    """
    before, after = float(like @ gram @ like), float(c @ gram @ c)
    canceled = float(np.square(c) @ gram.diagonal())
    return c * sqrt(before / after) if after > STATIONARY**2 * canceled else np.zeros_like(c)
