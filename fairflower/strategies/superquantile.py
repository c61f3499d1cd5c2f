"""Superquantile aggregation: Delta-FL, or Simplicial-FL (Pillutla, Laguel et al., 2021-2023)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class Superquantile(FairStrategy):
    """Minimize the mean loss over the share of the data with the largest losses.

    Let F_k be the received model's loss on client k's data, and alpha_k = n_k / sum_j n_j. The
    paper's objective is the superquantile (conditional value at risk) of the losses::

        F_theta = max sum_k pi_k F_k    over mixtures pi with pi_k <= alpha_k / theta

    The mixture that attains this maximum weights the models. In descending order of the loss, each
    client gets alpha_k / theta until the weights sum to 1; if the last clients have equal losses,
    they share the remaining weight in proportion to alpha_k::

        theta <- sum_k pi_k theta_k

    Every client reports ``received_loss``. theta = 1 gives FedAvg; a small theta gives all weight
    to the largest loss. BatchNorm statistics are averaged with pi.

    Parameters
    ----------
    theta : float in (0, 1]
        Share of the examples whose losses count. Default 0.5. (The authors' scripts try 0.8, 0.5,
        0.3 and 0.1, given as 1 - theta.)

    See Also
    --------
    AFL : The worst mixture of the losses.
    TERM : A smooth maximum of the losses.

    Notes
    -----
    The training of clients with weight 0 is wasted. The authors' clients avoid this: they send
    their losses first, and clients below the quantile skip the round.

    This class is reconstructed from the objective in the papers' abstracts. The authors' code gives
    the client at the quantile its full weight, and weights the clients at or above it by n_k.

    Examples
    --------
    >>> from fairflower.strategies import Superquantile
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [2.0], [5.0]], received_loss=[1.0, 2.0, 3.0])
    >>> Superquantile(theta=0.5).weigh(cohort).round(3).tolist()
    [0.0, 0.333, 0.667]
    """

    paper: ClassVar[str] = "Pillutla, Laguel, Malick, Harchaoui, Machine Learning 2023 (Delta-FL)"
    measurements = ("received_loss",)
    sums_suffice = True
    private = True

    def __init__(
        self,
        *,
        theta: Annotated[float, Range(high=1, above=0), Search(0.1, 1)] = 0.5,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.theta = theta

    def weigh(self, cohort: Cohort) -> Vector:
        F, alpha = cohort.metrics["received_loss"], cohort.num_examples / cohort.num_examples.sum()
        weights, left = np.zeros(len(cohort)), self.theta
        for loss in np.unique(F)[::-1]:
            tied = loss == F
            mass = alpha[tied].sum()
            weights[tied] = alpha[tied] / mass * min(mass, left)
            left = max(left - mass, 0.0)
        return np.asarray(weights / weights.sum())
