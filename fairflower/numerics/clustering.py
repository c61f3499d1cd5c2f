"""Clusters of clients by what they say of their type, of the same names every round.

Few clients (K of about 20) say it in many numbers (d = 768), some with a handful of images
and some with thousands; some clusters have a single client, and how many there are may be
unknown. FedGCR's paper and code take a Gaussian mixture, ``"gmm"``: scikit-learn's with its
defaults, one start, a full covariance of its own for every component. Such covariances
cannot be estimated from a client or two: what decides is the k-means that the mixture
starts from. ``"kmeans"`` replaces it, and is no paper's:

- A client of n images weighs n / (n + 100). Its vector, a mean over them, is off by
  chance, with a variance in proportion to 1 / n, and by what its type does not fix.
- T centres differ in T - 1 directions, so vectors are projected on as many principal axes.
- There k-means finds the clusters, of ten starts the best: a Gaussian mixture whose
  components share one small variance. scikit-learn's mixtures know no weights.

On the representations of FedGCR's runs on Digit-Five, at domain imbalance factors 1 / 5 / 10,
clustering accuracy is 98 / 100 / 78 % by ``"kmeans"``, 91 / 95 / 59 % by ``"gmm"``, and
99 / 93 / 65 % by a mixture of the best of ten starts (``python benchmarks/clusters.py``: seed 0,
12 rounds, ten seeds of the clustering; AMD EPYC, scikit-learn 1.9.1). The weights make the
difference at 10, where clients have 1 to 245 images: without them k-means has 52 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import require
from fairflower.numerics.threads import one_thread

Vectors = NDArray[np.float64]
Labels = NDArray[np.int64]

Clustering = Literal["kmeans", "gmm"]
Variant = Literal["adapted", "paper", "released"]

#: What FedGCR's variants cluster by, and whose representations.
_VARIANTS: dict[str, tuple[Clustering, str]] = {
    "adapted": ("kmeans", "received"),
    "paper": ("gmm", "trained"),
    "released": ("gmm", "received"),
}
_STARTS = 10
#: With how many images chance moves a vector as far as whatever else does: about ten of
#: each class. With fewer than that a client often lacks classes, too.
_ENOUGH = 100
#: Most clusters that are looked for when their number is not given.
_MOST = 10


class Clusters(NamedTuple):
    """Who belongs together."""

    #: The cluster of each client of the cohort, shape (K,).
    ids: Labels
    #: Client -> its cluster in the last round that it took part in.
    members: dict[int, int]
    #: Cluster -> mean of its clients' vectors, shape (d,), in the last round that it had any;
    #: of those clusters that are somebody's.
    centres: dict[int, Vectors]
    #: See `bic`; the lower, the better.
    bic: float


def cluster(
    h: Vectors,
    clients: Sequence[int],
    number: int | None = None,
    *,
    clustering: Clustering = "kmeans",
    sizes: Vectors | None = None,
    members: Mapping[int, int] | None = None,
    centres: Mapping[int, Vectors] | None = None,
    seed: int = 0,
) -> Clusters:
    """Cluster clients, and keep the names that clusters had before.

    ``h``, shape (K, d), has a vector for each of the K ``clients``. Where fewer of them differ
    than the ``number`` of clusters, fewer come out; without a number there are as many, up to
    10 and half the clients, as have the least `bic`. ``sizes``, shape (K,), says how many
    images each vector is the mean of: by default as many as any other, and a mixture has no
    use for it. ``members`` and ``centres`` are those of the round before.
    """
    members, centres = dict(members or {}), dict(centres or {})
    weights = _weights(sizes if clustering == "kmeans" else None, len(h))
    labels = _labels(h, weights, number, clustering, seed)
    ids = _named(labels, h, clients, number, members, centres)
    members.update(zip(clients, ids.tolist(), strict=True))
    centres.update({int(g): h[ids == g].mean(axis=0) for g in np.unique(ids)})
    # A cluster whose clients have all gone to others is none; one whose clients sit out is.
    centres = {g: centre for g, centre in centres.items() if g in members.values()}
    return Clusters(ids, members, centres, bic(h, labels, weights))


def choose(
    variant: Variant,
    num_clusters: int | Literal["auto"],
    clustering: Clustering | Literal["variant"],
    representation: Literal["variant", "received", "trained"] = "variant",
) -> tuple[Clustering, str]:
    """How to cluster, and what clients have to measure for it: a variant's, where not given.

    ``ValueError`` names the argument that the variant has to be given, ``NotInstalled`` the extra
    that clusters are found with.
    """
    require("solvers", "Clustering")
    if num_clusters == "auto" and variant != "adapted":
        raise ValueError(
            f"num_clusters = 'auto': variant = {variant!r} has T' given. Set it to the number "
            "of the clients' types (the paper: of domains), or choose variant = 'adapted'."
        )
    own, model = _VARIANTS[variant]
    if representation != "variant":
        model = representation
    measured = "received_representation" if model == "received" else "representation"
    return own if clustering == "variant" else clustering, measured


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
    zero with clusters of a client or two, and finds too many of them. So, where types have
    few clients, does a mixture's own criterion, in the few dimensions that it is fitted in.

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
    with one_thread():  # the bits do not depend on cores
        right = np.linalg.svd(pull * centred, full_matrices=False)[2]
        signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
        coordinates = centred @ (right * signs[:, None])[:axes].T
    missing = axes - coordinates.shape[1]
    return np.asarray(np.pad(coordinates, ((0, 0), (0, missing))))


def _weights(sizes: Vectors | None, K: int) -> Vectors:
    return np.ones(K) if sizes is None else np.asarray(sizes / (sizes + _ENOUGH))


def _labels(
    h: Vectors, weights: Vectors, number: int | None, clustering: Clustering, seed: int
) -> Labels:
    def divide(T: int) -> Labels:
        if T == 1:
            return np.zeros(len(h), np.int64)
        return _mixture(h, T, seed) if clustering == "gmm" else _k_means(h, weights, T, seed)

    different = len(np.unique(h, axis=0))
    if number is not None:
        return divide(min(number, different))
    most = max(1, min(_MOST, len(h) // 2, different))
    return min(map(divide, range(1, most + 1)), key=lambda labels: bic(h, labels, weights))


def _mixture(h: Vectors, T: int, seed: int) -> Labels:
    """Labels of T Gaussians by scikit-learn's defaults."""
    from sklearn.mixture import GaussianMixture

    # Turned onto the K - 1 axes on which they differ at all: the same mixture, since all
    # components are alike on the others, of 20 numbers instead of 768.
    x = principal(h, min(len(h) - 1, h.shape[1]))
    reg = 1e-6  # scikit-learn's default; beside a large variance rounding swallows it
    while True:
        fitted = GaussianMixture(T, reg_covar=reg, random_state=seed)
        try:
            with one_thread(None):  # sums must not depend on the cores
                return np.asarray(fitted.fit_predict(x), np.int64)
        except ValueError as error:
            if "covariance" not in str(error) or not np.isfinite(reg):
                raise
            reg *= 100


def _k_means(h: Vectors, weights: Vectors, T: int, seed: int) -> Labels:
    """Labels of T clusters on T - 1 principal axes."""
    from sklearn.cluster import KMeans

    x = principal(h, T - 1, weights)
    with one_thread(None):  # sums must not depend on the cores
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
    apart = (float(np.linalg.norm(a - b)) for a, b in itertools.combinations(means, 2))
    reach = min(apart, default=0) / 2
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


def _spread(h: Vectors, labels: Labels, weights: Vectors) -> float:
    """Weighted sum of the squared distances from the clusters' means."""
    total = 0.0
    for label in np.unique(labels):
        part, w = h[labels == label], weights[labels == label]
        total += w @ np.sum((part - np.average(part, axis=0, weights=w)) ** 2, axis=1)
    return float(total)
