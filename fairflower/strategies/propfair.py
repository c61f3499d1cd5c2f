"""PropFair's objective at the server (Zhang, Malekmohammadi, Chen, Yu, TMLR 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class PropFair(FairStrategy):
    """Maximise the product of what the clients gain over a worst loss M.

    With F_k the received model's loss on client k's data, and p_k = n_k / sum_j n_j, the
    paper's objective is -sum_k p_k log(1 - F_k / M). Its gradient is a sum of the clients'
    gradients, and so is the step, here a mean::

        w_k   ~ n_k / max(M - F_k, epsilon)
        theta <- sum_k w_k theta_k

    The bound by epsilon is the objective continued by its tangent from F_k = M - epsilon on.
    The clients have to report ``received_loss``; BatchNorm statistics are averaged by w.

    The paper's algorithm has no part at the server but FedAvg: its clients minimise
    -log(1 - l / M) of each batch's loss l. That is the client ``propfair``, to be used with
    ``fedavg``. This rule is the same objective for clients that train plainly, as ``term`` is
    TERM's; the two together would count the losses twice. Reconstructed from the objective as
    the authors' code has it: of the paper's text the abstract was at hand.

    Parameters
    ----------
    M : float > 0
        The loss at which a client has nothing. Default 5 (of 2 to 5 that the paper is said to
        try; its text was not at hand. The authors' command line has 2, but a network that
        guesses among ten classes loses 2.3).
    epsilon : float > 0
        Default 0.2 (the authors' code).
    """

    paper: ClassVar[str] = "Zhang, Malekmohammadi, Chen, Yu, TMLR 2023 (objective)"
    needs = ("received_loss",)

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
