"""Clusters of clients by what they say of their type, of the same names every round.

Few clients (K of about 20) say it in many numbers (d = 768), some with a handful of images
and some with thousands; some clusters have a single client, and how many there are may be
unknown. What is done here did best in ``benchmarks/clusters.py``:

- A client of n images weighs n / (n + 100). Its vector, a mean over them, is off by
  chance, with a variance in proportion to 1 / n, and by what its type does not fix.
- T centres differ in T - 1 directions, so vectors are projected on as many principal axes.
- There k-means finds the clusters: a Gaussian mixture whose components share one small
  variance. scikit-learn's mixtures know no weights, and a covariance of its own for every
  component, their default, cannot be estimated from a client or two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Vectors = NDArray[np.float64]
Labels = NDArray[np.int64]

_STARTS = 10
#: With how many images chance moves a vector as far as whatever else does: about ten of
#: each class. With fewer than that a client often lacks classes, too.
_ENOUGH = 100
#: Most clusters that are looked for when their number is not given.
_MOST = 10


class Clusters(NamedTuple):
    """Who belongs together.

    Attributes
    ----------
    ids : ndarray of shape (K,)
        The cluster of each client of the cohort.
    members : dict of int -> int
        Client -> its cluster in the last round that it took part in.
    centres : dict of int -> ndarray of shape (d,)
        Cluster -> mean of its clients' vectors, in the last round that it had any; of
        those clusters that are somebody's.
    bic : float
        See `bic`; the lower, the better.
    """

    ids: Labels
    members: dict[int, int]
    centres: dict[int, Vectors]
    bic: float


def cluster(
    h: Vectors,
    clients: Sequence[int],
    number: int | None = None,
    *,
    sizes: Vectors | None = None,
    members: Mapping[int, int] | None = None,
    centres: Mapping[int, Vectors] | None = None,
    seed: int = 0,
) -> Clusters:
    """Cluster clients, and keep the names that clusters had before.

    Parameters
    ----------
    h : ndarray of shape (K, d)
        A vector per client.
    clients : sequence of K ints
        Their ids.
    number : int, optional
        How many clusters there are; fewer come out where fewer vectors differ. None: as
        many, up to 10 and half the clients, as have the least `bic`.
    sizes : ndarray of shape (K,), optional
        How many images each vector is the mean of; default: of as many as any other.
    members, centres : dict, optional
        Of the round before.
    seed : int
        Of the starting points.
    """
    members, centres = dict(members or {}), dict(centres or {})
    weights = _weights(sizes, len(h))
    labels = _labels(h, weights, number, seed)
    ids = _named(labels, h, clients, number, members, centres)
    members.update(zip(clients, ids.tolist(), strict=True))
    centres.update({int(g): h[ids == g].mean(axis=0) for g in np.unique(ids)})
    # A cluster whose clients have all gone to others is none; one whose clients sit out is.
    centres = {g: centre for g, centre in sorted(centres.items()) if g in members.values()}
    return Clusters(ids, members, centres, bic(h, labels, weights))


def describe(h: Vectors, sizes: Vectors, clusters: Clusters) -> dict[str, Vectors | float]:
    """Clusters as diagnostics of a round: who is in which, how many, and a map of clients."""
    east, north = principal(h, 2, _weights(sizes, len(h))).T
    found: dict[str, Vectors | float] = {
        "cluster": clusters.ids.astype(np.float64),
        "num_clusters": float(len(np.unique(clusters.ids))),
        "map_x": east,
        "map_y": north,
    }
    return found | ({"bic": clusters.bic} if np.isfinite(clusters.bic) else {})


def bic(h: Vectors, labels: Labels, weights: Vectors | None = None) -> float:
    """Bayesian information criterion of T clusters of one common, isotropic variance, over d.

    With S the sum of squared distances from the clusters' means::

        BIC / d = K ln(S / (K - T)) + T ln K

    up to a constant; infinite for T = K. It is the criterion's usual form, with the
    unbiased variance S / (d (K - T)) and not the likeliest, S / (d K): that one goes to
    zero with clusters of a client or two, and finds too many of them. So does a mixture's
    own criterion, in the few dimensions that it is fitted in.

    ``weights`` of shape (K,), in S and in the means, are taken to be 1 on average.
    """
    K, T = len(h), len(np.unique(labels))
    if K == T:
        return np.inf
    weights = np.ones(K) if weights is None else weights / weights.mean()
    total = _spread(h, np.zeros(K, np.int64), weights)
    # What is left of a spread by rounding alone counts as nothing.
    spread = max(_spread(h, labels, weights), 1e-9 * total, np.finfo(np.float64).tiny)
    return float(K * np.log(spread / (K - T)) + T * np.log(K))


def principal(h: Vectors, axes: int, weights: Vectors | None = None) -> Vectors:
    """Coordinates on the first principal axes, shape (K, axes); zero where there are fewer.

    An axis points to where its largest entry is positive, so a picture of it does not
    flip from one round to the next without a cause.
    """
    centred = h - np.average(h, axis=0, weights=weights)
    pull = 1 if weights is None else np.sqrt(weights / weights.mean())[:, None]
    with threadpool_limits(1, user_api="blas"):  # the bits do not depend on cores
        right = np.linalg.svd(pull * centred, full_matrices=False)[2]
        signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
        coordinates = centred @ (right * signs[:, None])[:axes].T
    missing = axes - coordinates.shape[1]
    return np.asarray(np.pad(coordinates, ((0, 0), (0, missing))))


def _weights(sizes: Vectors | None, K: int) -> Vectors:
    return np.ones(K) if sizes is None else np.asarray(sizes / (sizes + _ENOUGH))


def _labels(h: Vectors, weights: Vectors, number: int | None, seed: int) -> Labels:
    different = len(np.unique(h, axis=0))
    if number is not None:
        return _divide(h, weights, min(number, different), seed)
    most = max(1, min(_MOST, len(h) // 2, different))
    found = [_divide(h, weights, T, seed) for T in range(1, most + 1)]
    return min(found, key=lambda labels: bic(h, labels, weights))


def _divide(h: Vectors, weights: Vectors, T: int, seed: int) -> Labels:
    """Labels of T clusters on T - 1 principal axes."""
    if T == 1:
        return np.zeros(len(h), np.int64)
    from sklearn.cluster import KMeans

    x = principal(h, T - 1, weights)
    with threadpool_limits(1):  # sums must not depend on the cores
        found = KMeans(T, n_init=_STARTS, random_state=seed).fit(x, sample_weight=weights)
    return np.asarray(found.labels_, np.int64)


def _named(
    labels: Labels,
    h: Vectors,
    clients: Sequence[int],
    number: int | None,
    members: Mapping[int, int],
    centres: Mapping[int, Vectors],
) -> Labels:
    """Labels as ids: a cluster is called as most of its clients' clusters were.

    The names are those that keep as many clients as possible where they were. Where
    clients do not decide, the nearest centres do; a cluster that is nearer to another one
    of this round than to any idle name's centre gets a new name, while there are any.
    """
    from scipy.optimize import linear_sum_assignment

    # In the order of the clients' ids, so that the first names do not depend on k-means.
    first = np.unique(labels, return_index=True)[1]
    new = labels[np.sort(first)]
    means = np.array([h[labels == label].mean(axis=0) for label in new])
    names = sorted(centres)
    most = len(names) + len(new) if number is None else max(number, len(new))
    unused = (name for name in itertools.count() if name not in centres)
    names += itertools.islice(unused, max(0, most - len(names)))
    reach = _smallest_distance(means) / 2
    # What centres say, all together, is less than what one client says.
    vote = 0.5 / len(new)
    value = np.full((len(new), len(names)), vote / 2)
    for j, name in enumerate(names):
        if name in centres and centres[name].shape == means.shape[1:]:
            away = np.linalg.norm(means - centres[name], axis=1)
            value[:, j] = vote * np.divide(
                reach, reach + away, where=away > 0, out=np.ones(len(new))
            )
    for client, label in zip(clients, labels, strict=True):
        if client in members:
            value[new == label, names.index(members[client])] += 1
    rows, columns = linear_sum_assignment(value, maximize=True)
    called = {int(new[i]): names[j] for i, j in zip(rows, columns, strict=True)}
    return np.array([called[int(label)] for label in labels], np.int64)


def _smallest_distance(points: Vectors) -> float:
    """Between any two of them; 0 for a single one."""
    distances = [np.linalg.norm(a - b) for i, a in enumerate(points) for b in points[:i]]
    return float(min(distances, default=0))


def _spread(h: Vectors, labels: Labels, weights: Vectors) -> float:
    """Weighted sum of the squared distances from the clusters' means."""
    total = 0.0
    for label in np.unique(labels):
        part, w = h[labels == label], weights[labels == label]
        total += w @ np.sum((part - np.average(part, axis=0, weights=w)) ** 2, axis=1)
    return float(total)
