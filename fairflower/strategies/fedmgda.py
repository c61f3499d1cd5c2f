"""FedMGDA+: Federated Learning Meets Multi-Objective Optimization (Hu et al., TNSE 2022)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.numerics.min_norm import cosines, min_norm_weights
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search


class FedMGDAPlus(FairStrategy):
    """Take a common descent direction of unit-norm updates, with weights near those of FedAvg.

    Let u_k = Delta_k / ||Delta_k|| and p_k = n_k / sum_j n_j::

        lambda = argmin || sum_k lambda_k u_k ||^2
                 on the simplex, |lambda_k - p_k| <= epsilon
        theta <- theta + eta sum_k lambda_k u_k

    The norm of the step is at most eta, whatever the clients' learning rate. A zero update
    (u_k = 0) shortens the sum, so its client gets as much weight as epsilon allows; with
    epsilon = 1 the model then does not change. BatchNorm statistics are averaged with lambda.

    Parameters
    ----------
    epsilon : float in [0, 1]
        Largest difference between lambda_k and p_k. 0 gives lambda = p, 1 gives plain MGDA. Default
        0.1 (as in FLGo and in FedLF's code).
    eta : float > 0
        Server learning rate. Default 1.

    See Also
    --------
    FedMDFG : A common descent direction with a fairness guidance vector.
    FedLF : A common descent direction per layer.
    AdaFed : A descent in proportion to the losses.

    Notes
    -----
    The authors' code sets epsilon = 1, and normalizes updates only on request. PropFair's code, by
    two of the same authors, normalizes updates, sets epsilon = 1 (0.2 on its command line) and
    bounds |lambda_k - 1/K|. Other implementations have no bound, which makes them plain MGDA, or
    divide by zero for a zero update. All set eta = 1, except that FedLF's code uses the clients'
    learning rate.

    Examples
    --------
    >>> from fairflower.strategies import FedMGDAPlus
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedMGDAPlus(epsilon=1.0)
    >>> cohort = make_cohort(updates=[[1.0, 0.0], [1.0, 0.1], [0.0, 9.0]])
    >>> strategy.merge(cohort)["w"].round(2).tolist()
    [0.5, 0.5]
    >>> strategy.diagnostics["weights"].round(2).tolist()
    [0.5, 0.0, 0.5]
    """

    paper: ClassVar[str] = "Hu et al., IEEE TNSE 2022"
    single_updates = ("needs the inner products of the updates", "afl")
    extra = "solvers"
    extrapolates = True  # if updates are shorter than eta
    keeps_agreement = False  # the step's norm differs from the updates'

    def __init__(
        self,
        *,
        epsilon: Annotated[float, Range(0, 1)] = 0.1,
        eta: Annotated[float, Range(above=0), Search(0.25, 4, log=True)] = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.epsilon, self.eta = epsilon, eta

    def merge(self, cohort: Cohort) -> Arrays:
        gram = cohort.gram()
        norms = np.sqrt(gram.diagonal())
        p = cohort.sample_weights
        upper = np.minimum(p + self.epsilon, cohort.max_weight)
        conflict = cosines(gram)
        solution = min_norm_weights(conflict, p - self.epsilon, upper)
        self.diagnostics.update(
            weights=solution.weights,
            distance=norms,
            conflict=conflict,
            norm=solution.norm,
            residual=solution.residual,
        )
        inverse = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
        return cohort.move(self.eta * solution.weights * inverse, solution.weights)
