"""EAGLE: Loss Gap Parity for Fairness (Erraji, Perrot, Bellet, 2026), reconstructed."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class EAGLE(FairStrategy):
    """Equalize the clients' loss gaps: each client's loss minus its loss after training alone.

    Let F_k be the received model's loss on client k's training data, and F_k* the lowest loss that
    the client reaches on these data by training alone. The loss gap is r_k = F_k - F_k*, and the
    objective over K clients is::

        mean_k F_k + lambda Var_k(r_k)

    Its gradient is a weighted sum of the clients' gradients, with the weights::

        w_k = (1 + 2 lambda (r_k - mean_j r_j)) / K

    A high loss does not raise a client's weight if the client could not reach a lower loss by
    training alone. Equal gaps, or lambda = 0, give equal weights.

    Every client reports ``received_loss`` and ``local_loss``. To measure ``local_loss``, a client
    trains alone for up to 50 epochs in its first round. The number of examples is not used.
    BatchNorm statistics are averaged with w.

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
    This class is a reconstruction. The paper's abstract and a second-hand account give the
    objective, and say that F_k* is approximated by local training with a stopping criterion. Three
    points are inferred. Models are merged with the weights of the gradients, although several local
    steps are not one gradient step. A negative weight, which would move the model away from a
    client, is set to 0 before the weights are normalized. The stopping criterion is that of
    `fairflower.training.measurements.standalone_loss`.

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
    measurements = ("received_loss", "local_loss")
    sums_suffice = True
    private = True

    def __init__(
        self,
        *,
        lambda_: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.lambda_ = lambda_

    def weigh(self, cohort: Cohort) -> Vector:
        gap = cohort.metrics["received_loss"] - cohort.metrics["local_loss"]
        w = np.maximum(1 + 2 * self.lambda_ * (gap - gap.mean()), 0)
        self.diagnostics["gap"] = gap
        return np.asarray(w / w.sum())  # the sum is at least K: the deviations sum to 0
