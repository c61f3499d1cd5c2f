"""FedGA: Federated Domain Generalization with Generalization Adjustment (CVPR 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.carried_weights import hold, shares
from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class FedGA(FairStrategy):
    """Give weight to the clients that lose most when the models are averaged.

    In round t of R, with client k's own model theta_k of the round before and L_k the
    loss on its data::

        G_k = L_k(theta) - L_k(theta_k),   less their mean
        d   = step (1 - (t - 1) / R)
        w_k <- w_k + d/K G_k / max_j |G_j|,   cut at 0, normalised;   w_k = 1/K at first
        theta <- sum_k w_k theta_k

    The clients have to report ``received_loss``, L_k(theta), and ``trained_loss``,
    L_k(theta_k) after training, both in eval mode on the same data. The number of
    examples does not enter, and BatchNorm statistics are averaged by w. A client that
    sat out is compared with its own last model, one never seen before has the mean gap;
    clients that are present share out among themselves what they hold together.

    Known implementations take the gap with the opposite sign, which gives weight to the
    clients that averaging serves best; measure its two losses on different data; divide
    by zero where all gaps are 0; or are written for three clients.

    Parameters
    ----------
    step : float >= 0
        Default 0.05 (FedISM's experiments; the authors' code: 0.2). 0 gives equal
        weights.
    rounds : int, optional
        R, over which the step falls to nothing. By default ``num-server-rounds`` of the
        config that goes to the clients, as in fairflower's own app; without it, in other
        apps, the step stays as it is.
    """

    paper: ClassVar[str] = "Zhang et al., CVPR 2023 (FedDG-GA)"
    needs = ("received_loss", "trained_loss")
    FROM_CONFIG: ClassVar[Mapping[str, tuple[str, ...]]] = {"rounds": ("num-server-rounds",)}
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
        self.trained: dict[int, float] = {}  # client -> loss of its own last model

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        clients, equal = cohort.client_ids, np.ones(len(cohort))
        gap = self._gaps(cohort)
        w = shares(self.w, clients, equal)
        if gap.any():
            w = np.maximum(w + self._step(cohort) / len(cohort) * gap / np.abs(gap).max(), 0)
            w /= w.sum()
        hold(self.w, clients, equal, w)
        self.trained.update(zip(clients, cohort.metrics["trained_loss"].tolist(), strict=True))
        self.diagnostics["gap"] = gap
        return w

    def _gaps(self, cohort: Cohort) -> NDArray[np.float64]:
        """G less its mean, shape (K,); 0 for a client that has no model of its own yet."""
        own = np.array([self.trained.get(client, np.nan) for client in cohort.client_ids])
        gap = cohort.metrics["received_loss"] - own
        known = np.isfinite(gap)
        return np.where(known, gap - gap[known].mean() if known.any() else 0.0, 0.0)

    def _step(self, cohort: Cohort) -> float:
        done = (cohort.server_round - 1) / self.rounds if self.rounds else 0.0
        return self.step * max(1 - done, 0.0)
