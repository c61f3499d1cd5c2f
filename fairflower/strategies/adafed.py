"""AdaFed: Adaptive Common Descent Direction (Mohajer Hamidi, Yang, TMLR 2024)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.numerics.min_norm import cosines, proportional_descent
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search


class AdaFed(FairStrategy):
    """Lower each client's loss in proportion to a power of that loss.

    Let g_k = -Delta_k, and let F_k be the received model's loss on client k's data. The paper
    orthogonalizes the g_k one after another (Eq. 5-6) and takes the shortest vector in the convex
    hull of the results, which has a closed form (Eq. 11-14)::

        c_ki = <g_k, gt_i> / ||gt_i||^2
        gt_k = (g_k - sum_{i<k} c_ki gt_i) / (F_k^gamma - sum_{i<k} c_ki)
        d    = sum_k lambda_k gt_k,    lambda_k ~ 1 / ||gt_k||^2,       theta <- theta - eta d

    For this d, <d, gt_k> is the same for all k, and therefore <d, g_k> = ||d||^2 F_k^gamma. Hence d
    is the shortest vector of the form sum_k v_k g_k / F_k^gamma with sum_k v_k = 1, and the order
    of the clients does not matter. This class computes d directly, with G_jk = <g_j, g_k>::

        d = sum_k a_k g_k / (a' G a),      a = G^-1 F^gamma

    Every client reports ``received_loss``. The coefficients of the updates may be negative.
    BatchNorm statistics are averaged with equal weights.

    Parameters
    ----------
    gamma : float >= 0
        Power of the loss. Larger values lower large losses more. Default 1 (as in two public
        reimplementations).
    eta : float > 0
        Server learning rate. Default 1.

    See Also
    --------
    FedMGDAPlus : A common descent direction of unit-norm updates.
    FedMDFG : A common descent direction with a fairness guidance vector.

    Notes
    -----
    If updates are linearly dependent, this d may not exist; the step is then 0. This
    happens, for example, if clients have equal updates but different losses. Clients with a zero
    update are ignored, because they would force d = 0. A loss of 0 does not change, to first order.

    Multiplying all losses by one factor changes the norm of d, but not its direction. In the
    paper eta compensates for this: for L-smooth losses it has to be below 2/L min_k F_k^gamma. Here
    F^gamma is divided by its mean, so that the step is that of `Uniform` if all losses are equal
    and the updates are orthogonal and of equal norm.

    This class is reconstructed from the first part of the paper's text and from two public
    reimplementations, which cite the equations by number and agree with the text.

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
    measurements = ("received_loss",)
    single_updates = ("needs the inner products of the updates", "qffl")

    def __init__(
        self,
        *,
        gamma: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 1.0,
        eta: Annotated[float, Range(above=0), Search(0.25, 4, log=True)] = 1.0,
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
