"""FedAWARE: adaptive weighted aggregation of momenta (Zeng et al., AISTATS 2025)."""

from dataclasses import replace
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.directions import with_absent_clients
from fairflower.numerics.min_norm import cosines, min_norm_weights
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search


class FedAWARE(FairStrategy):
    """Step along the shortest combination of all clients' normalized momenta, also absent ones.

    The server keeps a momentum m_k of each client, 0 at first. With u_k = m_k / ||m_k||::

        m_k <- (1 - alpha) m_k + alpha Delta_k           for clients in the round
        lambda = argmin || sum_k lambda_k u_k ||^2       on the simplex, over all clients seen
        theta <- theta + eta sum_k lambda_k u_k

    The norm of the step is at most eta, whatever the clients' learning rate. BatchNorm statistics
    are averaged over the round's clients by their numbers of examples. The equations are those of
    the released code, whose first round has all clients.

    Parameters
    ----------
    alpha : float in (0, 1]
        Share of the new update in a momentum. Default 0.5 (released code).
    eta : float > 0
        Server learning rate. Default 1 (released code).

    See Also
    --------
    FedMGDAPlus : The shortest combination of the round's unit-norm updates, near FedAvg's.

    Examples
    --------
    >>> from fairflower.strategies import FedAWARE
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0, 0.0], [1.0, 0.1], [0.0, 9.0]])
    >>> FedAWARE().merge(cohort)["w"].round(2).tolist()
    [0.5, 0.5]
    """

    paper: ClassVar[str] = "Zeng et al., AISTATS 2025"
    single_updates = ("keeps a momentum of each client's updates", "afl")
    extra = "solvers"
    extrapolates = True  # if updates are shorter than eta
    keeps_agreement = False  # the step's norm differs from the updates'
    STATE: ClassVar[tuple[str, ...]] = ("momenta",)

    def __init__(
        self,
        *,
        alpha: Annotated[float, Range(above=0, high=1), Search(0.05, 1)] = 0.5,
        eta: Annotated[float, Range(above=0), Search(0.01, 4, log=True)] = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.alpha, self.eta = alpha, eta
        self.momenta: dict[int, Arrays] = {}  # client -> m_k

    def merge(self, cohort: Cohort) -> Arrays:
        theta, moved = cohort.received, []
        for client, returned in zip(cohort.client_ids, cohort.returned, strict=True):
            old = self.momenta.get(client, {})
            m = {n: self.alpha * (returned[n] - theta[n]) for n in cohort.parameters}
            m = {n: a + (1 - self.alpha) * old[n] if n in old else a for n, a in m.items()}
            self.momenta[client] = m
            moved.append({**returned, **{n: theta[n] + a for n, a in m.items()}})
        cohort = replace(cohort, returned=tuple(moved))
        now = dict.fromkeys(self.momenta, cohort.server_round)
        everyone, _ = with_absent_clients(cohort, self.momenta, now, 0)
        gram = everyone.gram()
        norms = np.sqrt(gram.diagonal())
        solution = min_norm_weights(cosines(gram), upper=cohort.max_weight)
        K, absent = len(cohort), len(everyone) - len(cohort)
        inverse = np.divide(self.eta, norms, out=np.zeros_like(norms), where=norms > 0)
        shares = cohort.sample_weights
        self.diagnostics.update(weights=shares, coefficients=(solution.weights * inverse)[:K])
        self.diagnostics.update(norm=solution.norm, residual=solution.residual)
        return everyone.move(solution.weights * inverse, np.append(shares, np.zeros(absent)))
