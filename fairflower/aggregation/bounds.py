"""Bounds on what one client can do to the model, whatever the rule.

A fair rule gives weight to whoever is served badly, and learns that from the clients.
One that lies, or whose training exploded, can so take the model over. Two bounds hold
against that: no weight above a cap, and no update longer than some length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fairflower.aggregation.cohort import Cohort

Vector = NDArray[np.float64]


def cap_weights(weights: Vector, cap: float) -> Vector:
    """Weights of at most ``cap``; what is above goes to the others in proportion to theirs.

    All K are non-negative and sum to 1, before and after. The same object comes back where
    none is above the cap; ``ValueError`` is raised for one below 1 / K.

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
        if not rest.any():  # nobody else had any: equally
            rest = np.where(capped, 0.0, 1.0)
        rest /= rest.max()
        shared = np.where(capped, cap, (1 - cap * int(capped.sum())) * rest / rest.sum())
    return shared.clip(0)


def clip_updates(
    cohort: Cohort, norm: float | None = None, median: float | None = None
) -> tuple[Cohort, Vector]:
    """Scale updates down that are longer than a bound; and tell by what, shape (K,).

    ``norm`` is the longest update in the parameters' own units, ``median`` as a multiple of
    the median length of those that moved (the lower median, if they are even in number).
    The parameters are one vector and the BatchNorm statistics another, each with its
    own length; a client's update of both is multiplied by the smaller of their factors,
    so its model stays between the received and the returned one. Counters stay as they are.
    The same cohort comes back where nothing is too long.
    """
    statistics = [name for name in cohort.floats if name in cohort.buffers]
    factors = np.ones(len(cohort))
    for names in (cohort.parameters, statistics):
        lengths = np.sqrt(cohort.squared_norms(names))
        factors = np.minimum(factors, clip_factors(lengths, norm, median))
    if factors.min() == 1:
        return cohort, factors
    returned = list(cohort.returned)
    for k in np.flatnonzero(factors < 1):
        returned[k] = dict(returned[k])
        for name in cohort.floats:
            received = cohort.received[name]
            # In double precision, where no difference of two numbers overflows.
            update = returned[k][name].astype(np.float64) - received
            returned[k][name] = (received + factors[k] * update).astype(received.dtype)
    return replace(cohort, returned=tuple(returned)), factors


def clip_factors(lengths: Vector, norm: float | None = None, median: float | None = None) -> Vector:
    """What to multiply vectors of these lengths by, so that none is over ``clip_updates``' bounds.

    >>> clip_factors(np.array([1.0, 0.0, 3.0, 8.0]), median=2).tolist()
    [1.0, 1.0, 1.0, 0.75]
    """
    bounds = [] if norm is None else [norm]
    if median is not None and lengths.any():
        moved = np.sort(lengths[lengths > 0])
        # The lower one of two: the mean of the middle ones would be one client's to choose.
        bounds.append(median * float(moved[(len(moved) - 1) // 2]))
    longest = min(bounds, default=np.inf)
    return np.divide(longest, lengths, out=np.ones(len(lengths)), where=lengths > longest)
