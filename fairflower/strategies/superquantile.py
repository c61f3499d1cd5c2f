"""Superquantile aggregation: Delta-FL, once Simplicial-FL (Pillutla, Laguel et al., 2021-2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class Superquantile(FairStrategy):
    """Minimise the mean loss over the share of the data that is served worst.

    With F_k the received model's loss on client k's data, and alpha_k = n_k / sum_j n_j,
    the paper's objective is the superquantile (conditional value at risk) of the losses::

        F_theta = max sum_k pi_k F_k    over mixtures pi with pi_k <= alpha_k / theta

    and the step is its gradient's, the mixture that attains the maximum: clients from the
    largest loss down have alpha_k / theta each, until nothing of the sum 1 is left; those
    of equal loss share what is left in proportion to alpha_k::

        theta <- sum_k pi_k theta_k

    The clients have to report ``received_loss``. theta = 1 is FedAvg, a small one gives all
    to the largest loss. BatchNorm statistics are averaged by pi. A client of weight 0 has
    trained in vain: the authors' clients send their losses first, and those below the
    quantile are spared the round.

    Reconstructed: of the papers' texts only abstracts were at hand, so this is derived from the
    objective that they name. The authors' code takes the client at the quantile in whole, and
    weighs by n_k whoever is at or above it.

    Parameters
    ----------
    theta : float in (0, 1]
        The share, by examples, of the clients that take part. Default 0.5 (one of the
        authors' scripts' 0.8, 0.5, 0.3 and 0.1: there 1 - theta).
    """

    paper: ClassVar[str] = "Pillutla, Laguel, Malick, Harchaoui, Machine Learning 2023 (Delta-FL)"
    needs = ("received_loss",)

    def __init__(
        self,
        *,
        theta: Annotated[float, Range(high=1, above=0), Search(0.1, 1)] = 0.5,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.theta = theta

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        F, alpha = cohort.metrics["received_loss"], cohort.num_examples / cohort.num_examples.sum()
        weights, left = np.zeros(len(cohort)), self.theta
        for loss in np.unique(F)[::-1]:
            alike = loss == F
            mass = alpha[alike].sum()
            weights[alike] = alpha[alike] / mass * min(mass, left)
            left = max(left - mass, 0.0)
        return np.asarray(weights / weights.sum())
