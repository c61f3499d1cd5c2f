"""AFL: Agnostic Federated Learning (Mohri, Sivek, Suresh, ICML 2019)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.carried_weights import hold, shares
from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search
from fairflower.numerics.simplex import project


class AFL(FairStrategy):
    """Minimise the loss of the worst mixture of clients: min over theta, max over lambda.

    With F_k the received model's loss on client k's data, one step for each side from
    where both stand (the paper's Stochastic-AFL)::

        theta  <- sum_k lambda_k theta_k
        lambda <- project(lambda + lr F)       onto the simplex, from 1/K

    The clients have to report ``received_loss``: a mean over their own data, so the
    number of their examples does not enter. BatchNorm statistics are averaged by lambda.
    The next round starts from the newest model, not from the mean of all so far, which
    is what the paper returns. Clients that are present take the step among themselves.

    In known implementations lambda starts anew in every round, so that it is never more
    than one step from 1/K; or does not weigh the model at all; or leaves the simplex,
    because a sum in the projection lacks its last term.

    The baseline "AFL" of FedISM's experiments is another rule: no lambda is carried, the
    client with the largest loss gets all the weight. That is `QFFL` with
    ``rule = "weights"`` and an infinite q: ``qffl:rule=weights:q=inf``.

    Parameters
    ----------
    lr : float >= 0
        Step of lambda, gamma_lambda; 0 gives equal weights. Default 0.01 (the value
        reported for the paper's Fashion-MNIST).
    """

    paper: ClassVar[str] = "Mohri, Sivek, Suresh, ICML 2019"
    needs = ("received_loss",)
    STATE: ClassVar[tuple[str, ...]] = ("lambdas",)

    def __init__(
        self,
        *,
        lr: Annotated[float, Range(0), Search(0.001, 1, log=True)] = 0.01,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.lr = lr
        self.lambdas: dict[int, float] = {}  # client -> multiple of 1/K

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        clients, equal = cohort.client_ids, np.ones(len(cohort))
        lambdas = shares(self.lambdas, clients, equal)
        F = cohort.metrics["received_loss"]
        hold(self.lambdas, clients, equal, project(lambdas + self.lr * F))
        return lambdas
