"""TERM: Tilted Empirical Risk Minimization (Li, Beirami, Sanjabi, Smith, ICLR 2021)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class TERM(FairStrategy):
    """Minimize a smooth maximum of the clients' losses.

    Let F_k be the received model's loss on client k's data. The paper's objective over groups of
    examples, here the clients, is::

        1/t log( 1/N sum_k n_k exp(t F_k) )

    Its gradient is a weighted sum of the clients' gradients, so the step is a weighted mean of
    their models::

        w_k   = n_k exp(t F_k) / sum_j n_j exp(t F_j)
        theta <- sum_k w_k theta_k

    Every client reports ``received_loss``. t = 0 gives FedAvg; as t grows, all weight goes to the
    client with the largest loss. BatchNorm statistics are averaged with w.

    Parameters
    ----------
    t : float
        Tilt; negative values favor small losses. Default 0.1 (the authors' federated experiments).

    See Also
    --------
    FedEBAPlus : The same weights without the number of examples, and a common gradient step.
    QFFL : Weights by a power of the loss.
    AFL : The maximum without smoothing.

    Notes
    -----
    The authors' federated code omits n_k. It estimates the denominator by a moving average that
    starts at 0. It then averages updates that are already weighted, so that its step is about 1/K
    of the step here.

    Examples
    --------
    >>> from fairflower.strategies import TERM
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 3.0])
    >>> for t in (0.0, 0.5, 5.0):
    ...     print(t, TERM(t=t).weigh(cohort).round(3))
    0.0 [0.5 0.5]
    0.5 [0.269 0.731]
    5.0 [0. 1.]
    """

    paper: ClassVar[str] = "Li, Beirami, Sanjabi, Smith, ICLR 2021"
    measurements = ("received_loss",)
    sums_suffice = True
    private = True

    def __init__(
        self,
        *,
        t: Annotated[float, Range(), Search(0.01, 10, log=True)] = 0.1,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.t = t

    def weigh(self, cohort: Cohort) -> Vector:
        F = cohort.metrics["received_loss"]
        favored = F.max() if self.t > 0 else F.min()
        with np.errstate(over="ignore"):  # minus infinity, and exp(-inf) = 0
            tilt = np.exp(self.t * (F - favored))
        weights = cohort.num_examples * tilt
        return np.asarray(weights / weights.sum())
