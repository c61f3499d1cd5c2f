"""PA3Fed: period-aware adaptive aggregation (Huang & Liu, AAAI 2025), as far as it is known."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search

#: Of a loss, as a multiple of what it was; sums of larger ones could overflow.
LARGEST_CHANGE = 1e12


class PA3Fed(FairStrategy):
    """In critical periods of training, more weight for clients whose loss changes more.

    With L_k the received model's loss on client k's training data, L_k' what it was
    when the client last took part, and p_k = n_k / sum_j n_j::

        d_k = |L_k - L_k'| / L_k'
        critical  iff  sum_k p_k d_k >= delta
        w_k = (1 - beta) p_k + beta d_k / sum_j d_j     while critical, else p_k

    This is a reconstruction, not the authors' rule: their code is not public, and of the
    paper only the abstract and others' accounts were at hand. Known from these: critical
    periods, those of the highest information content, are found; in them aggregation
    follows each client's own change of performance during training; FedEquilibria ran
    it with a delta and a beta. Inferred: all the rest. Performance is taken to be the
    loss; a relative change of 0.01 is how related work finds critical periods (Yan et
    al., KDD 2023), and one of delta's values; beta is taken to be the share of the
    adaptive weights. Do not report its figures as PA3Fed's.

    A client without earlier loss counts with the mean d of the others; in the first
    round nothing is known and w = p. BatchNorm statistics are averaged with w. Clients
    have to report ``received_loss``.

    Parameters
    ----------
    delta : float >= 0
        Default 0.001 (FedEquilibria, Table 5, Digits; Office-Caltech and PACS 0.01).
    beta : float in [0, 1]
        0 is FedAvg. Default 0.3 (the same table).
    """

    paper: ClassVar[str] = "after Huang & Liu, AAAI 2025 (reconstructed)"
    needs = ("received_loss",)
    STATE: ClassVar[tuple[str, ...]] = ("losses",)

    def __init__(
        self,
        *,
        delta: Annotated[float, Range(0, inf), Search(0.0001, 0.1, log=True)] = 0.001,
        beta: Annotated[float, Range(0, 1)] = 0.3,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.delta, self.beta = delta, beta
        self.losses: dict[int, float] = {}  # client -> L_k when it last took part

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        p, losses = cohort.sample_weights, cohort.metrics["received_loss"]
        before = np.array([self.losses.get(k, np.nan) for k in cohort.client_ids])
        known = np.isfinite(before)
        self.losses |= dict(zip(cohort.client_ids, losses.tolist(), strict=True))
        d = np.zeros(len(cohort))
        change = np.abs(losses - before)[known] / np.maximum(before[known], 1e-12)
        d[known] = np.minimum(change, LARGEST_CHANGE)
        if known.any():
            d[~known] = d[known].mean()
        critical = bool(p @ d >= self.delta and d.sum() > 0)
        self.diagnostics |= {"change": d, "critical": float(critical)}
        return (1 - self.beta) * p + self.beta * d / d.sum() if critical else p
