"""FairFed: Enabling Group Fairness in Federated Learning (Ezzeldin et al., AAAI 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.carried_weights import hold, shares
from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class FairFed(FairStrategy):
    """Give weight to the clients on which the model does as it does on everybody.

    With m_k the received model's metric on client k's data, and the sample-weighted
    mean of them as the global one::

        Delta_k = | m_k - sum_j n_j m_j / sum_j n_j |
        w_k    <- w_k - beta (Delta_k - mean_j Delta_j),     w_k = n_k / sum_j n_j at first
        theta  <- sum_k w_k theta_k

    The gap has no sign: a client far below the others loses weight, as does one far
    above. It was made for metrics of group fairness that are computed on each client,
    which any client may report; here it is accuracy by default. The number of examples
    enters twice, as above. The paper does not say what a negative weight is; here it
    is 0, and the others are normalised. BatchNorm statistics are averaged by w.

    Clients that are present share out among themselves what they hold together, and a
    client's weight follows its number of examples: with beta = 0 it is FedAvg.

    The code released with FedISM lost the sum over j in its mean: its gap is
    m_k (1 - n_k / sum_j n_j), so a client loses weight by being good.

    Parameters
    ----------
    beta : float >= 0
        Step of the weights, 0 gives FedAvg. Default 0.1 (FedISM tries 0.1, 0.5 and 1;
        gaps are large beside weights of 1/K).
    metric : str
        Name of the scalar m_k, which the clients have to report. Those of fairflower
        also measure ``received_balanced_accuracy`` (FedISM's experiments).
    """

    paper: ClassVar[str] = "Ezzeldin et al., AAAI 2023"
    STATE: ClassVar[tuple[str, ...]] = ("w",)

    def __init__(
        self,
        *,
        beta: Annotated[float, Range(0), Search(0.01, 10, log=True)] = 0.1,
        metric: str = "received_accuracy",
        **options: Unpack[Options],
    ) -> None:
        if not metric or metric in self.VECTORS:
            raise ValueError(f"metric = {metric!r}: expected the name of a scalar metric.")
        super().__init__(**options)
        self.beta, self.metric = beta, metric
        self.needs = (metric,)
        self.w: dict[int, float] = {}  # client -> multiple of its weight in FedAvg

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        clients, n = cohort.client_ids, cohort.num_examples
        m = cohort.metrics[self.metric]
        gap = np.abs(m - cohort.sample_weights @ m)
        w = np.maximum(shares(self.w, clients, n) - self.beta * (gap - gap.mean()), 0)
        w = np.asarray(w / w.sum())  # at least 1: what some lose, others win
        hold(self.w, clients, n, w)
        self.diagnostics["gap"] = gap
        return w
