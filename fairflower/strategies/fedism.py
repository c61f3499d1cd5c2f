"""FedISM: Fair Federated Learning via Inter-Client Sharpness Matching (Wu et al., IJCAI 2024)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search

#: The least sharpness that counts (released code): a step uphill may, rarely, lead down.
FLOOR = 1e-10

#: A share of the weights that is smaller cannot be divided by.
SMALLEST = np.finfo(np.float64).tiny


class FedISM(FairStrategy):
    """Give weight to the clients on whose data the model lies in a sharp minimum (SAGA).

    With S_k the sharpness of the received model on client k's data (Eq. 8)::

        S_k  = L_k(theta + rho g / ||g||) - L_k(theta),      g = grad L_k(theta)
        wt_k = S_k^q / sum_j S_j^q                                      (Eq. 13)
        w   <- beta wt + (1 - beta) w,   w = wt in the first round      (Eq. 14)
        theta <- sum_k w_k theta_k

    The clients have to report ``sharpness``; those of fairflower measure it on their
    images as they are (the authors': augmented anew for each of the three passes). The
    number of examples does not enter; BatchNorm statistics are averaged by w. This is
    the server's half: the paper's clients also train with GSAM.

    Where some clients are absent, Eq. 14 holds among those that are present, who keep
    together what they held together; a client's first weight is its wt. So while
    sharpness stays the same, so does w: S^q, normalised over whoever takes part. (Where
    all present are new, each holds on average what those seen before hold on average.)

    Parameters
    ----------
    q : float >= 0
        0 gives equal weights, infinity all to the sharpest. Default 2 (paper §4.1).
    beta : float in [0, 1]
        Share of the present round; 1 switches the moving average off. Default 0.5
        (paper §4.1).
    variant : {"paper", "released"}
        ``"released"`` follows the authors' code, which normalises S and adds 1e-10
        to it before the power is taken.
    """

    paper: ClassVar[str] = "Wu et al., IJCAI 2024"
    needs = ("sharpness",)
    STATE: ClassVar[tuple[str, ...]] = ("w",)

    def __init__(
        self,
        *,
        q: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 2.0,
        beta: Annotated[float, Range(0, 1)] = 0.5,
        variant: Literal["paper", "released"] = "paper",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.q, self.beta, self.variant = q, beta, variant
        self.w: dict[int, float] = {}  # client -> weight; they sum to 1

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        S = np.maximum(cohort.metrics["sharpness"], FLOOR)
        self.diagnostics["sharpness"] = S
        wt = self._match(S)
        known = np.array([client in self.w for client in cohort.client_ids])
        held = np.array([self.w.get(client, 0.0) for client in cohort.client_ids])
        mass, share = held.sum(), wt[known].sum()
        # unit: what a weight of 1 in this cohort is among all clients seen so far.
        w, unit = wt, len(cohort) / max(len(self.w), 1)
        if min(mass, share) > SMALLEST:
            w = self.beta * wt + (1 - self.beta) * np.where(known, held / mass * share, wt)
            unit = mass / share
        self.w.update(zip(cohort.client_ids, (w * unit).tolist(), strict=True))
        total = sum(self.w.values())  # grows with every client never seen before
        self.w = {client: held / total for client, held in self.w.items()}
        return np.asarray(w / w.sum())

    def _match(self, S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Eq. 13, shape (K,); the largest S is taken out first, so no power overflows."""
        if self.variant == "released":
            S = S / S.sum() + FLOOR
        power = (S / S.max()) ** self.q
        return np.asarray(power / power.sum())
