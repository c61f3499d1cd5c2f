"""FedGCR's clusters of clients and their centers (Cheng et al., AAAI 2024)."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.arguments import Range
from fairflower.numerics.clustering import (
    Clustering,
    Clusters,
    Variant,
    cluster,
    cluster_diagnostics,
    resolve_variant,
)


class ClusteringMixin:
    """Base of strategies and exchanges that cluster clients by their first measurement.

    The clusters are kept from round to round.
    """

    STATE: ClassVar[tuple[str, ...]] = ("members", "centers")

    measurements: tuple[str, ...]
    _seed: int
    num_clusters: int | Literal["auto"]  # T'
    clustering: Clustering  # see `cluster`
    members: dict[int, int]  # client -> its cluster in the last round that it took part in
    centers: dict[int, NDArray[np.float64]]  # cluster -> mean representation H, shape (d,)

    def find_clusters(
        self, cohort: Cohort
    ) -> tuple[Clusters, dict[str, NDArray[np.float64] | float]]:
        """Return the cohort's clusters, numbered as in earlier rounds, and their diagnostics."""
        h = np.array([arrays["h"] for arrays in cohort.measured[self.measurements[0]]], np.float64)
        clusters = cluster(
            h,
            cohort.client_ids,
            None if self.num_clusters == "auto" else self.num_clusters,
            clustering=self.clustering,
            sizes=cohort.num_examples,
            members=self.members,
            centers=self.centers,
            seed=self._seed,
        )
        self.members, self.centers = clusters.members, clusters.centers
        return clusters, cluster_diagnostics(h, cohort.num_examples, clusters)


class ClusterCenters(ClusteringMixin, Exchange):
    """Mean representation H_t of each cluster of clients, and each client's cluster.

    All clients receive ``H`` [T', d]. The config of a client's message has ``cluster``, the row of
    its cluster in H (Algorithm 1: ``LocalUpdate(theta, H, T[k])``). A client that has never been in
    a cohort gets no ``cluster``; an absent client keeps its last cluster.

    If the strategy clusters the clients, as ``FedGCR`` does, its clusters are used. Otherwise this
    exchange clusters them in the same way, so that the client ``fedgc`` works with every strategy.
    (In the paper, FedGC without FedGR averages like FedAvg.)

    Parameters
    ----------
    num_clusters, clustering, variant
        As in ``FedGCR``; used if the strategy does not cluster. All variants except ``"adapted"``
        need ``num_clusters`` to be a number.
    """

    name = "centers"
    mean_of = "class"
    returned = False
    measurements = ("received_representation",)

    def __init__(
        self,
        *,
        clustering: Clustering | Literal["variant"] = "variant",
        num_clusters: Annotated[int | Literal["auto"], Range(1)] = "auto",
        variant: Variant = "adapted",
    ) -> None:
        self.num_clusters = num_clusters
        self.clustering, measured = resolve_variant(variant, num_clusters, clustering)
        self.measurements = (measured,)
        self.members, self.centers = {}, {}

    def broadcast(self, server_round: int) -> Arrays:
        if not self.centers:
            return {}
        return {"H": np.array([self.centers[t] for t in sorted(self.centers)], np.float32)}

    def client_config(self, client_id: int) -> Mapping[str, float | str]:
        if client_id not in self.members:
            return {}
        return {"cluster": sorted(self.centers).index(self.members[client_id])}

    def collect(self, cohort: Cohort) -> None:
        self.diagnostics = {}
        if cohort.clusters is None:
            _, self.diagnostics = self.find_clusters(cohort)
        else:
            self.members, self.centers = cohort.clusters.members, cohort.clusters.centers
