"""AAggFF: Pursuing Overall Welfare by Sequential Decision Making (Hahn, Kim, Lee, ICML 2024)."""

from collections.abc import Callable
from math import erf, log, sqrt
from typing import ClassVar, Literal, Unpack

import numpy as np

from fairflower.numerics.min_norm import quadratic_weights
from fairflower.strategies.base import Cohort, FairStrategy, Options, Vector

#: Cumulative distribution functions by name; their argument is a loss divided by the mean loss.
CDFS: dict[str, Callable[[Vector], Vector]] = {
    "weibull": lambda x: 1 - np.exp(-(x**2)),
    "exponential": lambda x: 1 - np.exp(-x),
    "frechet": lambda x: np.exp(-1 / np.maximum(x, 1e-300)),
    "normal": lambda x: np.array([(1 + erf((v - 1) / sqrt(2))) / 2 for v in x.tolist()]),
    "gumbel": lambda x: np.exp(-np.exp(1 - x)),
    "logistic": lambda x: 1 / (1 + np.exp(1 - x)),
}


class AAggFF(FairStrategy):
    """Weight clients by online convex optimization of their losses.

    Let F_k be the received model's loss on client k's data. Weights p on the simplex have the cost
    -log(1 + <p, r>) in a round. The response r_k grows with F_k, but is bounded (Eq. 8)::

        r_k = C_2 CDF(F_k / mean_j F_j),        g = -r / (1 + <p, r>), the cost's gradient

    The next p minimizes the regularized cost of all rounds so far (follow the regularized leader)
    and weights this round's models. The form ``"silo"``, for few clients, approximates the costs to
    second order, with C_2 = 1/K, alpha = 4 and beta = K / 4 (AAggFF-S, Online Newton Step)::

        p <- argmin sum_s <g_s, p> + beta/2 <g_s, p - p_s>^2  +  alpha/2 ||p||^2

    The form ``"device"``, for many clients and a participation rate C, approximates the costs to
    first order, with an entropy regularizer and C_2 = C (AAggFF-D, exponentiated gradient)::

        p_k ~ exp(-sqrt(ln K) sum_s g_sk / ((2 + C) sqrt(t + 1)))

    The device form estimates the responses of all clients: the mean for an absent client, and
    mean + (r_k - mean) / C for a participating client. It linearizes g around the mean, so that
    only differences from the mean remain. The silo form gives an absent client the mean response of
    the participating clients, and treats a new client as absent in all earlier rounds. Both forms
    normalize p over the participating clients.

    Every client reports ``received_loss``. If all losses are equal, equal weights stay equal. The
    number of examples is not used. BatchNorm statistics are averaged with p.

    Parameters
    ----------
    form : {"silo", "device"}
        Approximation of the costs, see above. Default ``"silo"``; the authors' code uses
        ``"device"`` if C < 1.
    cdf : {"weibull", "exponential", "frechet", "normal", "gumbel", "logistic"}
        Cumulative distribution function in r_k. Default ``"weibull"``, 1 - exp(-x^2), as in the
        authors' script for ISIC 2019, their only image data set with few clients; they search over
        all six. The last three are centered at 1.
    variant : {"paper", "released"}
        ``"released"`` follows the authors' code. In the silo form it omits p_s from the square and
        adds beta alpha/2 ||p||^2, so that weights move 1 + K/4 times more slowly. In the device
        form it omits the mean of the participating clients, which then lose weight by taking part.
        Its initial weights are C for each client and sum to C K; this affects only the first g.

    See Also
    --------
    AFL : Minimizes the loss of the worst mixture of clients.
    QFFL : Weights by a power of the loss.

    Notes
    -----
    This class is reconstructed from the paper's abstract and from the authors' code, whose comments
    give the numbers of the equations and the names of the algorithms. In that code the normal
    distribution function decreases with the loss; here it increases.

    Examples
    --------
    >>> from fairflower.strategies import AAggFF
    >>> from fairflower.testing import make_cohort
    >>> strategy = AAggFF()
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 3.0])
    >>> [strategy.weigh(cohort).round(3).tolist() for _ in range(3)]
    [[0.467, 0.533], [0.435, 0.565], [0.403, 0.597]]
    """

    paper: ClassVar[str] = "Hahn, Kim, Lee, ICML 2024"
    extra = "solvers"
    measurements = ("received_loss",)
    sums_suffice = True
    private = True
    STATE: ClassVar[tuple[str, ...]] = ("responses", "means", "gains", "p", "sums", "played")

    def __init__(
        self,
        *,
        form: Literal["silo", "device"] = "silo",
        cdf: Literal[
            "weibull", "exponential", "frechet", "normal", "gumbel", "logistic"
        ] = "weibull",
        variant: Literal["paper", "released"] = "paper",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.form, self.cdf, self.variant = form, cdf, variant
        self.responses: dict[int, Vector] = {}  # silo: client -> K r per round, NaN where absent
        self.means = np.zeros(0)  # silo: mean K r of the participating clients, per round
        self.gains = np.zeros(0)  # silo: K <p, r> per round
        self.p: dict[int, float] = {}  # silo: client -> weight
        self.sums: dict[int, float] = {}  # device: client -> sum of g, up to a common constant
        self.played = 0  # device: rounds

    def weigh(self, cohort: Cohort) -> Vector:
        F = np.maximum(cohort.metrics["received_loss"], 0)
        mean = F.mean()
        r = CDFS[self.cdf](F / mean if mean > 0 else np.ones(len(F)))
        self.diagnostics["response"] = r
        p = self._silo(cohort, r) if self.form == "silo" else self._device(cohort, r)
        return p / p.sum() if p.sum() > 0 else np.full(len(p), 1 / len(p))

    def _silo(self, cohort: Cohort, response: Vector) -> Vector:
        """Return the participating clients' weights after this round, shape (K,)."""
        clients = cohort.client_ids
        K = max(cohort.population, len(self.p.keys() | set(clients)))
        rest = (1 - sum(self.p.values())) / max(K - len(self.p), 1)  # weight of a new client
        for client in clients:
            self.p.setdefault(client, rest)
            self.responses.setdefault(client, np.full(len(self.means), np.nan))
        now = dict(zip(clients, response, strict=True))
        self.means = np.append(self.means, response.mean())
        known = sorted(self.p)
        R = np.repeat(self.means[:, None], K, axis=1)  # (rounds, K), new clients last
        for i, client in enumerate(known):
            responses = np.append(self.responses[client], now.get(client, np.nan))
            self.responses[client] = responses
            R[:, i] = np.where(np.isnan(responses), self.means, responses)
        p = np.array([self.p[client] for client in known] + [rest] * (K - len(known)))
        mass = self._mass(cohort) if len(self.gains) == 0 else 1.0
        self.gains = np.append(self.gains, mass * (p @ R[-1]) / p.sum())
        p = self._newton(R / K, self.gains / K)  # with the K of now, which grows with new clients
        self.p = dict(zip(known, p[: len(known)].tolist(), strict=True))
        return np.array([self.p[client] for client in clients])

    def _mass(self, cohort: Cohort) -> float:
        """Return the sum of all initial weights: 1, or C K in the released variant."""
        return float(len(cohort)) if self.variant == "released" else 1.0

    def _newton(self, R: Vector, gains: Vector) -> Vector:
        """Return the weights of all clients, shape (K,).

        R, [rounds, K], has the clients' responses, and ``gains``, [rounds], their means by weights.
        """
        K = R.shape[1]
        alpha, beta = 4.0, K / 4
        g = -R / (1 + gains)[:, None]
        square = np.einsum("si,sj->ij", g, g)
        if self.variant == "released":
            return quadratic_weights(alpha * (1 + beta) * np.eye(K) + beta * square, g.sum(axis=0))
        past = gains / (1 + gains)  # -<g_s, p_s>
        linear = (g * (1 + beta * past)[:, None]).sum(axis=0)
        return quadratic_weights(alpha * np.eye(K) + beta * square, linear)

    def _device(self, cohort: Cohort, response: Vector) -> Vector:
        """Return the participating clients' weights after this round, unnormalized, shape (K,)."""
        C = len(cohort) / cohort.population
        r = C * response
        mean = r.mean()
        gain = (r - mean) / C - (mean if self.variant == "released" else 0.0)
        mass = self._mass(cohort) if self.played == 0 else 1.0
        self.played += 1
        steps = (-gain / (1 + mass * mean)).tolist()
        for client, step in zip(cohort.client_ids, steps, strict=True):
            self.sums[client] = self.sums.get(client, 0.0) + step
        sums = np.array([self.sums[client] for client in cohort.client_ids])
        scale = sqrt(log(cohort.population)) / ((2 + C) * sqrt(self.played + 1))
        return np.asarray(np.exp(-scale * (sums - sums.min())))
