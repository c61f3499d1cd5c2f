"""Dividing a benchmark's domains among clients.

Imports ``flwr_datasets`` and so ``datasets`` and ``pandas``: import this only to prepare.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, Partitioner

from fairflower.data.data_set import DataSet, too_few
from fairflower.data.federation import Ints
from fairflower.data.files import explained
from fairflower.errors import DataError
from fairflower.seeds import derive_seed


class DomainPartitioner(Partitioner):  # type: ignore[misc]
    """Partitions of every ``domain`` of a data set's rows, drawn at random and disjoint.

    They are numbered domain after domain. A domain's draw depends on the seed, on its own
    name and on its own rows, and on nothing else. (In the code of FedHEAL the number of
    rounds moves the partition.)

    Parameters
    ----------
    sizes
        Domain -> rows in each of its partitions, in the order of the partitions.
    every_value_of
        A column of which every partition is to hold each value that its domain has, such
        as the label. Values that are missing in the draw are brought in by
        `with_every_value`, which may share rare ones. None: the draw stays as it is.
    alpha
        0: partitions of these sizes. Otherwise as many rows as these sizes have in all go
        to a domain's partitions by flwr-datasets' ``DirichletPartitioner`` with this
        concentration, ``label`` by label; every partition gets two rows at least.
    counted_by
        The setting that says how many partitions there are, for errors.
    """

    def __init__(
        self,
        sizes: Mapping[str, Sequence[int]],
        seed: int = 0,
        every_value_of: str | None = None,
        alpha: float = 0.0,
        counted_by: str = "data.clients-per-domain",
    ) -> None:
        super().__init__()
        self._sizes = {domain: list(own) for domain, own in sizes.items()}
        self._seed = seed
        self._every_value_of = every_value_of
        self._alpha = alpha
        self._counted_by = counted_by

    @property
    def num_partitions(self) -> int:
        return sum(map(len, self._sizes.values()))

    def load_partition(self, partition_id: int) -> Dataset:
        """The rows of one partition; a DataError if there are too few for all of them."""
        return self.dataset.select(self._parts[partition_id])

    @property
    def partition_id_to_indices(self) -> dict[int, list[int]]:
        return {partition_id: part.tolist() for partition_id, part in enumerate(self._parts)}

    @cached_property
    def _parts(self) -> list[Ints]:
        column = np.asarray(self.dataset["domain"][:])
        parts = []
        for domain, sizes in self._sizes.items():
            own = np.flatnonzero(column == domain)
            parts += self._dirichlet(domain, own) if self._alpha else self._draw(domain, own, sizes)
        return parts

    def _draw(self, domain: str, own: Ints, sizes: list[int]) -> list[Ints]:
        """Partitions of a domain with these sizes, out of its rows."""
        needed = sum(sizes)
        if len(sizes) > len(own):
            remedy = f"Lower {self._counted_by}"
            raise too_few(domain, len(own), "training", len(sizes), remedy)
        if not (sizes and min(sizes) > 0 and needed <= len(own)):
            low, high = min(sizes, default=0), max(sizes, default=0)
            each = f"{low}" if low == high else f"{low} to {high}"
            raise DataError(
                f"Domain {domain!r} has {len(own)} training examples, but "
                f"{len(sizes)} clients x {each} examples = {needed} were asked "
                f"for. Change {self._counted_by}, data.fraction or data.examples-per-client."
            )
        rng = draw(self._seed, domain, "train")
        order = rng.permutation(len(own))
        if self._every_value_of is not None:
            values = np.asarray(self.dataset[self._every_value_of][:])[own]
            kinds = len(np.unique(values))
            if min(sizes) < kinds:
                raise DataError(
                    f"Each client of domain {domain!r} is to hold all {kinds} classes, but "
                    f"{min(sizes)} examples each were asked for. Raise data.fraction or "
                    "data.examples-per-client."
                )
            order = with_every_value(order, values, sizes, rng)
        return np.split(own[order[:needed]], np.cumsum(sizes)[:-1])

    def _dirichlet(self, domain: str, own: Ints) -> list[Ints]:
        """Partitions of a domain by label, out of a random choice of its rows."""
        sizes = self._sizes[domain]
        (pool,) = self._draw(domain, own, [sum(sizes)])
        labels = np.asarray(self.dataset["label"][:])[pool]
        partitioner = DirichletPartitioner(
            len(sizes),
            "label",
            self._alpha,
            min_partition_size=2,  # batch norm cannot train on a single image
            seed=derive_seed(self._seed, domain, "dirichlet"),
        )
        partitioner.dataset = Dataset.from_dict({"label": labels, "row": pool})
        with warnings.catch_warnings(action="ignore"):  # on every draw that it rejects
            try:
                shares = [partitioner.load_partition(share) for share in range(len(sizes))]
            except ValueError as error:
                raise DataError(
                    f"No Dirichlet partition with data.dirichlet-alpha = {self._alpha:g} gives "
                    f"each of {len(sizes)} clients two of the {len(pool)} training examples of "
                    f"domain {domain!r}. Raise it, or lower {self._counted_by}."
                ) from error
        return [np.asarray(share["row"][:], np.int64) for share in shares]


def parts_of(data_set: DataSet, domain: str, split: str, labels: Ints) -> list[Ints]:
    """What the data set's own partitioner makes of a domain: the rows of each part.

    Raises
    ------
    DataError
        If it cannot divide these.
    """
    partitioner = data_set.partitioner()
    columns = {"label": labels, **data_set.columns(domain, split)}
    partitioner.dataset = Dataset.from_dict({**columns, "row": np.arange(len(labels))})
    kind = type(partitioner).__name__
    problem = f"{kind} cannot divide the {split} examples of {domain!r} by {', '.join(columns)}"
    with explained(problem):
        parts = [partitioner.load_partition(k) for k in range(partitioner.num_partitions)]
    return [np.asarray(part["row"][:], np.int64) for part in parts]


def with_every_value(
    order: Ints,
    values: npt.NDArray[Any],
    sizes: Sequence[int],
    rng: np.random.Generator,
) -> Ints:
    """Change an order of images as little as it takes for every client to hold every class.

    The clients hold the first ``sizes[0]``, the next ``sizes[1]``, ... images of ``order``;
    what comes after the last client's is nobody's. A client that lacks a class gets a random
    image of it that is nobody's, or else one of a client with several, in exchange for a
    random one of its own of which it has several. If there is no such image, the class has
    fewer images than there are clients: then a random one is shared, and only then.

    (FedHEAL's code draws the missing image from all of the domain, so that clients may
    share it even when there are enough.)

    ``order``, int64 [N], is a permutation of the domain's images, whose classes are ``values``
    [N]; ``sizes`` are at most N in all, and each at least as many as there are classes. The new
    order is int64 [N + images shared].
    """
    order = order.copy()
    clients, ends = len(sizes), np.cumsum(sizes)
    for size, end in zip(sizes, ends, strict=True):
        own = np.arange(end - size, end)
        for value in np.setdiff1d(values, values[order[own]]):
            _, kind, counts = np.unique(values[order[own]], return_inverse=True, return_counts=True)
            given = rng.choice(own[counts[kind] > 1])
            found = np.flatnonzero(values[order] == value)
            holder = np.searchsorted(ends, found, side="right")
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
