"""FedGA: Federated Domain Generalization with Generalization Adjustment (CVPR 2023)."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.numerics.simplex import current_weights, store_weights
from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class FedGA(FairStrategy):
    """Give more weight to clients whose loss rises most when the models are averaged.

    In round t of R, let theta_k be the model that client k trained in its previous round, and L_k
    the loss on its data::

        G_k = L_k(theta) - L_k(theta_k),   minus its mean over clients
        d   = step (1 - (t - 1) / R)
        w_k <- w_k + d/K G_k / max_j |G_j|,   clipped at 0, normalized;   w_k = 1/K initially
        theta <- sum_k w_k theta_k

    Every client reports ``received_loss``, L_k(theta), and ``trained_loss``, L_k(theta_k) after
    training, both in eval mode on the same data. The number of examples is not used. BatchNorm
    statistics are averaged with w.

    Parameters
    ----------
    step : float >= 0
        Step size of the weights; 0 gives equal weights. Default 0.05 (as in FedISM's experiments;
        0.2 in the authors' code).
    rounds : int, optional
        R, the number of rounds over which the step decays to 0. Default: ``num-server-rounds`` in
        the config sent to the clients, as in `FedISMPlus`.

    See Also
    --------
    FairFed : Weights by the distance from the global metric.
    EAGLE : Weights by the gap to training alone.

    Notes
    -----
    After an absence, theta_k is the model that the client trained last. A new client gets the mean
    gap. With partial participation, only the weights of participating clients change, and their sum
    is kept.

    Other implementations take the gap with the opposite sign, which favors the clients that gain
    most from averaging; measure the two losses on different data; divide by zero if all gaps are 0;
    or support only three clients.

    Examples
    --------
    >>> from fairflower.strategies import FedGA
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedGA(step=0.2)
    >>> cohort = make_cohort([[1.0], [5.0]], received_loss=[1.0, 2.0], trained_loss=[0.9, 0.5])
    >>> [strategy.weigh(cohort).round(3).tolist() for _ in range(2)]
    [[0.5, 0.5], [0.4, 0.6]]
    """

    paper: ClassVar[str] = "Zhang et al., CVPR 2023 (FedDG-GA)"
    measurements = ("received_loss", "trained_loss")
    sums_suffice = True
    private = True
    used_next_round = ("trained_loss",)
    config_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"rounds": ("num-server-rounds",)}
    STATE: ClassVar[tuple[str, ...]] = ("w", "trained")

    def __init__(
        self,
        *,
        step: Annotated[float, Range(0), Search(0.005, 0.5, log=True)] = 0.05,
        rounds: Annotated[int | None, Range(1)] = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.step, self.rounds = step, rounds
        self.w: dict[int, float] = {}  # client -> multiple of 1/K
        self.trained: dict[int, float] = {}  # client -> loss of the model that it trained last

    def weigh(self, cohort: Cohort) -> Vector:
        clients, equal = cohort.client_ids, np.ones(len(cohort))
        trained = np.array([self.trained.get(client, np.nan) for client in clients])
        gap = cohort.metrics["received_loss"] - trained
        known = np.isfinite(gap)  # a new client gets the mean gap, 0
        gap = np.where(known, gap - gap[known].mean() if known.any() else 0.0, 0.0)
        w = current_weights(self.w, clients, equal)
        if gap.any():
            done = (cohort.server_round - 1) / self.rounds if self.rounds else 0.0
            step = self.step * max(1 - done, 0.0)
            w = np.maximum(w + step / len(cohort) * gap / np.abs(gap).max(), 0)
            w /= w.sum()
        store_weights(self.w, clients, equal, w)
        self.note_trained(cohort)
        self.diagnostics["gap"] = gap
        return w

    def note_trained(self, cohort: Cohort) -> None:
        losses = cohort.metrics.get("trained_loss")
        if losses is not None:  # under secure aggregation `weigh` does not know them yet
            self.trained.update(zip(cohort.client_ids, losses.tolist(), strict=True))
