"""Groups of clients by what they say of their type, and the same names for them each round.

Few clients (K of about 20) say it in many numbers (d = 768), some groups have a single
client, and how many groups there are may be unknown. What is done here did best in
``benchmarks/groups.py``: T groups differ in T - 1 directions, so vectors are projected on
as many principal axes; there a Gaussian mixture is fitted whose components share one
covariance, so that a component of one client has one, too. A covariance of its own for
every component, scikit-learn's default, cannot be estimated from a client or two.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Vectors = NDArray[np.float64]
Labels = NDArray[np.int64]

#: What is added to the shared variances, of vectors whose variance is 1 on average.
_LEAST_VARIANCE = 1e-2
_STARTS = 10
#: Most groups that are looked for when their number is not given.
_MOST = 10


class Groups(NamedTuple):
    """Who belongs together.

    Attributes
    ----------
    ids : ndarray of shape (K,)
        The group of each client of the cohort.
    members : dict of int -> int
        Client -> its group in the last round that it took part in.
    centres : dict of int -> ndarray of shape (d,)
        Group -> mean of its clients' vectors, in the last round that it had any.
    bic : float
        See `bic`; the lower, the better. NaN for a single client.
    """

    ids: Labels
    members: dict[int, int]
    centres: dict[int, Vectors]
    bic: float


def group(
    h: Vectors,
    clients: Sequence[int],
    number: int | None = None,
    *,
    members: Mapping[int, int] | None = None,
    centres: Mapping[int, Vectors] | None = None,
    seed: int = 0,
) -> Groups:
    """Group clients, and keep the names that groups had before.

    Parameters
    ----------
    h : ndarray of shape (K, d)
        A vector per client.
    clients : sequence of K ints
        Their ids.
    number : int, optional
        How many groups there are; fewer come out where fewer vectors differ. None: as
        many, up to 10 and half the clients, as have the least `bic`.
    members, centres : dict, optional
        Of the round before.
    seed : int
        Of the mixture's starting points.
    """
    members, centres = dict(members or {}), dict(centres or {})
    with threadpool_limits(1, user_api="blas"):
        labels = _cluster(h, number, seed)
        ids = _named(labels, h, clients, members, centres)
        members.update(zip(clients, ids.tolist(), strict=True))
        centres.update({int(g): h[ids == g].mean(axis=0) for g in np.unique(ids)})
        return Groups(ids, members, centres, bic(h, labels))


def bic(h: Vectors, labels: Labels) -> float:
    """Bayesian information criterion of T groups of one common, isotropic variance, over d.

    With S the squared distances from the groups' means, which S / (d (K - T)) makes a
    variance::

        BIC / d = K ln(S / (K - T)) + T ln K

    up to a constant. A mixture's own BIC, in the space that it was fitted in, finds too
    many groups: its likelihood has no bound where a component has a single client.
    """
    K, T = len(h), len(np.unique(labels))
    if K == T:
        return np.nan if K == 1 else np.inf
    total = _spread(h, np.zeros(K, np.int64))
    # What is left of a spread by rounding alone counts as nothing.
    spread = max(_spread(h, labels), 1e-9 * total, np.finfo(np.float64).tiny)
    return float(K * np.log(spread / (K - T)) + T * np.log(K))


def principal(h: Vectors, axes: int) -> Vectors:
    """Coordinates on the first principal axes, shape (K, axes); zero where there are fewer.

    An axis points to where its largest entry is positive, so a picture of it does not
    flip from one round to the next without a cause.
    """
    left, lengths, right = np.linalg.svd(h - h.mean(axis=0), full_matrices=False)
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
    coordinates = (left * (lengths * signs))[:, :axes]
    missing = axes - coordinates.shape[1]
    return np.asarray(np.pad(coordinates, ((0, 0), (0, missing))))


def _cluster(h: Vectors, number: int | None, seed: int) -> Labels:
    different = len(np.unique(h, axis=0))
    if number is not None:
        return _mixture(h, min(number, different), seed)
    most = max(1, min(_MOST, len(h) // 2, different))
    found = [_mixture(h, T, seed) for T in range(1, most + 1)]
    return min(found, key=lambda labels: bic(h, labels))


def _mixture(h: Vectors, T: int, seed: int) -> Labels:
    """Labels of a mixture of T Gaussians of one covariance on T - 1 principal axes."""
    if T == 1:
        return np.zeros(len(h), np.int64)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    x = principal(h, T - 1)
    x = x / np.sqrt(np.mean(x**2))
    mixture = GaussianMixture(
        T, covariance_type="tied", reg_covar=_LEAST_VARIANCE, n_init=_STARTS, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # k-means, on equal vectors
        return np.asarray(mixture.fit_predict(x), np.int64)


def _named(
    labels: Labels,
    h: Vectors,
    clients: Sequence[int],
    members: Mapping[int, int],
    centres: Mapping[int, Vectors],
) -> Labels:
    """Labels as ids: a group is called as most of its clients' groups were.

    The names are those that keep as many clients as possible where they were; between
    equals, the nearest centres decide. A group that is one too many gets a new name.
    """
    from scipy.optimize import linear_sum_assignment

    # In the order of the clients' ids, so that the first names do not depend on a mixture.
    first = np.unique(labels, return_index=True)[1]
    new = labels[np.sort(first)]
    names = sorted(centres)
    unused = (name for name in range(len(names) + len(new)) if name not in centres)
    names += [next(unused) for _ in range(max(0, len(new) - len(names)))]
    value = np.zeros((len(new), len(names)))
    for i, label in enumerate(new):
        mean = h[labels == label].mean(axis=0)
        for j, name in enumerate(names):
            if name in centres and centres[name].shape == mean.shape:
                # All of these together are less than one client.
                value[i, j] = 0.5 / len(new) / (1 + np.linalg.norm(mean - centres[name]))
    for client, label in zip(clients, labels, strict=True):
        if client in members:
            value[new == label, names.index(members[client])] += 1
    rows, columns = linear_sum_assignment(value, maximize=True)
    called = {int(new[i]): names[j] for i, j in zip(rows, columns, strict=True)}
    return np.array([called[int(label)] for label in labels], np.int64)


def _spread(h: Vectors, labels: Labels) -> float:
    """Sum of the squared distances from the groups' means."""
    parts = (h[labels == label] for label in np.unique(labels))
    return float(sum(np.sum((part - part.mean(axis=0)) ** 2) for part in parts))
