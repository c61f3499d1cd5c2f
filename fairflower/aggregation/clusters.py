"""Clusters of clients by representation, kept from round to round (FedGCR)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.numerics.clustering import Clustering, Clusters, cluster, cluster_diagnostics


class ClusteringMixin:
    """Base of strategies and exchanges that cluster clients by their first measurement."""

    STATE: ClassVar[tuple[str, ...]] = ("members", "centers")

    needs: tuple[str, ...]
    _seed: int
    num_clusters: int | Literal["auto"]  # T'
    clustering: Clustering  # see `cluster`
    members: dict[int, int]  # client -> its cluster in the last round that it took part in
    centers: dict[int, NDArray[np.float64]]  # cluster -> mean representation H, shape (d,)

    def find_clusters(
        self, cohort: Cohort
    ) -> tuple[Clusters, dict[str, NDArray[np.float64] | float]]:
        """Return the cohort's clusters, numbered as in earlier rounds, and their diagnostics."""
        h = np.array([arrays["h"] for arrays in cohort.measured[self.needs[0]]], np.float64)
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
