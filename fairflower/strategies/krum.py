"""Krum, Multi-Krum (Blanchard et al., NeurIPS 2017) and Bulyan (El Mhamdi et al., ICML 2018)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.cohort import Floats
from fairflower.errors import RoundFailed, logger
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Vector
from fairflower.strategies.median import merge_sorted


class Krum(FairStrategy):
    """Take the model of the client whose nearest neighbors are nearest.

    A client's score is the sum of the squared distances of its parameters from those of the
    K - f - 2 nearest of K clients. The lowest score wins, and of equal ones the lowest client id.

    Raises ``RoundFailed`` if K < 2 f + 3, which is refused before a run.

    Parameters
    ----------
    f : int, optional
        Number of clients of a round that may lie. Default: the largest that the bound allows.

    See Also
    --------
    Bulyan : A second step for each coordinate.

    Examples
    --------
    >>> from fairflower.strategies import Krum
    >>> from fairflower.testing import make_cohort
    >>> Krum(f=1).merge(make_cohort([[0.0], [1.0], [1.1], [1.3], [99.0]]))
    {'w': array([1.1])}
    """

    paper: ClassVar[str] = "Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017"
    single_updates = ("needs the distances between the updates", "uniform")
    #: Clients that the bound asks for, for each that lies.
    PER_LIAR: ClassVar[int] = 2
    #: Number of clients whose models are averaged; None: K - f - 2.
    m: int | None = 1

    def __init__(
        self, *, f: Annotated[int | None, Range(0)] = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.f = f
        if f:
            self.fewest_clients = self.PER_LIAR * f + 3, f"{self.PER_LIAR} f + 3 with f = {f}"

    def weigh(self, cohort: Cohort) -> Vector:
        best = self.select(cohort, self.m or max(1, len(cohort) - self.liars(cohort) - 2))
        n = np.zeros(len(cohort))
        n[best] = cohort.num_examples[best]
        return np.asarray(n / n.sum())

    def liars(self, cohort: Cohort) -> int:
        """Return f; raise ``RoundFailed`` if the cohort is too small for it."""
        (fewest, why), K = self.fewest_clients, len(cohort)
        if fewest > K:
            at, name = f"Round {cohort.server_round}", type(self).__name__
            raise RoundFailed(f"{at}: {K} replies are usable, but {name} needs {fewest} ({why}).")
        return max(0, (K - 3) // self.PER_LIAR) if self.f is None else self.f

    def select(self, cohort: Cohort, count: int) -> list[int]:
        """Return the positions of the clients with the lowest scores."""
        gram = cohort.gram()
        squares = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
        np.fill_diagonal(squares, 0)
        f = self.liars(cohort)
        near = max(1, len(cohort) - f - 2)
        if self.f is None and not f and cohort.server_round == 1:
            text = "%s: among %d clients in a round none may lie (f = 0); f = 1 needs %d."
            logger.warning(text, type(self).__name__, len(cohort), self.PER_LIAR + 3)
        scores = np.sort(np.maximum(squares, 0), axis=1)[:, 1 : near + 1].sum(axis=1)
        self.diagnostics["scores"] = scores
        return [int(k) for k in np.argsort(scores, kind="stable")[:count]]


class MultiKrum(Krum):
    """Average the models of the m clients with the lowest scores of Krum, weighted by examples.

    The paper's mean is unweighted; Flower weights it, as here.

    Parameters
    ----------
    f : int, optional
        Number of clients of a round that may lie, as in `Krum`.
    m : int, optional
        Number of clients whose models are averaged. Default: K - f - 2 (the authors' library).

    See Also
    --------
    Krum : The same with m = 1.

    Examples
    --------
    >>> from fairflower.strategies import MultiKrum
    >>> from fairflower.testing import make_cohort
    >>> MultiKrum(m=2).merge(make_cohort([[0.0], [1.0], [1.1], [1.3], [99.0]]))["w"].round(2)
    array([1.05])
    """

    def __init__(
        self,
        *,
        f: Annotated[int | None, Range(0)] = None,
        m: Annotated[int | None, Range(1)] = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(f=f, **options)
        self.m = m


class Bulyan(Krum):
    """Select clients by Krum's score, and average their values near the median of each coordinate.

    Of K clients, the K - 2 f with the lowest scores are selected. Each coordinate becomes the mean
    of the K - 4 f values closest to their median. BatchNorm statistics are merged likewise.

    Raises ``RoundFailed`` if K < 4 f + 3, which is refused before a run. The paper selects one
    client after another, with new scores for those left; Flower all at once, as here.

    Parameters
    ----------
    f : int, optional
        Number of clients of a round that may lie. Default: the largest that the bound allows.

    See Also
    --------
    Krum : The score.

    Examples
    --------
    >>> from fairflower.strategies import Bulyan
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [99.0]])
    >>> Bulyan(f=1).merge(cohort)
    {'w': array([2.])}
    """

    paper: ClassVar[str] = "El Mhamdi, Guerraoui, Rouault, ICML 2018"
    PER_LIAR = 4

    def merge(self, cohort: Cohort) -> Arrays:
        f, K = self.liars(cohort), len(cohort)

        def nearest(values: Floats) -> Floats:
            distances = np.abs(values - np.median(values, axis=0))
            places = np.argsort(distances, axis=0, kind="stable")[: K - 4 * f]
            return np.asarray(np.take_along_axis(values, places, axis=0))

        merged, shares = merge_sorted(cohort, self.select(cohort, K - 2 * f), nearest)
        self.diagnostics["weights"] = shares
        return merged
