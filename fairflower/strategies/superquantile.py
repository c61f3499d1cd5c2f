"""Superquantile aggregation: Delta-FL, or Simplicial-FL (Pillutla, Laguel et al., 2021-2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class Superquantile(FairStrategy):
    """Minimize the mean loss over the worst-served share of the data.

    With F_k the received model's loss on client k's data, and alpha_k = n_k / sum_j n_j, the
    paper's objective is the superquantile (conditional value at risk) of the losses::

        F_theta = max sum_k pi_k F_k    over mixtures pi with pi_k <= alpha_k / theta

    The gradient's weights are the mixture that attains the maximum. In descending order of the
    loss, clients get alpha_k / theta each until the weights sum to 1; clients with equal losses
    share the rest in proportion to alpha_k::

        theta <- sum_k pi_k theta_k

    Every client reports ``received_loss``. theta = 1 gives FedAvg; a small theta gives all weight
    to the largest loss. BatchNorm statistics are averaged with pi.

    Parameters
    ----------
    theta : float in (0, 1]
        Share of the examples that counts. Default 0.5 (among 0.8, 0.5, 0.3 and 0.1 in the authors'
        scripts, which have 1 - theta).

    See Also
    --------
    AFL : The worst mixture of the losses.
    TERM : A smooth maximum of the losses.

    Notes
    -----
    Clients with weight 0 have trained for nothing: the authors' clients send their losses first,
    and clients below the quantile skip the round.

    Reconstructed from the objective named in the papers' abstracts. The authors' code takes the
    client at the quantile with its full weight, and weights the clients at or above it by n_k.

    Examples
    --------
    >>> from fairflower.strategies import Superquantile
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [2.0], [5.0]], received_loss=[1.0, 2.0, 3.0])
    >>> Superquantile(theta=0.5).weigh(cohort).round(3).tolist()
    [0.0, 0.333, 0.667]
    """

    paper: ClassVar[str] = "Pillutla, Laguel, Malick, Harchaoui, Machine Learning 2023 (Delta-FL)"
    needs = ("received_loss",)
    sums_suffice = True

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
            tied = loss == F
            mass = alpha[tied].sum()
            weights[tied] = alpha[tied] / mass * min(mass, left)
            left = max(left - mass, 0.0)
        return np.asarray(weights / weights.sum())
