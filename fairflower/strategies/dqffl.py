"""Dq-FFL: q-FFL with a separate power for each client, and with a defense (FairRFL, 2026)."""

from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np

from fairflower.numerics.simplex import softmax
from fairflower.strategies.base import Arrays, Cohort, Options, Range, Search, Vector
from fairflower.strategies.fairrfl import add_median, recover
from fairflower.strategies.qffl import QFFL, losses_of


class DqFFL(QFFL):
    """Take q-FFL's step with a separate power for each client, after FairRFL's defense.

    Let l_k be client k's loss in the previous round in which it took part, l_med the median of l_k
    over the round's clients, and Delta_k' the updates after the defense of `FairRFL`::

        q_k   = q l_med / l_k
        h_k   = q_k F_k^(q_k - 1) ||L Delta_k'||^2 + L F_k^q_k
        theta <- theta + L sum_k F_k^q_k Delta_k' / sum_k h_k

    In a client's first round, q_k = q. Every client reports ``received_loss``, and the server
    stores it for the next round. The number of examples is not used. BatchNorm statistics are
    updated with the coefficients of Delta_k.

    Parameters
    ----------
    tau : float >= 0
        Number of deviations above the median norm at which an update counts as selfish, as in
        `FairRFL`. Default 2.5.
    recovery : {"median", "downscale"}
        How a selfish update is shortened, as in `FairRFL`. Default ``"median"``.
    variant : {"paper", "released"}
        ``"paper"`` computes q_k as above: a client with a small loss has a large power.
        ``"released"`` computes q_k = q l_k / l_med.
    q : float >= 0
        Power for a client whose last loss is the median. Default 1 (a port of the authors' code).
    lr : float > 0, optional
        1/L, as in `QFFL`.
    rule : {"qfedavg", "weights"}
        ``"weights"`` averages Delta_k' with weights F_k^q_k, normalized, as in `QFFL`.

    See Also
    --------
    FairRFL : The same defense with equal weights.
    QFFL : The same power for all clients.

    Notes
    -----
    Neither the paper's text nor the authors' code was available. ``"paper"`` follows a second-hand
    account of the text, and ``"released"`` a port of the code, where the ratio is inverted.
    The paper's q is unknown. The step is inferred: it is q-FFL's step with q_k in place of q.

    Examples
    --------
    >>> from fairflower.strategies import DqFFL
    >>> from fairflower.testing import make_cohort
    >>> strategy = DqFFL(rule="weights")
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 3.0])
    >>> for _ in range(2):
    ...     strategy.merge(cohort)["w"].round(3).tolist()
    [4.0]
    [3.701]
    >>> strategy.diagnostics["powers"].round(3).tolist()
    [2.0, 0.667]
    """

    paper: ClassVar[str] = "FairRFL, IEEE TETC 2026 (Dq-FFL)"
    sums_suffice = False  # the defense looks at every update
    single_updates = ("needs the norm of each client's update", "qffl")
    STATE: ClassVar[tuple[str, ...]] = ("last_loss",)

    def __init__(
        self,
        *,
        tau: Annotated[float, Range(0), Search(1, 10, log=True)] = 2.5,
        recovery: Literal["median", "downscale"] = "median",
        variant: Literal["paper", "released"] = "paper",
        q: Annotated[float, Range(0), Search(0.001, 15, log=True)] = 1.0,
        lr: Annotated[float | None, Range(above=0)] = None,
        rule: Literal["qfedavg", "weights"] = "qfedavg",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(q=q, lr=lr, rule=rule, **options)
        self.tau, self.recovery, self.variant = tau, recovery, variant
        self.last_loss: dict[int, float] = {}  # client -> its loss in its last round

    def weigh(self, cohort: Cohort) -> Vector:
        return softmax(self._powers(cohort) * np.log(losses_of(cohort)))

    def merge(self, cohort: Cohort) -> Arrays:
        F, powers = losses_of(cohort), self._powers(cohort)
        weights = cohort.cap(softmax(powers * np.log(F)))
        self.last_loss.update(zip(cohort.client_ids, F.tolist(), strict=True))
        defended = recover(cohort, self.tau, self.recovery)
        self.diagnostics |= {"weights": weights, "powers": powers, "kept": defended.kept}
        step = weights
        if self.rule == "qfedavg" and self.q > 0:
            step = self.qfedavg_step(weights, powers, defended.norms**2, F)
        merged = cohort.move(step * defended.kept)
        if (rest := float((step * (1 - defended.kept))[defended.moved].sum())) > 0:
            add_median(cohort, merged, rest)
        return merged

    def _powers(self, cohort: Cohort) -> Vector:
        """Return the clients' powers q_k, shape (K,)."""
        known = [self.last_loss[k] for k in cohort.client_ids if k in self.last_loss]
        median = float(np.median(known)) if known else 1.0
        loss = np.array([self.last_loss.get(k, median) for k in cohort.client_ids])
        ratio = median / loss if self.variant == "paper" else loss / median
        return np.asarray(self.q * ratio)
