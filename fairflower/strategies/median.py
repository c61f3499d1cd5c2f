"""Median and trimmed mean (Yin et al., ICML 2018), and the geometric median (RFA, TSP 2022)."""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.cohort import BLOCK, Block, Floats, sum_in_order
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search, Vector


class Median(FairStrategy):
    """Take the median of the clients' values in every coordinate.

    The number of examples is not used. BatchNorm statistics are merged likewise, and counters
    averaged. The diagnostic ``weights`` has each client's share of the values that were taken.

    See Also
    --------
    GeometricMedian : The median of whole updates.

    Examples
    --------
    >>> from fairflower.strategies import Median
    >>> from fairflower.testing import make_cohort
    >>> Median().merge(make_cohort([[1.0, 2.0], [2.0, 9.0], [9.0, 1.0]]))
    {'w': array([2., 2.])}
    """

    paper: ClassVar[str] = "Yin, Chen, Ramchandran, Bartlett, ICML 2018"
    single_updates = ("needs each coordinate of every update", "uniform")

    def merge(self, cohort: Cohort) -> Arrays:
        K = len(cohort)
        cut = self.cut(K)
        merged, shares = merge_sorted(cohort, range(K), lambda values: values[cut : K - cut])
        self.diagnostics["weights"] = shares
        return merged

    def cut(self, K: int) -> int:
        """Return how many of K values are left out at each end."""
        return (K - 1) // 2


class TrimmedMean(Median):
    """Average the clients' values in every coordinate, without the smallest and the largest.

    Of K values, int(beta K) are left out at each end. The rest is as in `Median`.

    Parameters
    ----------
    beta : float in [0, 0.5)
        Share of the values that is left out at each end. Default 0.2 (Flower's).

    See Also
    --------
    Bulyan : A trimmed mean of clients that Krum selects.

    Examples
    --------
    >>> from fairflower.strategies import TrimmedMean
    >>> from fairflower.testing import make_cohort
    >>> TrimmedMean(beta=0.25).merge(make_cohort([[1.0], [2.0], [4.0], [99.0]]))
    {'w': array([3.])}
    """

    def __init__(
        self, *, beta: Annotated[float, Range(0, 0.499)] = 0.2, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.beta = beta

    def cut(self, K: int) -> int:
        return int(self.beta * K)


class GeometricMedian(FairStrategy):
    """Take the point with the smallest mean distance from the clients' models (RFA).

    Smoothed Weiszfeld iterations from w_k = alpha_k = n_k / sum_j n_j; distances are those of
    parameters alone::

        w_k <- alpha_k / max(nu, || theta_k - sum_j w_j theta_j ||),   normalized
        theta <- sum_k w_k theta_k

    Parameters
    ----------
    nu : float > 0
        Smallest distance that counts. Default 1e-5 (the authors' code).
    iterations : int >= 1
        Number of iterations. Default 4 (the authors' code, which may stop earlier).

    See Also
    --------
    Median : The median in every coordinate.

    Examples
    --------
    >>> from fairflower.strategies import GeometricMedian
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [90.0, 90.0]])
    >>> GeometricMedian(iterations=50).merge(cohort)["w"].round(2).tolist()
    [0.5, 0.5]
    """

    paper: ClassVar[str] = "Pillutla, Kakade, Harchaoui, IEEE TSP 2022 (RFA)"
    single_updates = ("needs the distances between the updates", "uniform")

    def __init__(
        self,
        *,
        nu: Annotated[float, Range(above=0), Search(1e-6, 1e-2, log=True)] = 1e-5,
        iterations: Annotated[int, Range(1), Search(1, 20)] = 4,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.nu, self.iterations = nu, iterations

    def weigh(self, cohort: Cohort) -> Vector:
        w = alpha = np.asarray(cohort.num_examples / cohort.num_examples.sum())
        gram = cohort.gram()
        for _ in range(self.iterations):
            squares = np.maximum(gram.diagonal() - 2 * gram @ w + w @ gram @ w, 0)
            w = alpha / np.maximum(np.sqrt(squares), self.nu)
            w /= w.sum()
        return w


def merge_sorted(
    cohort: Cohort, members: Sequence[int], choose: Callable[[Floats], Floats]
) -> tuple[Arrays, Vector]:
    """Return theta plus the mean of the updates that ``choose`` keeps in each coordinate.

    ``choose`` maps updates (n, b) of the clients at the positions ``members``, sorted in every
    coordinate, to neighbors (m, b). Also returns each client's share of the values kept, (K,).
    """
    equal = np.zeros(len(cohort))
    equal[members] = 1 / len(members)
    merged = cohort.average(equal)  # for the counters

    def merge(block: Block) -> Vector:
        rows = np.array([block.update(k) for k in members])
        kept = choose(np.sort(rows, axis=0))
        merged[block.name].reshape(-1)[block.part] = block.received + kept.mean(axis=0)
        shared = (rows >= kept.min(axis=0)) & (rows <= kept.max(axis=0))
        return np.asarray((shared / shared.sum(axis=0)).sum(axis=1)[:, None])

    shares = np.zeros(len(cohort))
    shares[members] = sum_in_order(cohort.each(cohort.floats, merge, BLOCK), len(members))
    return merged, shares / shares.sum()
