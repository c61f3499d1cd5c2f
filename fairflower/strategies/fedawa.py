"""FedAWA: Adaptive Weight Aggregation by client vectors (Shi et al., CVPR 2025)."""

from dataclasses import replace
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.numerics.min_norm import cosines
from fairflower.numerics.simplex import softmax
from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class FedAWA(FairStrategy):
    """Learn the clients' weights, so that updates agree with the merged update.

    The server keeps a logit T_k of each client, also while it is absent: n_k / sum_j n_j at first.
    With weights w = softmax(T) and the merged update tau = sum_k w_k Delta_k, a round takes a step
    of size lr on T, Adam's first, and averages the models with the new w::

        minimize   sum_k w_k ( ||Delta_k - tau|| + 1 - cos(theta_k, theta) )

    The objective is that of the released code, which averages with the w before the step, and keeps
    logits by position instead of client. The first weights are almost equal, as T_k <= 1.

    Parameters
    ----------
    lr : float > 0
        Default 0.001 (released code).

    See Also
    --------
    AAggFF : Weights learned by online convex optimization.

    Examples
    --------
    >>> from fairflower.strategies import FedAWA
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0, 0.0], [1.0, 0.2], [-1.0, 0.0]])
    >>> FedAWA(lr=0.1).weigh(cohort).round(2).tolist()
    [0.35, 0.35, 0.29]
    """

    paper: ClassVar[str] = "Shi et al., CVPR 2025"
    single_updates = ("compares each client's update with the merged one", "uniform")
    STATE: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(
        self,
        *,
        lr: Annotated[float, Range(above=0), Search(0.0001, 1, log=True)] = 0.001,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.lr = lr
        self.logits: dict[int, float] = {}  # client -> T_k

    def weigh(self, cohort: Cohort) -> Vector:
        first = dict(zip(cohort.client_ids, cohort.sample_weights.tolist(), strict=True))
        T = np.array([self.logits.get(k, share) for k, share in first.items()])
        zeros = {name: np.zeros_like(array) for name, array in cohort.received.items()}
        models = replace(cohort, received=zeros, returned=(*cohort.returned, cohort.received))
        G, away = cohort.gram(), 1 - cosines(models.gram())[-1, :-1]
        w = softmax(T)
        Gw = G @ w
        apart = np.sqrt(np.maximum(G.diagonal() - 2 * Gw + w @ Gw, 0))  # ||Delta_k - tau||
        pull = np.divide(w, apart, out=np.zeros_like(w), where=apart > 0)
        slope = apart + away - G @ pull + Gw * pull.sum()
        gradient = w * (slope - w @ slope)
        T -= self.lr * gradient / (np.abs(gradient) + 1e-8)
        self.logits.update(zip(cohort.client_ids, T.tolist(), strict=True))
        return softmax(T)
