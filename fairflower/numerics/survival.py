"""Scores of survival models, concordance and the integrated Brier score; cuts of their times.

``time`` [N] is when an event or the end of an observation was, and ``event`` [N] is True for an
event. At the same time, events come before ends of observations.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import ConfigError, quoted

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def concordance(time: Floats, event: Bools, risk: Floats, weights: Floats | None = None) -> float:
    """Return the fraction of pairs in which the earlier event has the larger risk [N].

    A pair counts if its earlier time is an event's; equal risks count half. With ``weights`` [N], a
    pair has the weight of its earlier event (0 leaves it out). Without, this is the concordance of
    F. Harrell et al. (JAMA 1982). NaN if no pair counts.

    >>> time, event = np.array([1.0, 2.0, 3.0]), np.array([True, False, True])
    >>> concordance(time, event, risk=np.array([0.5, 0.9, 0.1]))
    0.5
    """
    right = pairs = 0.0
    for first in np.flatnonzero(event):
        later = risk[(time > time[first]) | ((time == time[first]) & ~event)]
        weight = 1.0 if weights is None else weights[first]
        right += weight * (np.sum(later < risk[first]) + np.sum(later == risk[first]) / 2)
        pairs += weight * len(later)
    return float(right / pairs) if pairs else math.nan


def uno_concordance(time: Floats, event: Bools, risk: Floats, horizon: float) -> float:
    """Return the concordance of events before the horizon, whatever the censoring.

    H. Uno et al. (Statistics in Medicine 2011): an event's weight is the inverse square of
    `uncensored`, by these examples.
    """
    counted = event & (time < horizon)
    weights = uncensored(time, event, time) ** -2.0
    return concordance(time, event, risk, np.where(counted, weights, 0.0))


def brier(time: Floats, event: Bools, survival: Floats, at: float) -> float:
    """Return the Brier score of the probabilities ``survival`` [N] to survive a time.

    Weights correct for censoring (E. Graf et al., Statistics in Medicine 1999). The time must be
    before the last one of the examples.
    """
    dead, alive = (time <= at) & event, time > at
    after = uncensored(time, event, np.array([np.nextafter(at, np.inf)]))
    weights = np.where(dead, 1 / uncensored(time, event, time), alive / after)
    return float(np.mean(weights * (survival - alive) ** 2))


def integrated_brier(time: Floats, event: Bools, survival: Floats, times: Floats) -> float:
    """Return the mean of `brier` from 0 to the last of ``times`` [J] before all examples' end.

    ``survival`` is [N, J]; between times, the score is interpolated linearly, and it is 0 at time
    0. NaN if there is no event or no such time.
    """
    (known,) = np.nonzero(times < time.max(initial=0))
    if not (event.any() and len(known)):
        return math.nan
    scores = [0.0, *(brier(time, event, survival[:, j], float(times[j])) for j in known)]
    steps = np.array([0.0, *times[known]])
    return float(np.trapezoid(scores, steps) / steps[-1])


def uncensored(time: Floats, event: Bools, at: Floats) -> Floats:
    """Return the Kaplan-Meier estimate that an observation has not ended before times, [len(at)].

    >>> uncensored(np.array([1.0, 2.0, 3.0]), np.array([False, True, True]), np.array([1.0, 2.0]))
    array([1.        , 0.66666667])
    """
    values, which = np.unique(time, return_inverse=True)
    ended = np.bincount(which, ~event, len(values))
    observed = len(time) - np.cumsum(np.bincount(which, minlength=len(values))) + ended
    curve = np.cumprod(1 - ended / np.maximum(observed, 1))
    return np.append(1.0, curve)[np.searchsorted(values, at)]


def propose_cuts(edges: Sequence[float], counts: NDArray[np.int64], intervals: int) -> str:
    """Return cuts for the task survival, with about the same number of events between them.

    Sites agree on the ``edges`` [B + 1] of bins, and count their events in each bin, ``counts``
    [sites, B]. Cuts are the quantiles of all events, with events evenly spread in a bin. Raises
    ``ValueError`` if there are no events.

    >>> propose_cuts([0, 100, 200, 400], np.array([[4, 1, 0], [2, 2, 3]]), intervals=3)
    '66.67;166.7;400'
    """
    total = np.append(0, np.cumsum(np.sum(counts, axis=0)))
    if not total[-1]:
        raise ValueError("counts: found no events; expected at least one.")
    wanted = total[-1] * np.arange(1, intervals + 1) / intervals
    found = np.interp(wanted, total, edges)
    found[-1] = edges[np.searchsorted(total, total[-1])]  # not the end of empty bins
    return ";".join(dict.fromkeys(f"{cut:.4g}" for cut in found))


def read_cuts(cuts: str) -> Floats:
    """Return the numbers in a text; raise ``ConfigError`` unless they increase from above 0."""
    try:
        numbers = np.array([float(text) for text in cuts.split(";")])
    except ValueError:
        numbers = np.zeros(1)
    if not (np.isfinite(numbers).all() and (np.diff(numbers, prepend=0) > 0).all()):
        raise ConfigError(
            f"cuts = {quoted(cuts)}: expected increasing numbers above 0, separated by semicolons, "
            "such as 90;180;360."
        )
    return numbers
