"""FedEquilibria: Fisher-guided multi-objective aggregation (anonymous, 2025)."""

from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np

from fairflower.numerics.min_norm import cosines, min_norm_weights
from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Vector


class FedEquilibria(FairStrategy):
    """Mix two weights per client: one balances Fisher information, one follows update norm.

    Let F_k be the diagonal of client k's Fisher information (Eq. 1-3)::

        w_moo  = argmin || sum_k w_k F_k ||^2   on the simplex
        w_dist = ||Delta_k|| / sum_j ||Delta_j||
        w      = t w_moo + (1 - t) w_dist,        theta <- sum_k w_k theta_k

    Every client sends an ArrayRecord named ``fisher`` with one array per parameter: the squared
    gradient of the loss at the trained model, averaged over the client's examples. Clients of
    fairflower send it on request. BatchNorm statistics are averaged with w; they are not part of
    F_k or of the update norm.

    Parameters
    ----------
    t : float in [0, 1]
        Share of w_moo. 1 uses w_moo alone (the paper's MOO_F). 0 uses w_dist alone (DIST), and
        clients measure nothing. Default 0.7 (paper, Digits; Office-Caltech 0.3, PACS 0.8).
    scale : {"unit", "none"}
        ``"unit"``, the default, scales F_k to unit norm in the QP; ``"none"``, or None, leaves it
        as measured (Eq. 1 as printed). With "none", nearly all the weight goes to the clients with
        the smallest Fisher information, which the model already fits best: since F_k >= 0, a client
        i with <F_i, F_j> >= ||F_i||^2 for all j gets all the weight. With "unit", weight goes to
        the clients that differ most from the others, including noisy clients. So "unit" deviates
        from the paper. experiments/fisher-readings-digits.md and fisher-readings-office.md compare
        both.
    space : {"fisher", "gradient"}
        Vectors in the QP. ``"gradient"`` uses gradients at the received model, which clients send
        in an ArrayRecord named ``gradient`` (the paper's MOO_G).

    See Also
    --------
    FedMGDAPlus : The same QP with unit-norm updates.

    Notes
    -----
    A client with F_k = 0 gets all of w_moo, because the sum is then zero.

    The paper does not say whether F_k is computed for each sample, and at which model the gradients
    of MOO_G are taken. Here F_k is the mean of squared gradients of single samples, in evaluation
    mode, and the gradients are taken at the received model.

    The paper defines Delta_k with different signs in the text and in Algorithm 1; only
    theta <- sum_k w_k theta_k agrees with its Eq. 4. No code was released.

    Examples
    --------
    >>> from fairflower.strategies import FedEquilibria
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(
    ...     updates=[[1.0, 0.0], [0.0, 3.0]], measured={"fisher": [[1.0, 0.0], [0.0, 1.0]]}
    ... )
    >>> FedEquilibria(t=0.5).weigh(cohort).round(3).tolist()
    [0.375, 0.625]
    """

    paper: ClassVar[str] = "FedEquilibria, anonymous, 2025"
    single_updates = ("needs the norm of each client's update and its Fisher diagonal", "fedism")
    extra = "solvers"

    def __init__(
        self,
        *,
        t: Annotated[float, Range(0, 1)] = 0.7,
        scale: Literal["unit", "none"] | None = "unit",
        space: Literal["fisher", "gradient"] = "fisher",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.t, self.scale, self.space = t, scale or "none", space
        self.measurements = (space,) if t > 0 else ()

    def weigh(self, cohort: Cohort) -> Vector:
        distance = np.sqrt(cohort.squared_norms())
        total = distance.sum()
        w_dist = distance / total if total > 0 else np.full(len(cohort), 1 / len(cohort))
        self.diagnostics["distance"] = distance
        if self.t == 0:
            return w_dist
        gram = cohort.gram(self.space)
        cosine = cosines(gram)
        solution = min_norm_weights(cosine if self.scale == "unit" else gram)
        self.diagnostics |= {
            "w_moo": solution.weights,
            "w_dist": w_dist,
            f"{self.space}_norm": np.sqrt(gram.diagonal()),
            "conflict": cosine,
            "norm": solution.norm,
            "residual": solution.residual,
        }
        return self.t * solution.weights + (1 - self.t) * w_dist
