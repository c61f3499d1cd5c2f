"""Dq-FFL: q-FFL with a power for each client, against selfish clients (FairRFL, 2026)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.strategy import Options
from fairflower.arguments import Range, Search
from fairflower.strategies.fairrfl import Vector, add_median, recover
from fairflower.strategies.qffl import QFFL, losses_of


class DqFFL(QFFL):
    """Take q-FFL's step with recovered updates, and a power of the loss for each client.

    With l_k client k's loss in its last round before this one, their median l_med over the clients
    of the round, and Delta_k' the updates of `FairRFL`::

        q_k   = q l_med / l_k
        h_k   = q_k F_k^(q_k - 1) ||L Delta_k'||^2 + L F_k^q_k
        theta <- theta + L sum_k F_k^q_k Delta_k' / sum_k h_k

    A client without an earlier round has q_k = q. Clients report what `QFFL` needs, and the server
    keeps their last losses. The number of examples does not enter; BatchNorm statistics move with
    the coefficients of Delta_k.

    Parameters
    ----------
    tau : float >= 0
        Deviations above the median from which an update counts as selfish, as in `FairRFL`.
    recovery : {"median", "downscale"}
        What becomes of a selfish update, as in `FairRFL`.
    variant : {"paper", "released"}
        ``"paper"``: q_k as above, so a client with a small loss has a large power. ``"released"``:
        q_k = q l_k / l_med.
    q : float >= 0
        Power of the loss of a client with the median loss. Default 1 (a port of the code).
    lr : float > 0, optional
        1/L, as in `QFFL`.
    rule : {"qfedavg", "weights"}
        ``"weights"``: Delta_k' with weights F_k^q_k, normalized, as in `QFFL`.

    See Also
    --------
    FairRFL : The defense alone.
    QFFL : One power for all clients.

    Notes
    -----
    Neither the paper's text nor the authors' code was available: both variants are as others read
    them, and they are each other's inverse. No source gives q. The step is that of q-FFL with q_k
    in place of q, which the sources do not write out (inferred).

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

    def merge(self, cohort: Cohort) -> Arrays:
        F = losses_of(cohort)
        powers = self._powers(cohort)
        self.last_loss.update(zip(cohort.client_ids, F.tolist(), strict=True))
        logs = powers * np.log(F)
        weights = np.exp(logs - logs.max())
        weights = cohort.cap(weights / weights.sum())
        found = recover(cohort, self.tau, self.recovery)
        self.diagnostics |= {"weights": weights, "powers": powers, "kept": found.kept}
        step = weights
        if self.rule == "qfedavg" and self.q > 0:
            step = self.qfedavg_step(weights, powers, found.lengths**2, F)
        merged = cohort.move(step * found.kept)
        if (rest := float((step * (1 - found.kept))[found.moved].sum())) > 0:
            add_median(cohort, merged, rest)
        return merged

    def _powers(self, cohort: Cohort) -> Vector:
        """Return q_k, shape (K,)."""
        known = [self.last_loss[k] for k in cohort.client_ids if k in self.last_loss]
        median = float(np.median(known)) if known else 1.0
        loss = np.array([self.last_loss.get(k, median) for k in cohort.client_ids])
        ratio = median / loss if self.variant == "paper" else loss / median
        return np.asarray(self.q * ratio)
