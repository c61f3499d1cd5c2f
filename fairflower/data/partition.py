"""Dividing a benchmark's domains among clients.

Imports ``flwr_datasets`` and so ``datasets`` and ``pandas``: import this only to prepare.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner, SizePartitioner

from fairflower.data.federation import DataError


class DomainPartitioner(Partitioner):  # type: ignore[misc]
    """``clients_per_domain`` disjoint partitions of every domain, drawn at random.

    Partition ``d * clients_per_domain + j`` is the j-th of the d-th domain. A domain's
    draw depends on the seed, on its own name and on its own rows, and on nothing else: not
    on the other domains, and not on anything that drew random numbers before. (In the
    code of FedHEAL the number of rounds moves the partition.)

    Parameters
    ----------
    sizes
        Domain -> rows in each of its partitions, in the order of the partitions.
    clients_per_domain
        Partitions of each domain (papers: 5).
    seed
        Of the draw.
    partition_by
        The column that names a row's domain.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        clients_per_domain: int,
        seed: int = 0,
        partition_by: str = "domain",
    ) -> None:
        super().__init__()
        self._sizes = dict(sizes)
        self._clients_per_domain = clients_per_domain
        self._seed = seed
        self._partition_by = partition_by

    @property
    def num_partitions(self) -> int:
        """Domains times clients per domain."""
        return len(self._sizes) * self._clients_per_domain

    def load_partition(self, partition_id: int) -> Dataset:
        """The rows of one partition.

        Raises
        ------
        DataError
            If a domain has fewer rows than its partitions need.
        """
        domain, share = self._locate(partition_id)
        return self._partitioners[domain].load_partition(share)

    @property
    def partition_id_to_indices(self) -> dict[int, list[int]]:
        """The rows of ``dataset`` in each partition."""
        indices = {}
        for partition_id in range(self.num_partitions):
            domain, share = self._locate(partition_id)
            places = self._partitioners[domain].partition_id_to_indices[share]
            indices[partition_id] = self._rows[domain][places].tolist()
        return indices

    def _locate(self, partition_id: int) -> tuple[str, int]:
        domain, share = divmod(partition_id, self._clients_per_domain)
        return list(self._sizes)[domain], share

    @cached_property
    def _rows(self) -> dict[str, npt.NDArray[np.int64]]:
        """Each domain's rows in random order, no more of them than its partitions need."""
        column = np.asarray(self.dataset[self._partition_by][:])
        rows = {}
        for domain, size in self._sizes.items():
            own = np.flatnonzero(column == domain)
            needed = size * self._clients_per_domain
            if not 0 < needed <= len(own):
                raise DataError(
                    f"Domain {domain!r} has {len(own)} training images, but "
                    f"{self._clients_per_domain} clients x {size} images = {needed} were asked "
                    "for. Change data.clients-per-domain, data.fraction or "
                    "data.examples-per-client."
                )
            rows[domain] = own[draw(self._seed, domain, "train").permutation(len(own))[:needed]]
        return rows

    @cached_property
    def _partitioners(self) -> dict[str, SizePartitioner]:
        partitioners = {}
        for domain, rows in self._rows.items():
            partitioners[domain] = SizePartitioner([self._sizes[domain]] * self._clients_per_domain)
            partitioners[domain].dataset = self.dataset.select(rows)
        return partitioners


def draw(seed: int, domain: str, split: str) -> np.random.Generator:
    """The random numbers for one split of one domain."""
    return np.random.default_rng([seed, *f"{domain}/{split}".encode()])
