"""FairFed: Enabling Group Fairness in Federated Learning (Ezzeldin et al., AAAI 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.carried_weights import current_weights, store_weights
from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class FairFed(FairStrategy):
    """Give weight to clients whose metric is close to the global metric.

    With m_k the received model's metric on client k's data, and the mean over all examples as the
    global metric::

        Delta_k = | m_k - sum_j n_j m_j / sum_j n_j |
        w_k    <- w_k - beta (Delta_k - mean_j Delta_j),     w_k = n_k / sum_j n_j at first
        theta  <- sum_k w_k theta_k

    The gap has no sign: a client far below the others loses weight, as does a client far above.
    The paper uses group fairness metrics computed on each client; any scalar metric that clients
    report will do, and the default is accuracy. BatchNorm statistics are averaged with w.

    Parameters
    ----------
    beta : float >= 0
        Step size of the weights; 0 gives FedAvg. Default 0.1 (FedISM tries 0.1, 0.5 and 1; gaps
        are large compared with weights of 1/K).
    metric : str
        Name of the scalar m_k, which every client reports. Clients of fairflower also measure
        ``received_balanced_accuracy`` (FedISM's experiments).

    Raises
    ------
    ValueError
        If ``metric`` is empty or names a vector.

    See Also
    --------
    FedGA : Weights by the generalization gap.
    FedCE : Weights by the clients' contributions.

    Notes
    -----
    The paper does not say what a negative weight means; here it becomes 0 and the others are
    normalized. With partial participation, the present clients share the weight that they hold
    together, and a client's weight follows its number of examples.

    The code released with FedISM lost the sum over j in the mean: its gap is
    m_k (1 - n_k / sum_j n_j), so a client with a good metric loses weight.

    Examples
    --------
    >>> from fairflower.strategies import FairFed
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [2.0], [5.0]], received_accuracy=[0.9, 0.8, 0.4])
    >>> FairFed(beta=1.0).weigh(cohort).round(3).tolist()
    [0.333, 0.433, 0.233]
    """

    paper: ClassVar[str] = "Ezzeldin et al., AAAI 2023"
    sums_suffice = True
    STATE: ClassVar[tuple[str, ...]] = ("w",)

    def __init__(
        self,
        *,
        beta: Annotated[float, Range(0), Search(0.01, 10, log=True)] = 0.1,
        metric: str = "received_accuracy",
        **options: Unpack[Options],
    ) -> None:
        if not metric or metric in self.VECTORS:
            raise ValueError(
                f"metric = {metric!r}: expected the name of a scalar metric, for example "
                "'received_accuracy'."
            )
        super().__init__(**options)
        self.beta, self.metric = beta, metric
        self.needs = (metric,)
        self.w: dict[int, float] = {}  # client -> multiple of its weight in FedAvg

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        clients, n = cohort.client_ids, cohort.num_examples
        m = cohort.metrics[self.metric]
        gap = np.abs(m - cohort.sample_weights @ m)
        w = np.maximum(current_weights(self.w, clients, n) - self.beta * (gap - gap.mean()), 0)
        w = np.asarray(w / w.sum())  # the sum is at least 1: the steps sum to 0
        store_weights(self.w, clients, n, w)
        self.diagnostics["gap"] = gap
        return w
