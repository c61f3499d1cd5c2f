"""FairFed: Enabling Group Fairness in Federated Learning (Ezzeldin et al., AAAI 2023)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from fairflower.numerics.group_fairness import COUNTS, DIFFERENCES, GroupMetric, accuracy
from fairflower.numerics.simplex import current_weights, store_weights
from fairflower.registry.measurements import check_scalar
from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class FairFed(FairStrategy):
    """Give more weight to clients whose metric is close to the global metric.

    The paper's metric measures fairness between groups of people, which ``data.groups`` defines.
    Clients count their training examples by group, label and the received model's prediction. F_k
    is the difference between two groups' rates on client k, first minus second, and a_k the
    accuracy. F and a are the same metrics, computed from the counts of all clients. Instead, any
    scalar m_k that clients report may be the metric; the default is the received model's accuracy::

        Delta_k = | F_k - F |;  | a_k - a | if F_k is undefined because client k lacks a group
                  | m_k - sum_j n_j m_j / sum_j n_j | for a scalar
        w_k    <- w_k - beta (Delta_k - mean_j Delta_j),     w_k = n_k / sum_j n_j initially
        theta  <- sum_k w_k theta_k

    The gap Delta_k has no sign: a client far below the global metric loses weight, as does a client
    far above it. BatchNorm statistics are averaged with w.

    Raises ``ValueError`` if ``metric`` is empty or names a vector.

    Parameters
    ----------
    beta : float >= 0
        Step size of the weights; 0 gives FedAvg. Default 0.1 (the smallest of FedISM's values 0.1,
        0.5 and 1, because gaps are large compared with weights of 1/K).
    metric : str
        A metric of group fairness, ``demographic_parity_difference``,
        ``equal_opportunity_difference`` (both in the paper) or ``equalized_odds_difference``; or
        the name of a scalar m_k that every client reports. Default ``received_score``. Clients
        of fairflower can also measure ``received_balanced_accuracy`` (as in FedISM's experiments).

    See Also
    --------
    FedGA : Weights by the generalization gap.
    FedCE : Weights by the clients' contributions.

    Notes
    -----
    The paper does not say how to treat negative weights; here they are set to 0 before the weights
    are normalized. With more than two groups, F is the largest absolute difference between two
    groups; the equalized odds difference has no sign either. With partial participation, only the
    weights of participating clients change, and their sum is kept. If a client's number of examples
    changes, its weight changes in proportion.

    The code released with FedISM omits the sum over j in the mean: its gap is
    m_k (1 - n_k / sum_j n_j), so that a client with a good metric loses weight.

    Examples
    --------
    >>> from fairflower.strategies import FairFed
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [2.0], [5.0]], received_score=[0.9, 0.8, 0.4])
    >>> FairFed(beta=1.0).weigh(cohort).round(3).tolist()
    [0.333, 0.433, 0.233]

    Three clients with six counts for each of two groups of people:

    >>> counts = [[9, 3, 5, 2, 4, 1, 9, 6, 5, 4, 4, 2], *2 * [[9, 4, 5, 3, 4, 1, 9, 3, 5, 2, 4, 1]]]
    >>> cohort = make_cohort([[1.0]] * 3, measured={"received_group_counts": counts})
    >>> FairFed(beta=1.0, metric="equal_opportunity_difference").weigh(cohort).round(3).tolist()
    [0.2, 0.4, 0.4]
    """

    paper: ClassVar[str] = "Ezzeldin et al., AAAI 2023"
    single_updates = (
        "needs each client's counts of people if strategy.metric is one of group fairness",
        "uniform",
    )
    sums_suffice = True  # except by metrics of group fairness
    private = True
    STATE: ClassVar[tuple[str, ...]] = ("w",)

    def __init__(
        self,
        *,
        beta: Annotated[float, Range(0), Search(0.01, 10, log=True)] = 0.1,
        metric: str = "received_score",
        **options: Unpack[Options],
    ) -> None:
        check_scalar(metric, "received_score")
        super().__init__(**options)
        self.beta, self.metric = beta, metric
        #: The metric if it is one of group fairness, which is computed from counts of people.
        self.difference = next((d for d in DIFFERENCES if d.name == metric), None)
        self.measurements = ("received_group_counts",) if self.difference else (metric,)
        self.sums_suffice = not self.difference
        self.w: dict[int, float] = {}  # client -> multiple of its weight in FedAvg

    def weigh(self, cohort: Cohort) -> Vector:
        clients, n = cohort.client_ids, cohort.num_examples
        if self.difference:
            gap = self._group_gap(cohort, self.difference)
        else:
            m = cohort.metrics[self.metric]
            gap = np.abs(m - (n / n.sum()) @ m)
        w = np.maximum(current_weights(self.w, clients, n) - self.beta * (gap - gap.mean()), 0)
        w = np.asarray(w / w.sum())  # the sum is at least 1: the steps sum to 0
        store_weights(self.w, clients, n, w)
        self.diagnostics["gap"] = gap
        return w

    def _group_gap(self, cohort: Cohort, difference: GroupMetric) -> Vector:
        """Return | F_k - F |, or | a_k - a | where the former is undefined, shape (K,)."""
        counts = [a["h"].reshape(-1, len(COUNTS)) for a in cohort.measured["received_group_counts"]]
        # Clients send float32, whose sums are exact only up to 2**24.
        total = np.sum(counts, axis=0, dtype=np.float64)
        overall = difference.signed(total)
        if np.isfinite(overall):
            self.diagnostics["global_difference"] = overall
        gap = np.abs([difference.signed(c) - overall for c in counts])
        by_accuracy = np.abs([accuracy(c) - accuracy(total) for c in counts])
        return np.where(np.isnan(gap), by_accuracy, gap)

    def read_config(self, config: Mapping[str, Any]) -> None:
        """Check that the config names the groups of people that the metric compares."""
        super().read_config(config)
        if self.difference and config.get("data.groups") == "":
            raise ValueError(
                f"strategy.metric = {self.metric!r} compares groups of people, but data.groups is "
                "empty. Set data.groups to a sensitive attribute of the data, such as sex."
            )
