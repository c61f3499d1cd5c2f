"""FedGCR's cluster centres (Cheng et al., AAAI 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np

from fairflower.aggregation.clusters import ClusteringMixin
from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.arguments import Range
from fairflower.numerics.clustering import Clustering, Variant, resolve_variant


class ClusterCenters(ClusteringMixin, Exchange):
    """The mean representation H_t of every cluster of clients, and whose cluster is which.

    All clients get ``H`` [T', d], and each the row of its own cluster (Algorithm 1:
    ``LocalUpdate(theta, H, T[k])``) as ``cluster`` in its config. One that was never in a
    cohort has no cluster yet and is told none; one that sat rounds out has its last.

    The clusters are the strategy's where it finds any (``FedGCR``). Else they are found
    here in the same way, so that every strategy goes with clients that customise to
    their group: the paper's FedGC without FedGR averages as FedAvg does, and still has H.

    Parameters
    ----------
    num_clusters, clustering, variant
        As ``FedGCR``'s, for where the strategy finds no clusters; without a T', that is
        refused for all variants but ``"adapted"`` in any case.
    """

    name = "centres"
    returned = False
    needs = ("received_representation",)

    def __init__(
        self,
        *,
        clustering: Clustering | Literal["variant"] = "variant",
        num_clusters: Annotated[int | Literal["auto"], Range(1)] = "auto",
        variant: Variant = "adapted",
    ) -> None:
        self.num_clusters = num_clusters
        self.clustering, measured = resolve_variant(variant, num_clusters, clustering)
        self.needs = (measured,)
        self.members, self.centres = {}, {}

    def broadcast(self, server_round: int) -> Arrays:
        if not self.centres:
            return {}
        return {"H": np.array([self.centres[t] for t in sorted(self.centres)], np.float32)}

    def tell(self, client_id: int) -> Mapping[str, float | str]:
        if client_id not in self.members:
            return {}
        return {"cluster": sorted(self.centres).index(self.members[client_id])}

    def collect(self, cohort: Cohort) -> None:
        self.diagnostics = {}
        if cohort.clusters is None:
            _, self.diagnostics = self.find_clusters(cohort)
        else:
            self.members, self.centres = cohort.clusters.members, cohort.clusters.centres
