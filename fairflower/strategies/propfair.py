"""PropFair's objective on the server (Zhang, Malekmohammadi, Chen, Yu, TMLR 2023)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class PropFair(FairStrategy):
    """Maximize the product of the clients' gains, M minus loss, for a worst-case loss M.

    Let F_k be the received model's loss on client k's data, and p_k = n_k / sum_j n_j. The paper's
    objective is -sum_k p_k log(1 - F_k / M). Its gradient is a weighted sum of the clients'
    gradients, so the step is a weighted mean of their models::

        w_k   ~ n_k / max(M - F_k, epsilon)
        theta <- sum_k w_k theta_k

    Above F_k = M - epsilon, the objective is linear: it continues along its tangent. Every client
    reports ``received_loss``. BatchNorm statistics are averaged with w.

    Parameters
    ----------
    M : float > 0
        Loss at which a client's gain is 0. Default 5, reportedly the largest of the values 2 to 5
        that the paper tries. (The authors' command line sets 2, which is less than the loss of
        guessing among ten classes, 2.3.) In a run, the default is the task's ``loss_range``, which
        is above 5 for tasks whose losses are larger.
    epsilon : float > 0
        Lower bound on M - F_k in the weights. Default 0.2 (the authors' code).

    See Also
    --------
    TERM : Weights by the exponential of the loss.
    fairflower.clients.propfair.PropFair : The paper's algorithm, in which clients minimize this
        objective.

    Notes
    -----
    In the paper's algorithm, clients minimize -log(1 - l / M) for each batch's loss l, and the
    server is FedAvg: ``--strategy fedavg --client propfair``. This strategy has the same objective,
    but for clients that minimize the plain loss; using both would count the losses twice. It is
    reconstructed from the objective in the authors' code and from the paper's abstract.

    Examples
    --------
    >>> from fairflower.strategies import PropFair
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 3.0])
    >>> PropFair(M=5.0).weigh(cohort).round(3).tolist()
    [0.333, 0.667]
    """

    paper: ClassVar[str] = "Zhang, Malekmohammadi, Chen, Yu, TMLR 2023 (objective)"
    measurements = ("received_loss",)
    task_defaults: ClassVar = {"M": "loss_range"}
    sums_suffice = True
    private = True

    def __init__(
        self,
        *,
        M: Annotated[float, Range(above=0), Search(1, 10, log=True)] = 5.0,
        epsilon: Annotated[float, Range(above=0), Search(0.05, 0.5, log=True)] = 0.2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.M, self.epsilon = M, epsilon

    def weigh(self, cohort: Cohort) -> Vector:
        room = np.maximum(self.M - cohort.metrics["received_loss"], self.epsilon)
        weights = cohort.num_examples / room
        return np.asarray(weights / weights.sum())
