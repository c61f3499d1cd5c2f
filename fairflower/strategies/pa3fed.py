"""PA3Fed: period-aware adaptive aggregation (Huang & Liu, AAAI 2025), reconstructed."""

from math import inf
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector

#: Upper bound on a relative change in the loss, so that sums do not overflow.
LARGEST_CHANGE = 1e12


class PA3Fed(FairStrategy):
    """In critical periods of training, give more weight to clients whose loss changes more.

    Let L_k be the received model's loss on client k's training data, L_k' its value when the client
    last took part, and p_k = n_k / sum_j n_j::

        d_k = |L_k - L_k'| / L_k'
        critical  iff  sum_k p_k d_k >= delta
        w_k = (1 - beta) p_k + beta d_k / sum_j d_j     if critical, else p_k

    Every client reports ``received_loss``. In a client's first round, d_k is the mean d of the
    other clients; if all clients are new, w = p. BatchNorm statistics are averaged with w.

    Parameters
    ----------
    delta : float >= 0
        Mean relative change in the loss at which a period counts as critical. Default 0.001
        (FedEquilibria, Table 5, Digits; Office-Caltech and PACS 0.01).
    beta : float in [0, 1]
        Share of the adaptive weights; 0 gives FedAvg. Default 0.3 (the same table).

    See Also
    --------
    FedAvg : Weights by number of examples.
    FedGA : Weights by the change in the loss due to averaging.

    Notes
    -----
    This class is reconstructed from the paper's abstract and second-hand accounts; the authors'
    code is not public. According to these sources, the method detects critical periods, which have
    the highest information content, and then aggregates by each client's change in performance
    during training. FedEquilibria ran it with parameters delta and beta. Everything else is
    inferred: performance is measured by the loss; delta is a threshold, as in related work, which
    detects critical periods by a relative change of 0.01 (Yan et al., KDD 2023); beta is the share
    of the adaptive weights. Do not report results of this class as results of PA3Fed.

    Examples
    --------
    >>> from fairflower.strategies import PA3Fed
    >>> from fairflower.testing import make_cohort
    >>> strategy = PA3Fed(beta=0.5)
    >>> strategy.weigh(make_cohort([[1.0], [5.0]], received_loss=[2.0, 2.0])).tolist()
    [0.5, 0.5]
    >>> strategy.weigh(make_cohort([[1.0], [5.0]], received_loss=[1.8, 1.4])).tolist()
    [0.375, 0.625]
    """

    paper: ClassVar[str] = "after Huang & Liu, AAAI 2025 (reconstructed)"
    measurements = ("received_loss",)
    sums_suffice = True
    private = True
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
        self.losses: dict[int, float] = {}  # client -> L_k in its last round

    def weigh(self, cohort: Cohort) -> Vector:
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
