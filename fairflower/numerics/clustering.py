"""Clustering of clients by their representations, with the same cluster ids in every round.

The problem is small: about K = 20 clients have long representations (d = 768), computed from a
handful of images or from thousands. Some clusters have a single client, and the number of clusters
may be unknown. FedGCR's paper and code use a Gaussian mixture, ``"gmm"``: that of scikit-learn with
default settings, a single start, and a full covariance per component. These covariances cannot be
estimated from one or two clients, so the result depends on the k-means that initializes the
mixture. ``"kmeans"`` replaces the mixture. It was designed for this library and is not from a
paper:

- A client with n images gets the weight n / (n + 100): its vector, a mean over the images, has a
  sampling variance proportional to 1 / n, and clients of the same cluster differ, too.
- T centers span T - 1 directions, so vectors are projected onto T - 1 principal axes.
- k-means then finds the clusters (the best of ten starts). This is equivalent to a Gaussian
  mixture with a single small common variance; scikit-learn's mixtures do not support weights.

On the representations of FedGCR's runs on Digit-Five with domain imbalance factors 1 / 5 / 10, the
clustering accuracy is 98 / 100 / 78 % with ``"kmeans"``, 91 / 95 / 59 % with ``"gmm"``, and 99 / 93
/ 65 % with the best of ten starts of a mixture (``python benchmarks/clusters.py``: seed 0, 12
rounds, ten seeds for the clustering; AMD EPYC, scikit-learn 1.9.1). The weights matter most at
factor 10, where clients have 1 to 245 images: without weights, k-means reaches 52 %.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import require
from fairflower.numerics import Vector
from fairflower.numerics.threads import one_thread

Labels = NDArray[np.int64]

Clustering = Literal["kmeans", "gmm"]
Variant = Literal["adapted", "paper", "released"]

#: Variant of FedGCR -> its clustering, and the model that computes the representations.
_VARIANTS: dict[str, tuple[Clustering, str]] = {
    "adapted": ("kmeans", "received"),
    "paper": ("gmm", "trained"),
    "released": ("gmm", "received"),
}
_STARTS = 10
#: Number of images at which the sampling variance of a vector equals its other variance: about ten
#: images per class. Clients with fewer images also often lack classes.
_BALANCED_SIZE = 100
#: Maximum number of clusters to try if the number is not given.
_MOST = 10


class Clusters(NamedTuple):
    """Clusters of the clients in a cohort, and of clients from earlier rounds."""

    #: Cluster id of each client in the cohort, shape (K,).
    ids: Labels
    #: Client -> its cluster in the last round in which the client took part.
    members: dict[int, int]
    #: Cluster -> mean of its clients' vectors, shape (d,), in the last round in which any of these
    #: clients took part. Empty clusters are left out.
    centers: dict[int, Vector]
    #: Bayesian information criterion (see `bic`); lower is better.
    bic: float


def cluster(
    h: Vector,
    clients: Sequence[int],
    number: int | None = None,
    *,
    clustering: Clustering = "kmeans",
    sizes: Vector | None = None,
    members: Mapping[int, int] | None = None,
    centers: Mapping[int, Vector] | None = None,
    seed: int = 0,
) -> Clusters:
    """Cluster clients, reusing the cluster ids of earlier rounds.

    Parameters
    ----------
    h : array of shape (K, d)
        A vector for each client.
    clients : sequence of K ints
        Ids of the clients.
    number : int, optional
        Number of clusters, or fewer if there are fewer distinct vectors. By default, the number
        with the lowest `bic`, but at most 10 and at most half the number of clients.
    clustering : {"kmeans", "gmm"}
        The algorithm; see the documentation of this module.
    sizes : array of shape (K,), optional
        Number of images over which each vector is averaged; equal by default. ``"gmm"`` ignores it.
    members, centers : mapping, optional
        The attributes of the last round's `Clusters`.
    seed : int
        Seed for the random starts.

    Examples
    --------
    >>> h = np.array([[0.0, 0.0], [0.0, 0.1], [5.0, 5.0]])
    >>> cluster(h, clients=[3, 4, 7], number=2).ids.tolist()
    [0, 0, 1]
    """
    members, centers = dict(members or {}), dict(centers or {})
    weights = _weights(sizes if clustering == "kmeans" else None, len(h))
    labels = _labels(h, weights, number, clustering, seed)
    ids = _stable_ids(labels, h, clients, number, members, centers)
    members.update(zip(clients, ids.tolist(), strict=True))
    centers.update({int(g): h[ids == g].mean(axis=0) for g in np.unique(ids)})
    # Drop clusters whose clients are all in other clusters now; keep those of absent clients.
    centers = {g: center for g, center in centers.items() if g in members.values()}
    return Clusters(ids, members, centers, bic(h, labels, weights))


def first_neighbor_means(h: Vector) -> tuple[Vector, Labels]:
    """Return the means, shape (T, d), and sizes, (T,), of FINCH's clusters of vectors [K, d].

    Each vector is joined to the one with the largest cosine, then each cluster's mean to the
    nearest mean, and so on, as long as several clusters remain (Sarfraz et al., CVPR 2019).

    >>> h = np.array([[1.0, 0.0], [3.0, 1.0], [0.0, 1.0], [0.5, 3.0]])
    >>> [part.tolist() for part in first_neighbor_means(h)]
    [[[2.0, 0.5], [0.25, 2.0]], [2, 2]]
    """
    from scipy.sparse.csgraph import connected_components
    from sklearn.neighbors import NearestNeighbors

    labels, means = np.arange(len(h)), h
    while len(means) > 1:
        with one_thread():  # scikit-learn brings libraries of its own
            links = NearestNeighbors(n_neighbors=1, metric="cosine").fit(means).kneighbors_graph()
        joined = connected_components(links, directed=False)[1][labels]
        if len(means) < len(h) and not joined.any():
            break
        labels = joined
        means = np.array([h[labels == label].mean(axis=0) for label in range(labels.max() + 1)])
    return means, np.bincount(labels)


def resolve_variant(
    variant: Variant,
    num_clusters: int | Literal["auto"],
    clustering: Clustering | Literal["variant"],
    representation: Literal["variant", "received", "trained"] = "variant",
) -> tuple[Clustering, str]:
    """Return the clustering algorithm of a variant, and the measurement that clients must send.

    Arguments other than ``"variant"`` override those of the variant.

    Raises ``ValueError`` if ``num_clusters`` is "auto" and the variant needs a number; and
    ``NotInstalled`` if the extra ``solvers`` is not installed.

    >>> resolve_variant("released", num_clusters=5, clustering="variant")
    ('gmm', 'received_representation')
    """
    require("solvers", "Clustering")
    if num_clusters == "auto" and variant != "adapted":
        raise ValueError(
            f"num_clusters = 'auto': variant = {variant!r} needs a number. Set the number of "
            "client types (in the paper, of domains), or set variant = 'adapted'."
        )
    default, model = _VARIANTS[variant]
    if representation != "variant":
        model = representation
    measured = "received_representation" if model == "received" else "representation"
    return default if clustering == "variant" else clustering, measured


def cluster_diagnostics(h: Vector, sizes: Vector, clusters: Clusters) -> dict[str, Vector | float]:
    """Return the diagnostics of a round's clusters: ids, number, and a map of the clients.

    >>> h = np.array([[0.0, 0.0], [0.0, 0.1], [5.0, 5.0]])
    >>> sorted(cluster_diagnostics(h, np.ones(3), cluster(h, [3, 4, 7], 2)))
    ['bic', 'cluster', 'map_x', 'map_y', 'num_clusters']
    """
    east, north = principal(h, 2, _weights(sizes, len(h))).T
    diagnostics: dict[str, Vector | float] = {
        "cluster": clusters.ids.astype(np.float64),
        "num_clusters": float(len(np.unique(clusters.ids))),
        "map_x": east,
        "map_y": north,
    }
    return diagnostics | ({"bic": clusters.bic} if np.isfinite(clusters.bic) else {})


def bic(h: Vector, labels: Labels, weights: Vector | None = None) -> float:
    """Return the Bayesian information criterion of T clusters with a common, isotropic variance.

    Divided by d and up to a constant, it is::

        BIC / d = K ln(S / (K - T)) + T ln K

    where S is the sum of squared distances from the clusters' means. It is infinite for T = K. The
    usual criterion uses the maximum-likelihood variance S / (d K), which is here replaced by the
    unbiased S / (d (K - T)). The former approaches zero if clusters have one or two clients, and
    therefore selects too many clusters. The criterion for a mixture has the same problem in low
    dimensions. ``h`` has the vectors, shape (K, d), and ``labels`` the cluster of each, shape (K,).
    The ``weights`` in S and in the means, shape (K,), are scaled to a mean of 1.

    >>> h = np.array([[0.0], [0.1], [5.0], [5.1]])
    >>> bic(h, np.array([0, 0, 1, 1])) < bic(h, np.zeros(4, np.int64))
    True
    """
    K, T = len(h), len(np.unique(labels))
    if K == T:
        return np.inf
    weights = np.ones(K) if weights is None else weights / weights.mean()
    total = _spread(h, np.zeros(K, np.int64), weights)
    # A spread that is a rounding error counts as 0.
    spread = max(_spread(h, labels, weights), 1e-9 * total, np.finfo(np.float64).tiny)
    return float(K * np.log(spread / (K - T)) + T * np.log(K))


def principal(h: Vector, axes: int, weights: Vector | None = None) -> Vector:
    """Return coordinates on the first principal axes, shape (K, axes), with 0 beyond the rank.

    The sign of an axis is chosen so that its largest entry is positive. A map of the clients then
    does not flip between rounds.

    >>> principal(np.array([[0.0, 1.0], [2.0, 1.0]]), axes=1).tolist()
    [[-1.0], [1.0]]
    """
    centered = h - np.average(h, axis=0, weights=weights)
    pull = 1 if weights is None else np.sqrt(weights / weights.mean())[:, None]
    right = np.linalg.svd(pull * centered, full_matrices=False)[2]
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
    coordinates = centered @ (right * signs[:, None])[:axes].T
    missing = axes - coordinates.shape[1]
    return np.asarray(np.pad(coordinates, ((0, 0), (0, missing))))


def _weights(sizes: Vector | None, K: int) -> Vector:
    return np.ones(K) if sizes is None else np.asarray(sizes / (sizes + _BALANCED_SIZE))


def _labels(
    h: Vector, weights: Vector, number: int | None, clustering: Clustering, seed: int
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


def _mixture(h: Vector, T: int, seed: int) -> Labels:
    """Return the labels of a mixture of T Gaussians with scikit-learn's defaults."""
    from sklearn.mixture import GaussianMixture

    # Rotate to the K - 1 axes on which the vectors differ, to have 20 coordinates instead of 768.
    # The mixture is the same, because all components are equal on the other axes.
    x = principal(h, min(len(h) - 1, h.shape[1]))
    reg = 1e-6  # scikit-learn's default; lost to rounding next to a large variance
    while True:
        fitted = GaussianMixture(T, reg_covar=reg, random_state=seed)
        try:
            with one_thread():  # scikit-learn brings libraries of its own
                return np.asarray(fitted.fit_predict(x), np.int64)
        except ValueError:  # x is finite, so a covariance is ill-defined
            if not np.isfinite(reg):
                raise
            reg *= 100


def _k_means(h: Vector, weights: Vector, T: int, seed: int) -> Labels:
    """Return the labels of T clusters on T - 1 principal axes."""
    from sklearn.cluster import KMeans

    x = principal(h, T - 1, weights)
    with one_thread():  # scikit-learn brings libraries of its own
        fitted = KMeans(T, n_init=_STARTS, random_state=seed).fit(x, sample_weight=weights)
    return np.asarray(fitted.labels_, np.int64)


def _stable_ids(
    labels: Labels,
    h: Vector,
    clients: Sequence[int],
    number: int | None,
    members: Mapping[int, int],
    centers: Mapping[int, Vector],
) -> Labels:
    """Map labels to cluster ids so that as many clients as possible keep their cluster.

    Ties are broken in favor of the nearest centers. A cluster that is nearer to another cluster of
    this round than to the center of any free id gets a new id, as long as the number of clusters
    allows it.
    """
    from scipy.optimize import linear_sum_assignment

    # Follow the order of the clients' ids, so that the first cluster ids do not depend on k-means.
    first = np.unique(labels, return_index=True)[1]
    new = labels[np.sort(first)]
    means = np.array([h[labels == label].mean(axis=0) for label in new])
    names = sorted(centers)
    most = len(names) + len(new) if number is None else max(number, len(new))
    unused = (name for name in itertools.count() if name not in centers)
    names += itertools.islice(unused, max(0, most - len(names)))
    apart = (float(np.linalg.norm(a - b)) for a, b in itertools.combinations(means, 2))
    half = min(apart, default=0) / 2
    # All centers together have less influence than a single client.
    vote = 0.5 / len(new)
    value = np.full((len(new), len(names)), vote / 2)
    for j, name in enumerate(names):
        if name in centers and centers[name].shape == means.shape[1:]:
            away = np.linalg.norm(means - centers[name], axis=1)
            near = np.divide(half, half + away, where=away > 0, out=np.ones(len(new)))
            value[:, j] = vote * near
    for client, label in zip(clients, labels, strict=True):
        if client in members:
            value[new == label, names.index(members[client])] += 1
    rows, columns = linear_sum_assignment(value, maximize=True)
    called = {int(new[i]): names[j] for i, j in zip(rows, columns, strict=True)}
    return np.array([called[int(label)] for label in labels], np.int64)


def _spread(h: Vector, labels: Labels, weights: Vector) -> float:
    """Return the weighted sum of the squared distances from the clusters' means."""
    total = 0.0
    for label in np.unique(labels):
        part, w = h[labels == label], weights[labels == label]
        total += w @ np.sum((part - np.average(part, axis=0, weights=w)) ** 2, axis=1)
    return float(total)
