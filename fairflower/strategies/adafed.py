"""AdaFed: Adaptive Common Descent Direction (Mohajer Hamidi, Yang, TMLR 2024)."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search
from fairflower.numerics.min_norm import cosines, proportional_descent


class AdaFed(FairStrategy):
    """Take the step that lowers each client's loss in proportion to a power of that loss.

    With g_k = -Delta_k and F_k the received model's loss on client k's data, the paper constructs
    orthogonal vectors in sequence (Eq. 5-6) and takes the shortest vector of their hull, which
    has a closed form (Eq. 11-14)::

        c_ki = <g_k, gt_i> / ||gt_i||^2
        gt_k = (g_k - sum_{i<k} c_ki gt_i) / (F_k^gamma - sum_{i<k} c_ki)
        d    = sum_k lambda_k gt_k,    lambda_k ~ 1 / ||gt_k||^2,       theta <- theta - eta d

    For this d, <d, gt_k> is equal for all k, and therefore <d, g_k> = ||d||^2 F_k^gamma. So d is
    the shortest vector of the form sum_k v_k g_k / F_k^gamma with sum_k v_k = 1, and the order of
    the clients does not matter. This class computes d directly, with G_jk = <g_j, g_k>::

        d = sum_k a_k g_k / (a' G a),      a = G^-1 F^gamma

    Every client reports ``received_loss``. Coefficients may be negative; BatchNorm statistics are
    averaged with equal weights.

    Parameters
    ----------
    gamma : float >= 0
        Power of the loss: the larger, the more large losses fall. Default 1 (two public
        reimplementations).
    eta : float > 0
        Server learning rate. Default 1.

    See Also
    --------
    FedMGDAPlus : A common descent direction of unit-length updates.
    FedMDFG : A common descent direction with a fairness guidance vector.

    Notes
    -----
    Linearly dependent updates may allow no d with these proportions; d is then 0. An example is
    clients with equal updates and different losses. Clients whose update is zero are left out,
    because they would stop all other clients. A client with loss 0 gets no descent and no ascent.

    The direction of d depends on the proportions of F alone; a common factor of F scales d. The
    paper leaves the scale to eta, which must be below 2/L min_k F_k^gamma. Here F^gamma is divided
    by its mean, so that clients with equal losses and orthogonal updates get Uniform's step.

    Reconstructed from the beginning of the paper's text and from two public reimplementations,
    which number the equations and agree with the text.

    Examples
    --------
    >>> from fairflower.strategies import AdaFed
    >>> from fairflower.testing import make_cohort
    >>> strategy = AdaFed()
    >>> cohort = make_cohort(updates=[[1.0, 0.0], [0.0, 1.0]], received_loss=[1.0, 3.0])
    >>> strategy.merge(cohort)["w"].round(3).tolist()
    [0.2, 0.6]
    """

    paper: ClassVar[str] = "Mohajer Hamidi, Yang, TMLR 2024"
    extrapolates = True  # coefficients may be negative
    keeps_agreement = False  # equal updates with different losses give no step
    needs = ("received_loss",)

    def __init__(
        self,
        *,
        gamma: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 1.0,
        eta: Annotated[float, Range(high=inf, above=0), Search(0.25, 4, log=True)] = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.gamma, self.eta = gamma, eta

    def merge(self, cohort: Cohort) -> Arrays:
        gram, F = cohort.gram(), np.maximum(cohort.metrics["received_loss"], 0)
        moved = gram.diagonal() > 0
        F = np.minimum(F / F[moved].max(), 1) if F[moved].any() else np.ones(len(F))
        power = F**self.gamma
        share = power / power[moved].mean() if moved.any() else power
        coefficients = self.eta * proportional_descent(gram, share)
        equal = np.full(len(cohort), 1 / len(cohort))
        self.diagnostics |= {
            "weights": equal,
            "coefficients": coefficients,
            "conflict": cosines(gram),
        }
        return cohort.move(coefficients, equal)
