"""EAGLE: Loss Gap Parity for Fairness (Erraji, Perrot, Bellet, 2026), as far as it is known."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class EAGLE(FairStrategy):
    """Equalize the clients' loss gaps: their loss minus the loss that they reach by training alone.

    With F_k the received model's loss on client k's training data, and F_k* the lowest loss that
    the client reaches there by training alone, the loss gap is r_k = F_k - F_k*. The objective
    over K clients is::

        mean_k F_k + lambda Var_k(r_k)

    and its gradient weights the clients' gradients by::

        w_k = (1 + 2 lambda (r_k - mean_j r_j)) / K

    A client with hard data, which could not do better alone, gets no more weight for its high
    loss. Equal gaps, or lambda = 0, give equal weights.

    Every client reports ``received_loss`` and ``local_loss``. For the latter it trains up to 50
    epochs alone in its first round. The number of examples does not enter. BatchNorm statistics
    are averaged with w.

    Parameters
    ----------
    lambda_ : float >= 0
        Weight of the variance of the gaps, in 1 / nats. Default 1 (this project's choice).

    See Also
    --------
    QFFL : Weights by a power of the loss.
    FedGA : Weights by another gap: the loss of the merged model minus that of the client's model.

    Notes
    -----
    A reconstruction. Known from the paper's abstract and a second-hand account: the objective, and
    that F_k* is approximated by local training with a stopping criterion. Inferred: that models are
    merged with the weights of the gradients, although several local steps are not a gradient step;
    that a negative weight, which would drive the model away from a client, becomes 0 and the others
    are normalized; and the stopping criterion (`fairflower.training.measurements.standalone_loss`).

    Examples
    --------
    >>> from fairflower.strategies import EAGLE
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(
    ...     updates=[[1.0], [5.0]], received_loss=[1.0, 1.0], local_loss=[0.9, 0.5]
    ... )
    >>> EAGLE().weigh(cohort).round(3).tolist()
    [0.3, 0.7]
    """

    paper: ClassVar[str] = "after Erraji, Perrot, Bellet, 2026 (reconstructed)"
    needs = ("received_loss", "local_loss")
    sums_suffice = True

    def __init__(
        self,
        *,
        lambda_: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.lambda_ = lambda_

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        gap = cohort.metrics["received_loss"] - cohort.metrics["local_loss"]
        w = np.maximum(1 + 2 * self.lambda_ * (gap - gap.mean()), 0)
        self.diagnostics["gap"] = gap
        return np.asarray(w / w.sum())  # the sum is at least K: the deviations sum to 0
