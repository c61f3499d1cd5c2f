"""Dividing a benchmark's domains among clients.

Imports ``flwr_datasets`` and so ``datasets`` and ``pandas``: import this only to prepare.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner, SizePartitioner

from fairflower.data.federation import DataError


class DomainPartitioner(Partitioner):  # type: ignore[misc]
    """``clients_per_domain`` partitions of every domain, drawn at random and disjoint.

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
    every_value_of
        A column of which every partition is to hold each value that its domain has, such
        as the label. Values that are missing in the draw are brought in by
        `with_every_value`, which may share rare ones. None: the draw stays as it is.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        clients_per_domain: int,
        seed: int = 0,
        partition_by: str = "domain",
        every_value_of: str | None = None,
    ) -> None:
        super().__init__()
        self._sizes = dict(sizes)
        self._clients_per_domain = clients_per_domain
        self._seed = seed
        self._partition_by = partition_by
        self._every_value_of = every_value_of

    @property
    def num_partitions(self) -> int:
        """Domains times clients per domain."""
        return len(self._sizes) * self._clients_per_domain

    def load_partition(self, partition_id: int) -> Dataset:
        """The rows of one partition.

        Raises
        ------
        DataError
            If a domain has fewer rows than its partitions need, or a partition fewer than
            there are values to hold.
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
        """Each domain's rows, those of its first partition first, no more than needed."""
        column = np.asarray(self.dataset[self._partition_by][:])
        every = self._every_value_of
        values = None if every is None else np.asarray(self.dataset[every][:])
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
            rng = draw(self._seed, domain, "train")
            order = rng.permutation(len(own))
            if values is not None:
                kinds = len(np.unique(values[own]))
                if size < kinds:
                    raise DataError(
                        f"Each client of domain {domain!r} is to hold all {kinds} classes, but "
                        f"{size} images each were asked for. Raise data.fraction or "
                        "data.examples-per-client."
                    )
                order = with_every_value(order, values[own], self._clients_per_domain, size, rng)
            rows[domain] = own[order[:needed]]
        return rows

    @cached_property
    def _partitioners(self) -> dict[str, SizePartitioner]:
        partitioners = {}
        for domain, rows in self._rows.items():
            partitioners[domain] = SizePartitioner([self._sizes[domain]] * self._clients_per_domain)
            partitioners[domain].dataset = self.dataset.select(rows)
        return partitioners


def with_every_value(
    order: npt.NDArray[np.int64],
    values: npt.NDArray[Any],
    clients: int,
    size: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.int64]:
    """Change an order of images as little as it takes for every client to hold every class.

    Client j holds ``order[j * size : (j + 1) * size]``; what comes after the last client's
    is nobody's. A client that lacks a class gets a random image of it that is nobody's, or
    else one of a client with several, in exchange for a random one of its own of which it
    has several. If there is no such image, the class has fewer images than there are
    clients: then a random one is shared, and only then.

    (FedHEAL's code draws the missing image from all of the domain, so that clients may
    share it even when there are enough.)

    Parameters
    ----------
    order
        int64 [N], a permutation of the domain's images.
    values
        [N], the class of each image.
    clients, size
        ``clients * size <= N``, and at most ``size`` different values.
    rng
        For all choices.

    Returns
    -------
    The new order, int64 [N + images shared].
    """
    order = order.copy()
    for client in range(clients):
        own = np.arange(client * size, (client + 1) * size)
        for value in np.setdiff1d(values, values[order[own]]):
            _, kind, counts = np.unique(values[order[own]], return_inverse=True, return_counts=True)
            given = rng.choice(own[counts[kind] > 1])
            found = np.flatnonzero(values[order] == value)
            holder = np.minimum(found // size, clients)
            spare = found[holder == clients]
            if not len(spare):
                spare = found[np.bincount(holder)[holder] > 1]
            if len(spare):
                taken = rng.choice(spare)
                order[[given, taken]] = order[[taken, given]]
            else:
                order = np.append(order, order[given])
                order[given] = order[rng.choice(found)]
    return order


def draw(seed: int, domain: str, split: str) -> np.random.Generator:
    """The random numbers for one split of one domain."""
    return np.random.default_rng([seed, *f"{domain}/{split}".encode()])
