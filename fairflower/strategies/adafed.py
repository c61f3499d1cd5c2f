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
    """Take the step that lowers every client's loss in proportion to a power of it.

    With g_k = -Delta_k and F_k the received model's loss on client k's data, the paper makes
    orthogonal vectors, one after another (Eq. 5-6), and takes the shortest of their hull,
    which has a closed form (Eq. 11-14)::

        c_ki = <g_k, gt_i> / ||gt_i||^2
        gt_k = (g_k - sum_{i<k} c_ki gt_i) / (F_k^gamma - sum_{i<k} c_ki)
        d    = sum_k lambda_k gt_k,    lambda_k ~ 1 / ||gt_k||^2,       theta <- theta - eta d

    For this d, <d, gt_k> is the same for all k, so that <d, g_k> = ||d||^2 F_k^gamma: d is the
    shortest vector of the form sum_k v_k g_k / F_k^gamma with sum_k v_k = 1. The order of the
    clients does not matter, and with G_jk = <g_j, g_k>::

        d = sum_k a_k g_k / (a' G a),      a = G^-1 F^gamma

    So it is computed here. Where updates depend on each other, no d may be in proportion to all
    F_k^gamma; then d is 0, as of clients that agree in their updates, but not in their losses.
    Clients that did not move are left out: they would stop all others.

    Only F's proportions turn d, a common factor just shortens it; the paper leaves that to
    eta, which has to be below 2/L min_k F_k^gamma. Here F^gamma is divided by its mean, so that
    clients of one loss and orthogonal updates give Uniform's step. Coefficients may be
    negative; BatchNorm statistics are averaged with equal weights. The clients have to report
    ``received_loss``; a loss of 0 asks for no descent, and gets no ascent.

    Reconstructed: of the paper's text the beginning was at hand. The equations are as two public
    reimplementations number them, and agree with what the text says of d.

    Parameters
    ----------
    gamma : float >= 0
        How much more larger losses fall. Default 1 (these reimplementations).
    eta : float > 0
        Server learning rate. Default 1.
    """

    paper: ClassVar[str] = "Mohajer Hamidi, Yang, TMLR 2024"
    extrapolates = True  # coefficients may be negative
    keeps_agreement = False  # where losses differ it stands still
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
