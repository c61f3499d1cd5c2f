"""TERM: Tilted Empirical Risk Minimization (Li, Beirami, Sanjabi, Smith, ICLR 2021)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class TERM(FairStrategy):
    """Minimise a smooth maximum of the clients' losses.

    With F_k the received model's loss on client k's data, the gradient of the paper's
    objective over groups of samples, here the clients'::

        1/t log( 1/N sum_k n_k exp(t F_k) )

    is a mean of the clients' gradients, and so is the step::

        w_k   = n_k exp(t F_k) / sum_j n_j exp(t F_j)
        theta <- sum_k w_k theta_k

    The clients have to report ``received_loss``. The number of examples enters as above
    (the authors' federated code leaves it out), so t = 0 is FedAvg; t to infinity is
    all weight on the largest loss. BatchNorm statistics are averaged by w.

    The authors' code estimates the denominator by a moving average that starts at 0, and
    then averages updates that are weighted already: its step is about 1/K of this one.

    Parameters
    ----------
    t : float
        Tilt; negative values favour small losses instead. Default 0.1 (the authors'
        federated experiments).
    """

    paper: ClassVar[str] = "Li, Beirami, Sanjabi, Smith, ICLR 2021"
    needs = ("received_loss",)

    def __init__(
        self,
        *,
        t: Annotated[float, Range(), Search(0.01, 10, log=True)] = 0.1,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.t = t

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        F = cohort.metrics["received_loss"]
        favoured = F.max() if self.t > 0 else F.min()
        with np.errstate(over="ignore"):  # down to minus infinity, whose exp is 0
            tilt = np.exp(self.t * (F - favoured))
        weights = cohort.num_examples * tilt
        return np.asarray(weights / weights.sum())
