"""EAGLE: Loss Gap Parity for Fairness (Erraji, Perrot, Bellet, 2026), as far as it is known."""

from __future__ import annotations

from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class EAGLE(FairStrategy):
    """Even out how much worse clients do than if each had trained alone.

    With F_k the received model's loss on client k's training data, and F_k* the lowest that the
    client reaches on them by itself, its loss gap is r_k = F_k - F_k*. The objective is::

        mean_k F_k + lambda Var_k(r_k)

    and its gradient weighs the clients', of which there are K::

        w_k = (1 + 2 lambda (r_k - mean_j r_j)) / K

    A client whose data are hard, so that it could not do better alone, gets no more weight for
    its high loss. Gaps that are equal, or lambda = 0, are equal weights.

    This is a reconstruction: of the paper the abstract and an account were at hand, which give the
    objective, and that F_k* is approximated by local training with a criterion to stop. Inferred:
    that updates are merged by the weights of the gradients (several local steps are no gradient);
    that a weight below 0, which would drive the model away from a client, is 0 and the others
    are normalised; when training alone stops (`fairflower.training.measurements.local_loss`);
    and lambda's default. Do not report its figures as EAGLE's.

    Clients have to report ``received_loss`` and ``local_loss``, for which each trains up to 50
    epochs alone in its first round. The number of examples does not enter. BatchNorm statistics
    are averaged with w.

    Parameters
    ----------
    lambda_ : float >= 0
        Weight of the gaps' variance, in 1 / nats. Default 1 (of this project).
    """

    paper: ClassVar[str] = "after Erraji, Perrot, Bellet, 2026 (reconstructed)"
    needs = ("received_loss", "local_loss")

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
        return np.asarray(w / w.sum())  # at least K: the gaps' deviations sum to 0
