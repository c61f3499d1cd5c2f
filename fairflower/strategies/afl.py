"""AFL: Agnostic Federated Learning (Mohri, Sivek, Suresh, ICML 2019)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.numerics.simplex import current_weights, project, store_weights
from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class AFL(FairStrategy):
    """Minimize the loss of the worst mixture of clients: min over theta, max over lambda.

    Let F_k be the received model's loss on client k's data. Each round updates the model theta and
    the mixture lambda, both from their current values (the paper's Stochastic-AFL)::

        theta  <- sum_k lambda_k theta_k
        lambda <- project(lambda + lr F)    onto the simplex; lambda_k = 1/K initially

    Every client reports ``received_loss``, a mean over its data, so the number of examples is not
    used. BatchNorm statistics are averaged with lambda. With partial participation, only the
    lambda_k of participating clients change, and their sum is kept.

    Parameters
    ----------
    lr : float >= 0
        Step size of lambda, the paper's gamma_lambda; 0 gives equal weights. Default 0.01
        (reportedly the paper's value for Fashion-MNIST).

    See Also
    --------
    QFFL : With ``q=inf, rule="weights"`` it is the "AFL" of FedISM's experiments, which gives all
        weight to the largest loss and has no lambda.
    TERM : Minimizes a smooth maximum of the losses.
    Superquantile : Minimizes the mean loss over the worst share of the data.

    Notes
    -----
    The result is the last model. The paper returns the mean of the models from all rounds.

    Other implementations differ. In some of them lambda is reset in every round and stays within
    one step of 1/K, does not weight the models, or leaves the simplex because a sum in the
    projection omits its last term.

    Examples
    --------
    >>> from fairflower.strategies import AFL
    >>> from fairflower.testing import make_cohort
    >>> strategy = AFL(lr=0.1)
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 3.0])
    >>> [strategy.weigh(cohort).round(3).tolist() for _ in range(3)]
    [[0.5, 0.5], [0.4, 0.6], [0.3, 0.7]]
    """

    paper: ClassVar[str] = "Mohri, Sivek, Suresh, ICML 2019"
    measurements = ("received_loss",)
    sums_suffice = True
    private = True
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

    def weigh(self, cohort: Cohort) -> Vector:
        clients, equal = cohort.client_ids, np.ones(len(cohort))
        lambdas = current_weights(self.lambdas, clients, equal)
        F = cohort.metrics["received_loss"]
        store_weights(self.lambdas, clients, equal, project(lambdas + self.lr * F))
        return lambdas
