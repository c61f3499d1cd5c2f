"""FedISM: Fair Federated Learning via Inter-Client Sharpness Matching (Wu et al., IJCAI 2024)."""

from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector

#: Lower bound on the sharpness (released code); the sharpness is negative in rare cases.
FLOOR = 1e-10

#: Weights are divided by a sum only if it is above this value.
SMALLEST = np.finfo(np.float64).tiny


class FedISM(FairStrategy):
    """Give more weight to clients whose loss is sharper at the received model (SAGA).

    Let S_k be the sharpness of the received model on client k's data (Eq. 8)::

        S_k  = L_k(theta + rho g / ||g||) - L_k(theta),      g = grad L_k(theta)
        wt_k = S_k^q / sum_j S_j^q                                      (Eq. 13)
        w   <- beta wt + (1 - beta) w,   w = wt in the first round      (Eq. 14)
        theta <- sum_k w_k theta_k

    This is the server's part of FedISM; the paper's clients also train with GSAM. Every client
    reports ``sharpness``. The number of examples is not used. BatchNorm statistics are averaged
    with w.

    Parameters
    ----------
    q : float >= 0
        Power of the sharpness. 0 gives equal weights; larger values give more weight to clients
        whose sharpness is high. Default 2 (paper §4.1).
    beta : float in [0, 1]
        Share of the current round in the moving average; 1 disables averaging. Default 0.5
        (paper §4.1).
    variant : {"paper", "released"}
        ``"released"`` follows the authors' code, which normalizes S and adds 1e-10 before
        raising it to the power q. In ``"paper"``, S is at least 1e-10.

    See Also
    --------
    FedISMPlus : The same with a radius that grows.
    QFFL : Weights by a power of the loss.

    Notes
    -----
    Clients of fairflower measure sharpness on images without augmentation; the authors' code
    augments them anew for each of its three passes.

    With partial participation, Eq. 14 changes only the weights of participating clients and keeps
    their sum. A client's initial weight is its wt. So if the sharpness is constant and each new
    client's first round has a known client, w is constant, too: S^q, normalized over the
    participating clients. If all participating clients are new, their mean weight is the mean
    weight of the clients seen before, and later rounds correct it.

    Examples
    --------
    >>> from fairflower.strategies import FedISM
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], sharpness=[0.1, 0.2])
    >>> FedISM(q=2.0).weigh(cohort).round(3).tolist()
    [0.2, 0.8]
    """

    paper: ClassVar[str] = "Wu et al., IJCAI 2024"
    measurements = ("sharpness",)
    sums_suffice = True
    private = True
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

    def weigh(self, cohort: Cohort) -> Vector:
        S = np.maximum(cohort.metrics[self.measurements[0]], FLOOR)
        self.diagnostics[self.measurements[0]] = S
        if self.variant == "released":
            S = S / S.sum() + FLOOR
        wt = (S / S.max()) ** self.q  # the maximum avoids overflow
        wt = wt / wt.sum()
        known = np.array([client in self.w for client in cohort.client_ids])
        held = np.array([self.w.get(client, 0.0) for client in cohort.client_ids])
        mass, share = held.sum(), wt[known].sum()
        # unit: factor from weights within this cohort to weights among all clients seen so far.
        w, unit = wt, len(cohort) / max(len(self.w), 1)
        if min(mass, share) > SMALLEST:
            w = self.beta * wt + (1 - self.beta) * np.where(known, held / mass * share, wt)
            unit = mass / share
        self.w.update(zip(cohort.client_ids, (w * unit).tolist(), strict=True))
        total = sum(self.w.values())  # grows with every new client
        self.w = {client: held / total for client, held in self.w.items()}
        return np.asarray(w / w.sum())
