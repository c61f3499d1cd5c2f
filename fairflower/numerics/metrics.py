"""Fairness metrics: how evenly is a model's quality spread?

Every function takes one value per domain or per client, ``a_1 .. a_K`` with any
``K >= 1`` (a sequence or a 1-d array), and returns one float. Accuracies may be
fractions or percentages: ``mean``, ``std``, ``worst``, ``best``, ``gap`` and
``worst_fraction`` come in the unit of the input and also accept losses; ``jain``, ``gini``
and ``entropy`` have no unit and need values that are not negative.

Three habits keep such numbers honest. Say the level (domains or clients), the unit
and the ``ddof``: papers differ in all three. Evaluate all clients, not the sampled
ones. And never show a spread or a relative index (Jain, Gini, entropy) without the
mean and the worst: they are perfect when everyone is served equally badly.

All raise ``ValueError`` when the values are empty, not one-dimensional, NaN or
infinite, or negative where that has no meaning.

Where classes are of very unequal size, the value per domain may itself be another than
the accuracy: ``balanced_accuracy`` and ``auc_ovo`` rate one model on one test set.

``clustering_accuracy`` and ``adjusted_rand`` rate groups of clients that were found
without knowing the clients' types.

>>> digits = [0.9027, 0.9569, 0.7994, 0.4645]  # FedHEAL on Digits (CVPR 2024, Table 2)
>>> round(mean(digits), 4), round(std(digits, ddof=1), 4), worst(digits)
(0.7809, 0.2208, 0.4645)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]


def mean(a: ArrayLike) -> float:
    """Plain mean, as the papers have it over domains.

    >>> mean([0.9, 0.5])
    0.7
    """
    return float(_values(a).mean())


def std(a: ArrayLike, ddof: int) -> float:
    """Standard deviation, ``sqrt(sum (a_k - mean)^2 / (K - ddof))``.

    ``ddof`` has no default because the papers disagree: 1 in FedHEAL's tables (15 %
    larger at K = 4), 0 in FedEquilibria, FedGCR, Ditto and q-FFL. With four domains
    either is a noisy figure: give several seeds. NaN when ``K <= ddof``.

    >>> round(std([0.2, 0.4], ddof=0), 6), round(std([0.2, 0.4], ddof=1), 6)
    (0.1, 0.141421)
    >>> std([0.7], ddof=1)
    nan
    """
    values = _values(a)
    if values.size <= ddof:
        return math.nan
    return float(values.std(ddof=ddof))


def worst(a: ArrayLike) -> float:
    """The smallest value: MIN of FedEquilibria and FedGCR, the objective of AFL.

    >>> worst([0.9, 0.5, 0.7])
    0.5
    """
    return float(_values(a).min())


def best(a: ArrayLike) -> float:
    """The largest value.

    >>> best([0.9, 0.5, 0.7])
    0.9
    """
    return float(_values(a).max())


def gap(a: ArrayLike) -> float:
    """Best minus worst; at least 0. Decided by two values alone.

    >>> gap([0.9, 0.5, 0.7])
    0.4
    """
    return best(a) - worst(a)


def worst_fraction(a: ArrayLike, fraction: float = 0.1) -> float:
    """Mean of the ``floor(fraction K)`` smallest values, and of at least one.

    "Worst 10 %" of q-FFL and Ditto. Their figure does not exist for fewer than ten
    values; here it is then the worst one.

    >>> worst_fraction([0.1, 0.3] + 18 * [0.9])
    0.2
    >>> worst_fraction([0.4, 0.9, 0.8])
    0.4
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"Expected a fraction in (0, 1], got {fraction}.")
    values = np.sort(_values(a))
    # The small term undoes the rounding of products such as 0.29 * 100 = 28.999...
    count = max(1, math.floor(fraction * values.size + 1e-9))
    return float(values[:count].mean())


def jain(a: ArrayLike) -> float:
    """Jain's index, ``(sum a)^2 / (K sum a^2)``, in ``[1/K, 1]``; 1 means all equal.

    Jain, Chiu & Hawe (1984). The same information as the coefficient of variation
    (``J = 1 / (1 + CV^2)``, ddof 0) and as q-FFL's cosine to the vector of ones
    (``cos = sqrt(J)``). Relative: the scale of ``a`` cancels. All zeros are equal
    values, so the index is 1 there.

    >>> jain([0.5, 0.5, 0.5, 0.5]), jain([1.0, 0.0, 0.0, 0.0])
    (1.0, 0.25)
    """
    values = _relative(a)
    return float(values.sum() ** 2 / (values.size * (values @ values)))


def gini(a: ArrayLike) -> float:
    """Gini coefficient, ``sum_ij |a_i - a_j| / (2 K^2 mean)``, in ``[0, 1 - 1/K]``.

    0 means all equal; 1 - 1/K that one has everything. Computed on sorted values in
    O(K log K). Relative, like `jain`; 0 when all values are zero. FedGini and FedGA
    use it.

    >>> gini([0.5, 0.5, 0.5, 0.5]), gini([1.0, 0.0, 0.0, 0.0])
    (0.0, 0.75)
    """
    values = np.sort(_relative(a))
    k = values.size
    rank = 2.0 * np.arange(1, k + 1) - k - 1
    # Rounding may leave -1e-17 where all values are equal.
    return max(0.0, float(rank @ values / (k * values.sum())))


def entropy(a: ArrayLike) -> float:
    """Entropy of the shares ``p = a / sum(a)``, in nats, in ``[0, ln K]``.

    ``H = -sum p ln p`` with ``0 ln 0 = 0``; ``ln K`` means all equal (appendix of
    q-FFL). Comparable only between vectors of the same length. Relative, like
    `jain`; ``ln K`` when all values are zero.

    >>> round(entropy([0.5, 0.5, 0.5, 0.5]), 6), entropy([1.0, 0.0, 0.0, 0.0])
    (1.386294, 0.0)
    """
    values = _relative(a)
    share = values / values.sum()
    share = share[share > 0]
    # Adding 0.0 turns the -0.0 of a single share into 0.0.
    return float(-(share @ np.log(share))) + 0.0


def summary(a: ArrayLike) -> dict[str, float]:
    """The figures of a fairness table, each with its convention in its key.

    ``std_ddof1`` is NaN for a single value; ``worst10`` is `worst_fraction`.

    >>> for name, value in summary([0.9027, 0.9569, 0.7994, 0.4645]).items():
    ...     print(f"{name:9} {value:.4f}")
    mean      0.7809
    std_ddof0 0.1912
    std_ddof1 0.2208
    worst     0.4645
    best      0.9569
    gap       0.4924
    worst10   0.4645
    jain      0.9434
    gini      0.1265
    entropy   1.3534
    """
    return {
        "mean": mean(a),
        "std_ddof0": std(a, ddof=0),
        "std_ddof1": std(a, ddof=1),
        "worst": worst(a),
        "best": best(a),
        "gap": gap(a),
        "worst10": worst_fraction(a, 0.1),
        "jain": jain(a),
        "gini": gini(a),
        "entropy": entropy(a),
    }


def balanced_accuracy(labels: ArrayLike, predicted: ArrayLike) -> float:
    """Mean over classes of the share of a class that is predicted right (its recall).

    Classes without a test image do not count; ACC of FedISM.

    >>> balanced_accuracy([0, 0, 0, 1], [0, 0, 0, 0])
    0.5
    """
    y = np.asarray(labels)
    if y.size == 0:
        raise ValueError("Expected at least one of the labels, got none.")
    _, kind, counts = np.unique(y, return_inverse=True, return_counts=True)
    right = np.bincount(kind, weights=y == np.asarray(predicted))
    return float((right / counts).mean())


def auc_ovo(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """One-vs-one macro AUC (Hand and Till 2001): the mean over all pairs of classes.

    For a pair, how likely a random image of one class has a higher probability of it than
    a random image of the other, averaged over both; 0.5 is chance. AUC of FedISM.

    ``labels``, shape (N,), are in ``0 .. C - 1``; a class without a test image is in no pair.
    The rows of ``probabilities``, shape (N, C), sum to 1. NaN if fewer than two classes have
    a test image, or a probability is not finite.

    >>> auc_ovo([0, 1, 1], [[0.9, 0.1], [0.2, 0.8], [0.95, 0.05]])
    0.5
    """
    from sklearn.metrics import roc_auc_score  # late: it takes a second to import

    y, p = np.asarray(labels), np.asarray(probabilities)
    if np.unique(y).size < 2 or not np.isfinite(p).all():
        return math.nan
    if p.shape[1] == 2:  # which scikit-learn takes for something else
        return float(roc_auc_score(y, p[:, 1]))
    return float(roc_auc_score(y, p, multi_class="ovo", labels=np.arange(p.shape[1])))


def clustering_accuracy(types: ArrayLike, clusters: ArrayLike) -> float:
    """Share of clients whose type is the commonest one in their cluster.

    Clustering accuracy of FedGCR (Table 3), elsewhere purity. Of types that tie in a
    cluster one is the commonest; which one makes no difference to the share. A cluster for
    every client gives 1, so read it with the number of clusters, or see `adjusted_rand`.

    ``types`` and ``clusters``, shape (K,), are what each client is and where it was put:
    numbers or names.

    >>> clustering_accuracy(["mnist", "mnist", "svhn", "usps"], [0, 0, 1, 1])
    0.75
    """
    from sklearn.metrics.cluster import contingency_matrix  # late: it takes a second to import

    joint = contingency_matrix(*_paired(types, clusters))
    return float(joint.max(axis=0).sum() / joint.sum())


def adjusted_rand(types: ArrayLike, clusters: ArrayLike) -> float:
    """Adjusted Rand index: pairs of clients rightly together or apart, chance taken off.

    Hubert and Arabie (1985). At most 1, the types themselves; 0 on average for clusters
    drawn at random, and for a single cluster of several types. Arguments as for
    `clustering_accuracy`.

    >>> round(adjusted_rand(["mnist", "mnist", "svhn", "usps"], [0, 0, 1, 1]), 4)
    0.5714
    """
    from sklearn.metrics import adjusted_rand_score  # late, like the above

    return float(adjusted_rand_score(*_paired(types, clusters)))


def _paired(types: ArrayLike, clusters: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    t, c = np.asarray(types), np.asarray(clusters)
    if t.ndim != 1 or t.shape != c.shape:
        raise ValueError(f"Got types in the shape {t.shape} and clusters in {c.shape}.")
    if t.size == 0:
        raise ValueError("Expected at least one of the clients, got none.")
    return t, c


def _values(a: ArrayLike) -> Vector:
    values = np.asarray(a, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"Expected values in one dimension, got the shape {values.shape}.")
    if values.size == 0:
        raise ValueError("Expected at least one of the values, got none.")
    _refuse(values, ~np.isfinite(values), "finite values")
    return values


def _relative(a: ArrayLike) -> Vector:
    """Values scaled to a maximum of 1, so that squares neither overflow nor vanish."""
    values = _values(a)
    _refuse(values, values < 0, "values that are not negative")
    top = values.max()
    return values / top if top > 0 else np.ones_like(values)


def _refuse(values: Vector, wrong: NDArray[np.bool_], expected: str) -> None:
    if wrong.any():
        k = int(wrong.argmax())
        raise ValueError(f"Expected {expected}, got {values[k]} at index {k}.")
