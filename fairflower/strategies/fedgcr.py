"""FedGR, the aggregation of FedGCR (Cheng, Yeh, Chen, Pastor, Chen, AAAI 2024)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.clusters import Clustered
from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search
from fairflower.numerics.clustering import Clustering, Variant, resolve_variant

Values = NDArray[np.float64]


class FedGCR(Clustered, FairStrategy):
    """Find the clients' types, and favour clients and types with a large loss.

    Every client k of K sends a representation h_k, balanced over its classes (Eq. 4).
    They are divided into T' clusters; a cluster has a loss, too. In round r = 1, 2, ...
    (Eq. 3 and 5; Algorithm 1, lines 5 to 9)::

        beta = delta (1 - gamma^(r-1))
        w_k ~ omega_k (L_k^(1-beta) L~_k^beta)^(q+1),    omega_k = n_k / sum_j n_j
        theta <- sum_k w_k theta_k

    with L_k the client's loss and L~_k its cluster's. There are three variants of it, and
    the default, ``"adapted"``, is neither the paper's text nor the authors' code. ``fedgc``,
    the local training, has the same three: name one for both, or each says its own::

                              paper                released                adapted
        h_k (Eq. 4)           by the trained       by the model received   by the model received
                              model, all images    (all images; 3          (all images)
                                                   batches there)
        clusters              Gaussian mixture     Gaussian mixture        k-means on T' - 1 axes,
                                                                           by n / (n + 100)
        T'                    given                given                   given or "auto"
        L_k                   sum of the training  100 // (100 / mean      mean training loss of
                              loss over images     loss of the model       the images
                              (Eq. 2), of all of   received); 1 in the
                              Eq. 6 by ``fedgc``   first round
        L~_k                  mean over clients    mean over images        mean over clients
        beta / delta          1 - .5^(r-1)         1 - .9^r                1 - .5^(r-1)
        sum of the weights    1; in Algorithm 1    1                       1
                              whatever it is

    The paper's text is not the default. L_k as a sum weighs a client by n^(q+2), small
    ones least of all; h_k by the trained model tells how long it has trained more than
    what it has; T' is not known where the types are not. In one run each with ``fedgc`` of
    the same variant, average and worst domain were 77.5 and 65.9 % by the paper's text,
    82.5 and 70.2 % released, 81.9 and 70.6 % adapted (``fairflower run --config
    experiments/fedgcr-digit-five-cpu.toml --engine inline --set strategy.variant=V --set
    client.variant=V``: DIF 10, T' = 5, seed 0; rounds 8 to 12; AMD EPYC, one thread); on
    another processor released and adapted swap places in the worst domain, so one run does not
    tell these two apart. How well clusters are found is measured in
    `fairflower.numerics.clustering`. Everywhere a cluster keeps its number from round to round.

    Clients have to send an ArrayRecord ``received_representation`` (the paper's variant:
    ``representation``) with one array ``h``, of one length for all (``fairflower.clients``
    do when asked, whatever the model), and ``train_loss`` (released: ``received_loss``).
    BatchNorm statistics are averaged with w.

    Parameters
    ----------
    num_clusters : int, or "auto"
        T'. The paper takes the number of domains, and finds more to do no harm (Table
        4). Default "auto": the number with the least Bayesian information criterion,
        found anew each round (`fairflower.numerics.clustering.bic`); refused for the
        paper's and the released variant.
    q : float
        At least 0; the larger, the more for large losses. Default 1 (paper).
    delta : float in [0, 1]
        Where beta goes: 0 weighs by the clients' own losses alone, 1 by their clusters'.
        Default 0.5 (Algorithm 1).
    gamma : float in [0, 1], or None
        How slowly. None: 0.5 (paper), or the released variant's 0.9.
    clustering : {"variant", "kmeans", "gmm"}
        How; default: as the variant has it.
    representation : {"variant", "received", "trained"}
        By which model; default: as the variant has it.
    variant : {"adapted", "paper", "released"}
        See above. Default "adapted".

    Raises
    ------
    ValueError
        Naming the argument that is wrong, or that the variant has to be given.
    """

    paper: ClassVar[str] = "Cheng et al., AAAI 2024"
    extra = "solvers"
    #: Powers of a negative loss are no weights.
    NON_NEGATIVE: ClassVar[tuple[str, ...]] = ("train_loss", "received_loss")

    def __init__(
        self,
        *,
        num_clusters: Annotated[int | Literal["auto"], Range(1)] = "auto",
        q: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 1.0,
        delta: Annotated[float, Range(0, 1)] = 0.5,
        gamma: Annotated[float | None, Range(0, 1)] = None,
        clustering: Clustering | Literal["variant"] = "variant",
        representation: Literal["variant", "received", "trained"] = "variant",
        variant: Variant = "adapted",
        **options: Unpack[Options],
    ) -> None:
        self.clustering, h = resolve_variant(variant, num_clusters, clustering, representation)
        super().__init__(**options)
        self.num_clusters, self.q, self.delta, self.variant = num_clusters, q, delta, variant
        if gamma is None:
            gamma = 0.9 if variant == "released" else 0.5
        self.gamma = gamma
        if variant == "released":
            self.needs = (h, "received_loss")
        else:
            self.needs, self.reads = (h,), ("train_loss",)
        self.members, self.centres = {}, {}

    def weigh(self, cohort: Cohort) -> Values:
        self.clusters, told = self.find_clusters(cohort)
        loss = self._losses(cohort)
        elapsed = cohort.server_round - (0 if self.variant == "released" else 1)
        beta = float(self.delta * (1 - self.gamma**elapsed))
        omega = cohort.sample_weights
        shares = omega if self.variant == "released" else np.ones(len(cohort))
        cluster_loss = cluster_means(loss, self.clusters.ids, shares)
        self.diagnostics |= {"loss": loss, "cluster_loss": cluster_loss, "beta": beta, **told}
        return reweigh(omega, loss, cluster_loss, beta, self.q)

    def _losses(self, cohort: Cohort) -> Values:
        """L_k, shape (K,)."""
        if self.variant == "released":
            if cohort.server_round == 1:
                return np.ones(len(cohort))
            hundredth = 100 / np.maximum(cohort.metrics["received_loss"], 1e-10)
            # Above 100 the released code divides by zero.
            return np.asarray(100 / np.maximum(np.floor(hundredth), 1))
        mean = cohort.metrics["train_loss"]
        return mean * cohort.num_examples if self.variant == "paper" else mean


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
