"""Bounds on a client's influence on the model: caps on its weight and on its update's norm.

Fair strategies give more weight to clients that report a large loss, so a client that lies, or
whose training diverged, could take over the model. These bounds work with every strategy.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from fairflower.numerics import Vector

if TYPE_CHECKING:
    from fairflower.aggregation.cohort import Cohort


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


def clip_updates(
    cohort: Cohort, max_norm: float | None = None, median: float | None = None
) -> tuple[Cohort, Vector]:
    """Scale down updates that exceed a bound; return the cohort and the factors, shape (K,).

    Parameters
    ----------
    cohort : Cohort
        The clients' models. The same object is returned if no update is too long.
    max_norm : float, optional
        Cap on an update's norm, in the units of the parameters.
    median : float, optional
        Cap on the norm as a multiple of the (lower) median norm of all non-zero updates.

    Notes
    -----
    Parameters and BatchNorm statistics are bounded separately. The smaller of the two factors is
    applied to both, so that a client's model stays between the received and the returned model.
    Counters are unchanged.
    """
    statistics = [name for name in cohort.floats if name in cohort.buffers]
    factors = np.ones(len(cohort))
    for names in (cohort.parameters, statistics):
        norms = np.sqrt(cohort.squared_norms(names))
        factors = np.minimum(factors, clip_factors(norms, max_norm, median))
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


def clip_factors(
    norms: Vector, max_norm: float | None = None, median: float | None = None
) -> Vector:
    """Return the factors, shape (K,), that bound vectors of these norms as `clip_updates` does.

    >>> clip_factors(np.array([1.0, 0.0, 3.0, 8.0]), median=2).tolist()
    [1.0, 1.0, 1.0, 0.75]
    """
    bounds = [] if max_norm is None else [max_norm]
    if median is not None and norms.any():
        # One client could choose the mean of the two middle norms, but not the lower one.
        bounds.append(median * median_low(norms[norms > 0].tolist()))
    bound = min(bounds, default=np.inf)
    return np.divide(bound, norms, out=np.ones(len(norms)), where=norms > bound)
