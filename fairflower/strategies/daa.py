"""DaA: the aggregation of F2DC, which weights by data size and class balance (CVPR 2026)."""

from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Options, Range, Search, Vector


class DaA(FairStrategy):
    """Weight clients by data size and class balance; the weights are nearly uniform.

    Let n_k^c be client k's number of examples of class c, n_k = sum_c n_k^c, N = sum_j n_j, and Q
    the number of domains::

        d_k = sqrt(1/2 sum_c (n_k^c / N - 1 / Q)^2)
        w_k ~ sigmoid(alpha n_k / N - beta d_k)
        theta <- sum_k w_k theta_k

    The weights are **nearly uniform** by construction: n_k^c / N is far below 1 / Q, so d_k hardly
    varies, and the sigmoid is flat near 0. In the paper's Digits federation, where clients have
    1 to 10 % of the data, the largest weight is 1.06 times the smallest. Every client reports its
    number of examples of each class, ``class_counts``. BatchNorm statistics are averaged with w.

    N is the number of examples of the round's clients. With partial participation it is smaller,
    so that weights are less uniform, and they depend on who takes part.

    Parameters
    ----------
    alpha : float >= 0
        Coefficient of n_k / N, a client's share of the data. Default 1 (paper).
    beta : float >= 0
        Coefficient of d_k, the distance from balanced classes. Default 0.4 (paper).
    domains : int >= 1
        Q, the number of domains. Default 4 (as in each of the paper's three data sets).

    See Also
    --------
    Uniform : Equal weights.
    FedAvg : Weights by number of examples.

    Notes
    -----
    The equations are from second-hand notes on the paper. The released code reads alpha and beta
    but does not use them: it weights clients by number of examples.

    F2DC's modules, which separate robust from domain-related features, are not part of fairflower:
    see docs/methods.md.

    Examples
    --------
    >>> from fairflower.strategies import DaA
    >>> from fairflower.testing import make_cohort
    >>> counts = [[30, 30], [10, 10], [10, 10]]
    >>> cohort = make_cohort([[1.0]] * 3, [60, 20, 20], measured={"class_counts": counts})
    >>> DaA(domains=2).weigh(cohort).round(6).tolist()
    [0.380748, 0.309626, 0.309626]
    """

    paper: ClassVar[str] = "F2DC, CVPR 2026 (DaA)"
    measurements = ("class_counts",)
    single_updates = (
        "computes weights from class counts, which each client would send unmasked",
        "uniform",
    )

    def __init__(
        self,
        *,
        alpha: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 1.0,
        beta: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 0.4,
        domains: Annotated[int, Range(1), Search(2, 8)] = 4,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.alpha, self.beta, self.domains = alpha, beta, domains

    def weigh(self, cohort: Cohort) -> Vector:
        N = cohort.num_examples.sum()
        counts = np.stack([arrays["h"] for arrays in cohort.measured["class_counts"]])
        d = np.sqrt(np.square(counts / N - 1 / self.domains, dtype=np.float64).sum(axis=1) / 2)
        self.diagnostics["distance"] = d
        x = self.alpha * cohort.num_examples / N - self.beta * d
        weights = np.exp(-np.logaddexp(0, -x))  # sigmoid
        return np.asarray(weights / weights.sum())
