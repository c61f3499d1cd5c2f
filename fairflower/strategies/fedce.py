"""FedCE: Fair Federated Medical Image Segmentation via Client Contribution Estimation."""

from typing import ClassVar, Literal, Unpack

import numpy as np

from fairflower.registry.measurements import check_scalar
from fairflower.strategies.base import Cohort, FairStrategy, Options, Vector

#: Lower bound on a contribution (as in NVFlare), so that rounding errors do not decide weights.
FLOOR = 1e-6


class FedCE(FairStrategy):
    """Give more weight to clients whose updates and data differ from those of the others.

    Let c_k be client k's coefficient. Means are taken over all rounds so far::

        A_k = 1 - mean cos(Delta_k, sum_{j != k} c_j Delta_j),         normalized
        B_k = 1 - mean accuracy, on client k's data, of the model without client k,
              theta_-k = (theta - c_k theta_k) / (1 - c_k),            normalized
        c   = mean of A B (or of A + B), normalized
        theta <- sum_k c_k theta_k

    Only client k can compute theta_-k, because it has both the received model and the model that it
    trained last. The server sends each client its coefficient (``client_config``). The client keeps
    its trained model until the next round and reports ``minus_score``. A client that was not
    merged in the previous round gets no coefficient, and its theta_-k is the received model.

    The number of examples is not used, as in the authors' code. The initial coefficients are equal.
    BatchNorm statistics are averaged with c and do not affect the cosines.

    Raises ``ValueError`` if ``metric`` is empty or names a vector.

    Parameters
    ----------
    mode : {"times", "plus"}
        How A and B are combined: A B or A + B. Default ``"times"`` (as in FedISM's experiments;
        NVFlare uses ``"plus"``).
    metric : str
        Metric of theta_-k, a scalar in [0, 1]; other replies are dropped. Default
        ``minus_score``. Clients of fairflower can also measure ``minus_balanced_accuracy`` (as
        in FedISM's experiments).

    See Also
    --------
    FedGA : Weights by the generalization gap.
    FedISM : Weights by sharpness.

    Notes
    -----
    A client's means are over the rounds in which it took part. Its coefficient is averaged as a
    multiple of the mean coefficient of the cohort.

    The code released with FedISM includes an accuracy of 0 for the first round in the mean.
    NVFlare's current code uses the last coefficients instead of their mean. Both assume that all
    clients take part in every round.

    A client subtracts its own model from the merged one. If ``clip_update_norm`` or
    ``clip_update_median`` has shortened its update, it subtracts more than was merged, and its
    theta_-k is further from the other clients' model than it should be.

    Examples
    --------
    >>> from fairflower.strategies import FedCE
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(
    ...     updates=[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], minus_score=[0.8, 0.8, 0.5]
    ... )
    >>> FedCE().weigh(cohort).round(3).tolist()
    [0.112, 0.077, 0.811]
    """

    paper: ClassVar[str] = "Jiang et al., CVPR 2023"
    single_updates = ("compares each client's update with the others'", "fairfed")
    STATE: ClassVar[tuple[str, ...]] = ("rounds", "cosine", "minus", "c", "part")

    def __init__(
        self,
        *,
        mode: Literal["times", "plus"] = "times",
        metric: str = "minus_score",
        **options: Unpack[Options],
    ) -> None:
        check_scalar(metric, "minus_score")
        super().__init__(**options)
        self.mode, self.metric = mode, metric
        self.measurements, self.ranges = (metric,), {metric: (0, 1)}
        self.rounds: dict[int, int] = {}  # client -> rounds that it took part in
        self.cosine: dict[int, float] = {}  # client -> means over these rounds
        self.minus: dict[int, float] = {}
        self.c: dict[int, float] = {}
        self.part: dict[int, float] = {}  # client -> coefficient in the newest model

    def client_config(self, client_id: int) -> dict[str, float]:
        """Return the client's coefficient in the model that it receives; {} if it has none."""
        return {"coefficient": self.part[client_id]} if client_id in self.part else {}

    def weigh(self, cohort: Cohort) -> Vector:
        clients = cohort.client_ids
        c = np.array([self.c.get(client, 1.0) for client in clients])
        for client in clients:
            self.rounds[client] = self.rounds.get(client, 0) + 1
        cosine = _cosines_to_the_rest(cohort.gram(), c / c.sum())
        A = _normalized(1 - self._mean(self.cosine, clients, cosine))
        B = _normalized(1 - self._mean(self.minus, clients, cohort.metrics[self.metric]))
        now = _normalized(A * B if self.mode == "times" else A + B)
        c = self._mean(self.c, clients, now * len(cohort))
        c /= c.sum()
        self.part = dict(zip(clients, cohort.cap(c).tolist(), strict=True))
        self.diagnostics.update(cosine=cosine, A=A, B=B)
        return c

    def _mean(self, means: dict[int, float], clients: tuple[int, ...], values: Vector) -> Vector:
        """Update the running ``means`` with this round's values; return the clients' means (K,)."""
        for client, value in zip(clients, values.tolist(), strict=True):
            before = means.get(client, 0.0)
            means[client] = before + (value - before) / self.rounds[client]
        return np.array([means[client] for client in clients])


def _cosines_to_the_rest(gram: Vector, c: Vector) -> Vector:
    """Return cos(Delta_k, sum_{j != k} c_j Delta_j) from the updates' Gram matrix, shape (K,).

    The cosine is 0 where a vector is zero.
    """
    cosine = np.zeros(len(c))
    for k in range(len(c)):
        rest = np.where(np.arange(len(c)) == k, 0, c)
        norm = np.sqrt(max(float(rest @ gram @ rest), 0.0)) * np.sqrt(gram[k, k])
        if norm > 0:
            cosine[k] = np.clip(rest @ gram[k] / norm, -1, 1)
    return cosine


def _normalized(scores: Vector) -> Vector:
    floored = np.maximum(scores, FLOOR)
    return np.asarray(floored / floored.sum())
