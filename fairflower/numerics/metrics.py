"""Fairness metrics, which measure how evenly a model's quality is distributed.

Every `Summary` takes one value per domain or client, ``a_1 .. a_K`` with any ``K >= 1`` (a sequence
or a 1-d array), and returns a float. Accuracies may be fractions or percentages. ``AVG``, ``STD``,
``MIN``, ``MAX``, ``GAP`` and `worst_fraction` have the unit of the input and also accept losses.
`jain`, `gini` and `entropy` have no unit and need non-negative values. All raise ``ValueError`` if
the values are empty, not one-dimensional, NaN, infinite, or negative where a metric needs
non-negative values.

When you report a metric, state its level (domains or clients), its unit and its ``ddof``, because
papers differ in these. Evaluate all clients, not only the selected ones. Report a spread or a
relative index (Jain, Gini, entropy) together with the mean and the worst value, because it is also
perfect if all clients get an equally bad model.

``balanced_accuracy`` and ``auc_ovo`` evaluate a model on a test set with imbalanced classes.
``clustering_accuracy`` and ``adjusted_rand`` compare clusters of clients with their true types.

Examples
--------
>>> from fairflower.numerics.metrics import AVG, MIN, STD
>>> digits = [0.9027, 0.9569, 0.7994, 0.4645]  # FedHEAL on Digits (CVPR 2024, Table 2)
>>> round(AVG(digits), 4), round(STD(digits), 4), MIN(digits)
(0.7809, 0.2208, 0.4645)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairflower.numerics import Vector
from fairflower.numerics.scores import Score


def std(a: ArrayLike, ddof: int) -> float:
    """Return the standard deviation, ``sqrt(sum (a_k - mean)^2 / (K - ddof))``.

    ``ddof`` has no default because papers differ: it is 1 in FedHEAL's tables (so values are 15 %
    larger for K = 4) and 0 in FedEquilibria, FedGCR, Ditto and q-FFL. With four domains the
    estimate is noisy, so report several seeds. The result is NaN if ``K <= ddof``.

    >>> round(std([0.2, 0.4], ddof=0), 6), round(std([0.2, 0.4], ddof=1), 6)
    (0.1, 0.141421)
    >>> std([0.7], ddof=1)
    nan
    """
    values = _values(a)
    if values.size <= ddof:
        return math.nan
    return float(values.std(ddof=ddof))


def worst_fraction(a: ArrayLike, fraction: float = 0.1, better: int = 1) -> float:
    """Return the mean of the ``floor(fraction K)`` smallest values (at least one value).

    This is the "worst 10 %" of q-FFL and Ditto. Their metric is undefined for fewer than ten
    values; in this case, this function returns the smallest value. If ``better`` is -1 (lower is
    better), it averages the largest values.

    >>> worst_fraction([0.1, 0.3] + 18 * [0.9])
    0.2
    >>> worst_fraction([0.4, 0.9, 0.8])
    0.4
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction = {fraction}: expected a number in (0, 1].")
    values = np.sort(_values(a))[::better]
    return float(values[: _count(fraction, values.size)].mean())


def _count(fraction: float, size: int) -> int:
    # The small term corrects rounding errors of products, as in 0.29 * 100 = 28.999...
    return max(1, math.floor(fraction * size + 1e-9))


def jain(a: ArrayLike) -> float:
    """Return Jain's index, ``(sum a)^2 / (K sum a^2)``, in ``[1/K, 1]``; 1 means all equal.

    The index (Jain, Chiu & Hawe 1984) is equivalent to the coefficient of variation (``J = 1 / (1 +
    CV^2)``, ddof 0) and to q-FFL's cosine with the vector of ones (``cos = sqrt(J)``). It is
    relative: the scale of ``a`` cancels. It is 1 if all values are zero.

    See Also
    --------
    gini : Relative index based on pairwise differences.
    entropy : Relative index based on shares.

    Examples
    --------
    >>> jain([0.5, 0.5, 0.5, 0.5]), jain([1.0, 0.0, 0.0, 0.0])
    (1.0, 0.25)
    """
    values = _relative(a)
    return float(values.sum() ** 2 / (values.size * (values @ values)))


def gini(a: ArrayLike) -> float:
    """Return the Gini coefficient, ``sum_ij |a_i - a_j| / (2 K^2 mean)``, in ``[0, 1 - 1/K]``.

    0 means that all values are equal; 1 - 1/K means that only one value is not zero. The
    coefficient is relative, like `jain`, and 0 if all values are zero. It is computed on sorted
    values in O(K log K). FedGini and FedGA use it.

    >>> gini([0.5, 0.5, 0.5, 0.5]), gini([1.0, 0.0, 0.0, 0.0])
    (0.0, 0.75)
    """
    values = np.sort(_relative(a))
    k = values.size
    rank = 2.0 * np.arange(1, k + 1) - k - 1
    # Rounding may give -1e-17 if all values are equal.
    return max(0.0, float(rank @ values / (k * values.sum())))


def entropy(a: ArrayLike) -> float:
    """Return the entropy of the shares ``p = a / sum(a)``, in nats, in ``[0, ln K]``.

    It is ``H = -sum p ln p`` with ``0 ln 0 = 0`` (appendix of q-FFL). ``ln K`` means that all
    values are equal, so compare only vectors of equal length. The entropy is relative, like `jain`,
    and ``ln K`` if all values are zero.

    >>> round(entropy([0.5, 0.5, 0.5, 0.5]), 6), entropy([1.0, 0.0, 0.0, 0.0])
    (1.386294, 0.0)
    """
    values = _relative(a)
    share = values / values.sum()
    share = share[share > 0]
    # Adding 0.0 converts the -0.0 of a single share to 0.0.
    return float(-(share @ np.log(share))) + 0.0


@dataclass(frozen=True, kw_only=True)
class Summary(Score):
    """A summary of a score's values over all domains or clients, such as AVG or MIN.

    Terminal output, callbacks, trackers, tables, figures, verdicts, tuning and the leaderboard all
    take the name, the direction and the formula from these objects.

    >>> round(STD([0.2, 0.4]), 4), STD.heading, STD.better
    (0.1414, 'STD ddof 1', -1)
    """

    formula: Callable[[ArrayLike], float]
    #: The ddof of a standard deviation; None for other numbers.
    ddof: int | None = None
    #: Whether the summary compares values, so that it is undefined for a single value.
    compares: bool = False
    #: Gradient with respect to the values, shape (K,).
    gradient: Callable[[Vector], Vector] | None = None
    #: Name of the score, for axis labels; empty for a fraction for which higher is better.
    of: str = ""

    def __call__(self, a: ArrayLike) -> float:
        """Compute the summary of the values."""
        return self.formula(a)

    @property
    def heading(self) -> str:
        """The title, with the ddof of a standard deviation."""
        return self.title if self.ddof is None else f"{self.title} ddof {self.ddof}"

    @property
    def axis(self) -> str:
        """The axis label, with the unit."""
        ddof = "" if self.ddof is None else f" (ddof {self.ddof})"
        of = f" of {self.of}" if self.of else ""
        return f"{self.title}{of} over domains{ddof}{self.unit and f', {self.unit}'}"


def _std_gradient(a: Vector, ddof: int) -> Vector:
    """Return the gradient of `std`. It is zero for a single value or equal values."""
    spread = std(a, ddof) if len(a) > 1 else 0.0
    return (a - a.mean()) / ((len(a) - ddof) * spread) if spread > 0 else np.zeros(len(a))


def _worst_fraction_gradient(a: Vector, fraction: float) -> Vector:
    """Return the gradient of `worst_fraction`; of equal values the first count as the smallest."""
    count = _count(fraction, len(a))
    slopes = np.zeros(len(a))
    slopes[np.argsort(a, kind="stable")[:count]] = 1 / count
    return slopes


AVG = Summary(
    "AVG",
    phrase="average",
    formula=lambda a: float(_values(a).mean()),
    gradient=lambda a: np.full(len(a), 1 / len(a)),
)
STD, STD0 = (
    Summary(
        *("STD", -1),
        formula=partial(std, ddof=ddof),
        ddof=ddof,
        compares=True,
        gradient=partial(_std_gradient, ddof=ddof),
    )
    for ddof in (1, 0)
)
#: MIN in FedEquilibria and FedGCR, and the objective of AFL.
MIN = Summary(
    *("MIN", 1),
    phrase="worst domain",
    margin=2.0,
    formula=lambda a: float(_values(a).min()),
    gradient=lambda a: np.eye(len(a))[a.argmin()],
)
#: The primary metric of leaderboards.
WORST_HALF = Summary(
    *("worst half", 1),
    phrase="worst half of the domains",
    formula=partial(worst_fraction, fraction=0.5),
    gradient=partial(_worst_fraction_gradient, fraction=0.5),
)
GAP = Summary(
    *("GAP", -1),
    phrase="best minus worst",
    margin=2.0,
    formula=lambda a: float(np.ptp(_values(a))),
    compares=True,
    gradient=lambda a: np.eye(len(a))[a.argmax()] - np.eye(len(a))[a.argmin()],
)
MAX = Summary("MAX", 0, phrase="best domain", margin=2.0, formula=lambda a: float(_values(a).max()))
TENTH = Summary("worst 10 %", phrase="mean of the worst tenth", formula=worst_fraction)
#: Summaries without a unit, of values that are at least 0.
RELATIVE = tuple(
    Summary(name, better, "", phrase=phrase, digits=4, formula=formula, compares=True)
    for name, better, phrase, formula in (
        ("Jain", 1, "Jain's index", jain),
        ("Gini", -1, "Gini coefficient", gini),
        ("entropy", 1, "entropy", entropy),
    )
)
SUMMARIES = (AVG, STD0, STD, MIN, MAX, GAP, TENTH, *RELATIVE)


class OverDomains(NamedTuple):
    """Summaries of a score over domains, in its unit and direction."""

    average: Summary
    worst: Summary
    spread: Summary
    gap: Summary


@cache
def over_domains(score: Score) -> OverDomains:
    """Return the summaries of a score over domains; the worst of small values is the largest.

    >>> [row.title for row in over_domains(Score("mae", better=-1, unit="days"))]
    ['AVG', 'MAX', 'STD', 'GAP']
    """
    rows = AVG, MIN, STD, GAP
    if score.better <= 0:
        worst = replace(MAX, better=-1, phrase=MIN.phrase)
        rows = replace(AVG, better=-1), worst, STD, replace(GAP, phrase="worst minus best")
    return OverDomains(*(_of(score, row) for row in rows))


def criterion(name: str, score: Score) -> Callable[[ArrayLike], float]:
    """Return the function by which rounds are chosen: ``average``, ``worst`` or ``worst-half``.

    >>> mae = Score("mae", better=-1)
    >>> [criterion(name, mae)([1.0, 2.0, 4.0, 5.0]) for name in ("average", "worst", "worst-half")]
    [3.0, 5.0, 4.5]
    """
    average, worst, _, _ = over_domains(score)
    half = partial(worst_fraction, fraction=0.5, better=score.better)
    by: dict[str, Callable[[ArrayLike], float]]
    by = {"average": average, "worst": worst, "worst-half": half}
    return by[name]


@cache
def summaries(score: Score) -> tuple[Summary, ...]:
    """Return all summaries of a score over domains or clients; the relative ones if it is >= 0.

    >>> [row.title for row in summaries(Score("r2", unit="", low=-1))]
    ['AVG', 'STD', 'STD', 'MIN', 'MAX', 'GAP', 'worst 10 %']
    """
    average, low, _, gap = over_domains(score)
    high = MAX if score.better > 0 else replace(MIN, better=0, phrase=MAX.phrase)
    formula = partial(worst_fraction, better=score.better)
    tenth = replace(TENTH, better=score.better, formula=formula)
    in_unit = (average, STD0, STD, low, high, gap, tenth)
    return (*(_of(score, row) for row in in_unit), *(RELATIVE if score.low >= 0 else ()))


def _of(score: Score, row: Summary) -> Summary:
    of = "" if score.like_accuracy else score.title
    return replace(row, unit=score.unit, digits=score.digits, of=of)


def balanced_accuracy(labels: ArrayLike, predicted: ArrayLike) -> float:
    """Return the mean recall over classes: the fraction of a class that is predicted correctly.

    Classes without a test example are left out. This is ACC in FedISM.

    See Also
    --------
    auc_ovo : Evaluates probabilities instead of predicted classes.

    Examples
    --------
    >>> balanced_accuracy([0, 0, 0, 1], [0, 0, 0, 0])
    0.5
    """
    y = np.asarray(labels)
    if y.size == 0:
        raise ValueError("labels: expected at least one label, got none.")
    _, kind, counts = np.unique(y, return_inverse=True, return_counts=True)
    right = np.bincount(kind, weights=y == np.asarray(predicted))
    return float((right / counts).mean())


def auc_ovo(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Return the one-vs-one macro AUC (Hand and Till 2001), the mean over all pairs of classes.

    For a pair of classes, the AUC is the chance that a random example of the first class has a
    higher predicted probability of this class than a random example of the second class, averaged
    over both orders. Random guessing gives 0.5. This is AUC in FedISM.

    Parameters
    ----------
    labels : array of shape (N,)
        Classes in ``0 .. C - 1``. Classes without a test example are left out.
    probabilities : array of shape (N, C)
        Predicted probabilities; each row sums to 1.

    Returns
    -------
    float
        NaN if fewer than two classes have a test example, or a probability is not finite.

    Examples
    --------
    >>> auc_ovo([0, 1, 1], [[0.9, 0.1], [0.2, 0.8], [0.95, 0.05]])
    0.5
    """
    from sklearn.metrics import roc_auc_score  # late: it takes a second to import

    y, p = np.asarray(labels), np.asarray(probabilities)
    if np.unique(y).size < 2 or not np.isfinite(p).all():
        return math.nan
    if p.shape[1] == 2:  # scikit-learn treats two classes as binary labels
        return float(roc_auc_score(y, p[:, 1]))
    return float(roc_auc_score(y, p, multi_class="ovo", labels=np.arange(p.shape[1])))


def clustering_accuracy(types: ArrayLike, clusters: ArrayLike) -> float:
    """Return the fraction of clients whose type is the most frequent type in their cluster.

    This is the clustering accuracy of FedGCR (Table 3), elsewhere called purity. It is 1 if every
    cluster has a single client, so report it together with the number of clusters.

    Parameters
    ----------
    types, clusters : array of shape (K,)
        Each client's true type and its cluster, as numbers or names.

    See Also
    --------
    adjusted_rand : An index that is corrected for chance.

    Examples
    --------
    >>> clustering_accuracy(["mnist", "mnist", "svhn", "usps"], [0, 0, 1, 1])
    0.75
    """
    from sklearn.metrics.cluster import contingency_matrix  # late: it takes a second to import

    joint = contingency_matrix(*_paired(types, clusters))
    return float(joint.max(axis=0).sum() / joint.sum())


def adjusted_rand(types: ArrayLike, clusters: ArrayLike) -> float:
    """Return the adjusted Rand index: the agreement on pairs of clients, corrected for chance.

    The index (Hubert and Arabie 1985) is 1 if the clusters match the true types. It is 0 on average
    for random clusters, and 0 for a single cluster of several types. The parameters are those of
    `clustering_accuracy`.

    >>> round(adjusted_rand(["mnist", "mnist", "svhn", "usps"], [0, 0, 1, 1]), 4)
    0.5714
    """
    from sklearn.metrics import adjusted_rand_score  # late: it takes a second to import

    return float(adjusted_rand_score(*_paired(types, clusters)))


def _paired(types: ArrayLike, clusters: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    t, c = np.asarray(types), np.asarray(clusters)
    if t.ndim != 1 or t.shape != c.shape:
        raise ValueError(
            f"types of shape {t.shape}, clusters of shape {c.shape}: expected equal shapes (K,)."
        )
    if t.size == 0:
        raise ValueError("types: expected at least one client, got none.")
    return t, c


def _values(a: ArrayLike, low: float = -math.inf) -> Vector:
    values = np.asarray(a, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"Expected a one-dimensional array, got shape {values.shape}.")
    if values.size == 0:
        raise ValueError("Expected at least one value, got none.")
    for wrong, kind in ((~np.isfinite(values), "finite"), (values < low, "non-negative")):
        if wrong.any():
            k = int(wrong.argmax())
            raise ValueError(f"Expected {kind} values, got {values[k]} at index {k}.")
    return values


def _relative(a: ArrayLike) -> Vector:
    """Return the values scaled to a maximum of 1, so that squares neither overflow nor vanish."""
    values = _values(a, low=0)
    top = values.max()
    return values / top if top > 0 else np.ones_like(values)
