"""FedEquilibria: Fisher-guided multi-objective aggregation (anonymous, 2025)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range
from fairflower.numerics.min_norm import cosines, min_norm_weights


class FedEquilibria(FairStrategy):
    """Reconcile what clients are sensitive to, and favour those that moved far.

    With F_k the diagonal of client k's Fisher information (Eq. 1-3)::

        w_moo  = argmin || sum_k w_k F_k ||^2   on the simplex
        w_dist = ||Delta_k|| / sum_j ||Delta_j||
        w      = t w_moo + (1 - t) w_dist,        theta <- sum_k w_k theta_k

    Clients have to send an ArrayRecord ``fisher``: for every parameter, under its
    name, the mean over their samples of the squared gradient of the loss, at the
    trained model (``fairflower.clients`` do when asked).

    BatchNorm statistics are averaged with w and enter neither F nor the distance.

    Parameters
    ----------
    t : float in [0, 1]
        1: conflict alone (the paper's MOO_F); 0: distance alone (DIST), nothing
        is measured then. Default 0.7 (paper, Digits; Office-Caltech 0.3, PACS 0.8).
    scale : {"unit", "none"}
        How F_k enter the QP: at unit length, or as measured (Eq. 1 as printed; None,
        which a run config's "none" stands for, means the same).
        As printed, nearly all weight goes to the clients with the smallest
        Fisher, which are those that fit best already: F_k >= 0, so a client with
        <F_i, F_j> >= ||F_i||^2 for all j takes it all. At unit length weight goes
        to the clients that resemble the others least, noisy ones included. On
        Digits unit length was the fairer of the two, and t = 0 fairer than both
        (experiments/fedequilibria-digits-cpu.md).
    space : {"fisher", "gradient"}
        ``"gradient"`` solves the QP over gradients at the received model, asked
        for as ArrayRecord ``gradient`` (the paper's MOO_G).

    Notes
    -----
    The paper defines Delta_k with one sign in the text and with the other in
    Algorithm 1; only theta <- sum_k w_k theta_k agrees with its Eq. 4. No code was
    released, so there is no other variant.
    """

    paper: ClassVar[str] = "FedEquilibria, anonymous, 2025"
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
        self.needs = (space,) if t > 0 else ()

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
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
            "length": np.sqrt(gram.diagonal()),
            "conflict": cosine,
            "norm": solution.norm,
            "residual": solution.residual,
        }
        return self.t * solution.weights + (1 - self.t) * w_dist
