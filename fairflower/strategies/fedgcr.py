"""FedGR, the aggregation of FedGCR (Cheng, Yeh, Chen, Pastor, Chen, AAAI 2024)."""

from __future__ import annotations

from typing import ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.strategies.base import FairStrategy, Options
from fairflower.strategies.clusters import cluster, describe
from fairflower.strategies.cohort import Cohort

Values = NDArray[np.float64]


class FedGCR(FairStrategy):
    """Find the clients' types, and favour clients and types with a large loss.

    Every client k of K sends a representation h_k, balanced over its classes (Eq. 4).
    They are divided into T' clusters (`fairflower.strategies.clusters`); a cluster's loss
    is the mean over its clients. In round r = 1, 2, ... (Eq. 3 and 5; Algorithm 1, lines 5 to 9)::

        beta = delta (1 - gamma^(r-1))
        w_k ~ omega_k (L_k^(1-beta) L~_k^beta)^(q+1),    omega_k = n_k / sum_j n_j
        theta <- sum_k w_k theta_k

    with L_k the loss of this round's local training and L~_k its cluster's. Weights are
    normalised, which the paper leaves out. A cluster keeps its number from round to round.

    Clients have to send an ArrayRecord ``received_representation`` with one array ``h``,
    of one length for all (``fairflower.clients`` do when asked, whatever the model), and
    ``train_loss``. BatchNorm statistics are averaged with w.

    Parameters
    ----------
    num_clusters : int, or "auto"
        T'. The paper takes the number of domains, and finds more to do no harm (Table
        4). Default "auto": the number with the least Bayesian information criterion,
        found anew each round (`fairflower.strategies.clusters.bic`).
    q : float
        At least 0; the larger, the more for large losses. Default 1 (paper).
    delta : float in [0, 1]
        Where beta goes: 0 weighs by the clients' own losses alone, 1 by their clusters'.
        Default 0.5 (Algorithm 1).
    gamma : float in [0, 1], or None
        How slowly. None: 0.5 (paper), or the released code's 0.9.
    representation : {"received", "trained"}
        Whose h. Default: the received model's, one for all, as in the authors' code. In
        the paper's text every client takes its own trained model's (the ArrayRecord
        ``representation``), which tells how long it has trained more than what it has.
    variant : {"paper", "released"}
        ``"released"`` follows the authors' code further where it differs from the text:
        the loss is the received model's (``received_loss``), 100 / floor(100 / L), and 1
        for all in the first round; a cluster's loss is weighted by examples; beta =
        delta (1 - gamma^r). (Its h is of three random batches and its mixture
        scikit-learn's default; here they are those of the paper's variant.)
    """

    paper: ClassVar[str] = "Cheng et al., AAAI 2024"
    STATE: ClassVar[tuple[str, ...]] = ("members", "centres")
    #: Powers of a negative loss are no weights.
    NON_NEGATIVE: ClassVar[tuple[str, ...]] = ("train_loss", "received_loss")

    def __init__(
        self,
        *,
        num_clusters: int | str = "auto",
        q: float = 1.0,
        delta: float = 0.5,
        gamma: float | None = None,
        representation: Literal["received", "trained"] = "received",
        variant: Literal["paper", "released"] = "paper",
        **options: Unpack[Options],
    ) -> None:
        if num_clusters != "auto" and not (isinstance(num_clusters, int) and num_clusters >= 1):
            raise ValueError(
                f"num_clusters = {num_clusters!r}: expected a whole number from 1, or 'auto'."
            )
        if not 0 <= q < np.inf:
            raise ValueError(f"q = {q}: expected a number of at least 0.")
        for name, value in (("delta", delta), ("gamma", 0 if gamma is None else gamma)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} = {value}: expected a number in [0, 1].")
        if representation not in ("received", "trained"):
            raise ValueError(
                f"representation = {representation!r}: expected 'received' or 'trained'."
            )
        if variant not in ("paper", "released"):
            raise ValueError(f"variant = {variant!r}: expected 'paper' or 'released'.")
        super().__init__(**options)
        self.num_clusters, self.q, self.delta, self.variant = num_clusters, q, delta, variant
        self.gamma = {"paper": 0.5, "released": 0.9}[variant] if gamma is None else gamma
        self.representation = representation
        h = "representation" if representation == "trained" else "received_representation"
        if variant == "paper":
            self.needs, self.reads = (h,), ("train_loss",)
        else:
            self.needs = (h, "received_loss")
        self.members: dict[int, int] = {}  # client -> its cluster when it was last here
        self.centres: dict[int, Values] = {}  # cluster -> mean representation, H

    def weigh(self, cohort: Cohort) -> Values:
        h = np.array([arrays["h"] for arrays in cohort.measured[self.needs[0]]], np.float64)
        clusters = cluster(
            h,
            cohort.client_ids,
            None if isinstance(self.num_clusters, str) else self.num_clusters,
            sizes=cohort.num_examples,
            members=self.members,
            centres=self.centres,
            seed=self._seed,
        )
        self.members, self.centres = clusters.members, clusters.centres
        self.clusters = clusters
        loss = self._losses(cohort)
        beta = self._beta(cohort.server_round)
        omega = cohort.sample_weights
        shares = omega if self.variant == "released" else np.ones(len(cohort))
        cluster_loss = cluster_means(loss, clusters.ids, shares)
        self.diagnostics |= {"loss": loss, "cluster_loss": cluster_loss, "beta": beta}
        self.diagnostics |= describe(h, cohort.num_examples, clusters)
        return reweigh(omega, loss, cluster_loss, beta, self.q)

    def _losses(self, cohort: Cohort) -> Values:
        """L_k, shape (K,)."""
        if self.variant == "released":
            if cohort.server_round == 1:
                return np.ones(len(cohort))
            hundredth = 100 / np.maximum(cohort.metrics["received_loss"], 1e-10)
            # Above 100 the released code divides by zero.
            return np.asarray(100 / np.maximum(np.floor(hundredth), 1))
        return cohort.metrics["train_loss"]

    def _beta(self, server_round: int) -> float:
        elapsed = server_round if self.variant == "released" else server_round - 1
        return float(self.delta * (1 - self.gamma**elapsed))


def cluster_means(values: Values, clusters: NDArray[np.int64], shares: Values) -> Values:
    """Each client's cluster's mean of the values, weighted by shares; all of shape (K,).

    >>> cluster_means(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 4]), np.ones(3)).tolist()
    [2.0, 2.0, 5.0]
    """
    means = np.empty(len(values))
    for c in np.unique(clusters):
        inside = clusters == c
        means[inside] = np.average(values[inside], weights=shares[inside])
    return means


def reweigh(omega: Values, loss: Values, cluster_loss: Values, beta: float, q: float) -> Values:
    """Weigh by omega (L^(1-beta) L~^beta)^(q+1), normalised; all of shape (K,).

    A loss of zero weighs nothing; where all are zero, omega is left as it is.

    >>> ones = np.ones(2)
    >>> reweigh(ones, np.array([1.0, 3.0]), 2 * ones, beta=0.0, q=1.0).round(6).tolist()
    [0.1, 0.9]
    """
    with np.errstate(divide="ignore"):
        # In logarithms, since powers of large losses overflow; 0 times infinity is left out.
        parts = [s * np.log(x) for s, x in ((1 - beta, loss), (beta, cluster_loss)) if s > 0]
    exponent = (q + 1) * np.sum(parts, axis=0)
    if not np.isfinite(exponent.max()):
        return np.asarray(omega / omega.sum())
    weights = omega * np.exp(exponent - exponent.max())
    return np.asarray(weights / weights.sum())
