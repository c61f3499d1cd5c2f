"""FedOMG: Data-free On-server Matching Gradient (Nguyen et al., ICLR 2025)."""

from math import sqrt
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.directions import STATIONARY
from fairflower.numerics import Matrix
from fairflower.numerics.min_norm import cosines
from fairflower.numerics.simplex import project
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Vector


class FedOMG(FairStrategy):
    """Step along the mean update, corrected towards a direction on which all updates agree.

    Let g be the plain mean of the updates, and g_w = sum_k w_k Delta_k::

        w = argmin <g_w, g> + kappa ||g|| ||g_w||        on the simplex
        theta <- theta + g + kappa ||g|| / ||g_w|| g_w

    No step within kappa ||g|| of g has a larger smallest inner product with an update (as in
    CAGrad, Liu et al., NeurIPS 2021). If g_w is 0, the step is g. The equations are inferred from
    the released code, which takes 25 steps of gradient descent on logits of w instead of solving
    the problem, and divides the step by 1 + kappa^2.

    Parameters
    ----------
    kappa : float in [0, 1]
        Radius of the correction, relative to ||g||. 0 is FedAvg with equal weights. Default 0.5
        (the released code for domain generalization; 0.25 in its code for federated learning).

    See Also
    --------
    FedMDFG : A common descent direction with a fairness guidance vector.

    Examples
    --------
    >>> from fairflower.strategies import FedOMG
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    >>> FedOMG().merge(cohort)["w"].round(2).tolist()
    [0.74, 0.74]
    """

    paper: ClassVar[str] = "Nguyen et al., ICLR 2025"
    single_updates = ("needs the inner products of the updates", "afl")
    extra = "solvers"
    extrapolates = True
    keeps_agreement = False  # the step is 1 + kappa times as long as equal updates

    def __init__(
        self, *, kappa: Annotated[float, Range(0, 1)] = 0.5, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.kappa = kappa

    def merge(self, cohort: Cohort) -> Arrays:
        gram = cohort.gram()
        w = cohort.cap(agreeing_weights(gram, self.kappa))
        length, norm = sqrt(max(float(gram.mean()), 0.0)), sqrt(max(float(w @ gram @ w), 0.0))
        moves = norm > STATIONARY * np.sqrt(gram.diagonal()).mean()
        c = 1 / len(w) + (self.kappa * length / norm * w if moves else 0 * w)
        self.diagnostics.update(weights=w, coefficients=c, conflict=cosines(gram))
        return cohort.move(c, c / c.sum())


def agreeing_weights(gram: Matrix, kappa: float) -> Vector:
    """Return w of `FedOMG`, shape (K,), from the updates' inner products, shape (K, K)."""
    from scipy.optimize import minimize  # late: slow to import

    equal = np.full(len(gram), 1 / len(gram))
    G = gram / (gram.diagonal().mean() or 1.0)
    b = G @ equal
    radius = kappa * sqrt(max(float(b.mean()), 0.0))

    def objective(w: Vector) -> tuple[float, Vector]:
        slope = G @ w
        norm = sqrt(max(float(w @ slope), 1e-16))
        return b @ w + radius * norm, b + radius * slope / norm

    sum_is_1 = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
    settings = {"bounds": [(0, 1)] * len(G), "constraints": sum_is_1, "tol": 1e-12}
    found = minimize(objective, equal, jac=True, method="SLSQP", **settings).x
    return min(equal, project(np.nan_to_num(found)), key=lambda w: objective(w)[0])
