"""FedMGDA+: Federated Learning Meets Multi-Objective Optimization (Hu et al., TNSE 2022)."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search
from fairflower.numerics.min_norm import cosines, min_norm_weights


class FedMGDAPlus(FairStrategy):
    """A common descent direction of unit-length updates, near the sample weights.

    With u_k = Delta_k / ||Delta_k|| and p_k = n_k / sum_j n_j::

        lambda = argmin || sum_k lambda_k u_k ||^2
                 on the simplex, |lambda_k - p_k| <= epsilon
        theta <- theta + eta sum_k lambda_k u_k

    The step's length is at most eta, whatever the clients' learning rate. A
    client that did not move has u_k = 0: it takes part in the QP as the vector
    that is in conflict with nobody. BatchNorm statistics are averaged by lambda.

    Known implementations drop the box around p (and become plain MGDA), centre it
    at 1/K, or divide by zero for a client that did not move.

    Parameters
    ----------
    epsilon : float in [0, 1]
        Half the side of the box; 0 gives p, 1 plain MGDA. Default 0.1 (FLGo's, and that of
        FedLF's platform). The authors' own code has 1, and u_k = Delta_k unless it is
        told to normalise; that of PropFair, two of whose authors are among them,
        normalises, has 1 as well, or 0.2 from its command line, and centres the box at 1/K.
    eta : float > 0
        Server learning rate. Default 1 (all of these but FedLF's, which has the clients' lr).
    """

    paper: ClassVar[str] = "Hu et al., IEEE TNSE 2022"
    extra = "solvers"
    extrapolates = True  # where updates are shorter than eta
    keeps_agreement = False  # its step has a length of its own

    def __init__(
        self,
        *,
        epsilon: Annotated[float, Range(0, 1)] = 0.1,
        eta: Annotated[float, Range(high=inf, above=0), Search(0.25, 4, log=True)] = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.epsilon, self.eta = epsilon, eta

    def merge(self, cohort: Cohort) -> Arrays:
        gram = cohort.gram()
        lengths = np.sqrt(gram.diagonal())
        p = cohort.sample_weights
        upper = np.minimum(p + self.epsilon, cohort.max_weight)
        solution = min_norm_weights(cosines(gram), p - self.epsilon, upper)
        self.diagnostics.update(
            weights=solution.weights,
            distance=lengths,
            conflict=cosines(gram),
            norm=solution.norm,
            residual=solution.residual,
        )
        inverse = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        return cohort.move(self.eta * solution.weights * inverse, solution.weights)
