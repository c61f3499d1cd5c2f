"""Bounds on a client's influence on the model: caps on its weight and on its update's norm.

Fair strategies give more weight to clients that report a large loss, so a client that lies, or
whose training diverged, could take over the model. These bounds work with every strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.numerics import Vector


def clip_updates(
    cohort: Cohort, max_norm: float | None = None, median: float | None = None
) -> tuple[Cohort, Vector]:
    """Scale down updates that exceed a bound; return the cohort and the factors, shape (K,).

    ``max_norm`` caps an update's norm in the units of the parameters, and ``median`` as a multiple
    of the (lower) median norm of all non-zero updates. The same cohort is returned if no update is
    too long. Parameters and BatchNorm statistics are bounded separately. The smaller of the two
    factors is applied to both, so that a client's model stays between the received and the returned
    model. Counters are unchanged.
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


def clip_cohort(
    cohort: Cohort, exchanges: Sequence[Exchange], max_norm: float | None, median: float | None
) -> tuple[Cohort, Vector | None]:
    """Clip a cohort's updates and, if ``median`` is given, its arrays for exchanges.

    Returns the cohort and the updates' factors, shape (K,), or None if there are no bounds.
    """
    if max_norm is None and median is None:
        return cohort, None
    cohort, factors = clip_updates(cohort, max_norm, median)
    if median is None:
        return cohort, factors
    bounded = {
        e.name: tuple(e.bound(cohort.measured[e.name], median)) for e in exchanges if e.returned
    }
    return replace(cohort, measured={**cohort.measured, **bounded}), factors
