"""Clusters of a cohort's clients, kept from round to round (FedGCR's)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.errors import renamed
from fairflower.numerics.clustering import Clustering, Clusters, cluster, cluster_diagnostics


class ClusteringMixin:
    """A base of what finds clusters: of the representations that it ``needs`` first."""

    STATE: ClassVar[tuple[str, ...]] = ("members", "centres")

    needs: tuple[str, ...]
    seed: int
    num_clusters: int | Literal["auto"]  # T'
    clustering: Clustering  # see `cluster`
    members: dict[int, int]  # client -> its cluster when it was last here
    centres: dict[int, NDArray[np.float64]]  # cluster -> mean representation H, shape (d,)

    def find_clusters(
        self, cohort: Cohort
    ) -> tuple[Clusters, dict[str, NDArray[np.float64] | float]]:
        """The cohort's clusters, named as they were before, and what to tell of them."""
        h = np.array([arrays["h"] for arrays in cohort.measured[self.needs[0]]], np.float64)
        clusters = cluster(
            h,
            cohort.client_ids,
            None if self.num_clusters == "auto" else self.num_clusters,
            clustering=self.clustering,
            sizes=cohort.num_examples,
            members=self.members,
            centres=self.centres,
            seed=self.seed,
        )
        self.members, self.centres = clusters.members, clusters.centres
        return clusters, cluster_diagnostics(h, cohort.num_examples, clusters)


__getattr__ = renamed(__name__, Clustered="ClusteringMixin")
