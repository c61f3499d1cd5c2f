"""PropFair's objective at the server (Zhang, Malekmohammadi, Chen, Yu, TMLR 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class PropFair(FairStrategy):
    """Maximize the product of the clients' gains over a worst-case loss M.

    With F_k the received model's loss on client k's data, and p_k = n_k / sum_j n_j, the paper's
    objective is -sum_k p_k log(1 - F_k / M). Its gradient is a weighted sum of the clients'
    gradients, so the step is a weighted mean of their models::

        w_k   ~ n_k / max(M - F_k, epsilon)
        theta <- sum_k w_k theta_k

    From F_k = M - epsilon on, the objective continues along its tangent. Every client reports
    ``received_loss``; BatchNorm statistics are averaged with w.

    Parameters
    ----------
    M : float > 0
        Loss at which a client's gain is 0. Default 5 (the largest of the values 2 to 5 that the
        paper is said to try; the authors' command line has 2, but guessing among ten classes has a
        loss of 2.3).
    epsilon : float > 0
        Smallest M - F_k before the tangent. Default 0.2 (the authors' code).

    See Also
    --------
    TERM : Weights by the exponential of the loss.
    fairflower.clients.propfair.PropFair : The paper's algorithm, in which clients minimize this
        objective.

    Notes
    -----
    In the paper's algorithm the server is FedAvg, and clients minimize -log(1 - l / M) of each
    batch's loss l: ``--strategy fedavg --client propfair``. This strategy has the same objective
    for clients that train without it; using both would count the losses twice. Reconstructed from
    the objective in the authors' code and the paper's abstract.

    Examples
    --------
    >>> from fairflower.strategies import PropFair
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 3.0])
    >>> PropFair(M=5.0).weigh(cohort).round(3).tolist()
    [0.333, 0.667]
    """

    paper: ClassVar[str] = "Zhang, Malekmohammadi, Chen, Yu, TMLR 2023 (objective)"
    needs = ("received_loss",)
    sums_suffice = True

    def __init__(
        self,
        *,
        M: Annotated[float, Range(above=0), Search(1, 10, log=True)] = 5.0,
        epsilon: Annotated[float, Range(above=0), Search(0.05, 0.5, log=True)] = 0.2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.M, self.epsilon = M, epsilon

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        room = np.maximum(self.M - cohort.metrics["received_loss"], self.epsilon)
        weights = cohort.num_examples / room
        return np.asarray(weights / weights.sum())
