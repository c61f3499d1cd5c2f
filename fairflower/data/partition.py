"""Dividing a benchmark's domains among clients."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflower.data.data_set import DataSet, too_few
from fairflower.data.federation import Ints
from fairflower.data.opening import explained
from fairflower.errors import DataError
from fairflower.seeds import derive_seed


def divide(
    domain: str,
    labels: Ints,
    sizes: Sequence[int],
    seed: int,
    *,
    every_class: bool = False,
    alpha: float = 0.0,
    client_count_key: str = "data.clients-per-domain",
) -> list[Ints]:
    """Divide a domain's rows among its clients at random: the rows of each, int64 [n], disjoint.

    The draw depends on the seed, on the domain's name and on its ``labels``, int64 [N], and on
    nothing else. (In the code of FedHEAL the number of rounds moves the partition.)

    Clients get ``sizes`` rows each. With ``every_class`` each is to hold every class that the
    domain has: `cover_every_class` brings in those that are missing. With ``alpha`` as many rows as
    these sizes have in all go to the clients by flwr-datasets' ``DirichletPartitioner`` with this
    concentration, label by label; every client gets two rows at least.

    ``DataError`` if there are too few rows for all of them; it names ``client_count_key``, the
    setting that says how many clients there are.
    """
    if not alpha:
        return _drawn(domain, labels, sizes, seed, every_class, client_count_key)
    (pool,) = _drawn(domain, labels, [sum(sizes)], seed, every_class, client_count_key)
    from datasets import Dataset  # seconds to import, hence only here
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        len(sizes),
        "label",
        alpha,
        min_partition_size=2,  # batch norm cannot train on a single image
        seed=derive_seed(seed, domain, "dirichlet"),
    )
    partitioner.dataset = Dataset.from_dict({"label": labels[pool], "row": pool})
    with warnings.catch_warnings(action="ignore"):  # on every draw that it rejects
        try:
            shares = [partitioner.load_partition(share) for share in range(len(sizes))]
        except ValueError as error:
            raise DataError(
                f"No Dirichlet partition with data.dirichlet-alpha = {alpha:g} gives each of "
                f"{len(sizes)} clients two of the {len(pool)} training examples of domain "
                f"{domain!r}. Raise it, or lower {client_count_key}."
            ) from error
    return [np.asarray(share["row"][:], np.int64) for share in shares]


def _drawn(
    domain: str,
    labels: Ints,
    sizes: Sequence[int],
    seed: int,
    every_class: bool,
    client_count_key: str,
) -> list[Ints]:
    """Rows for clients of these sizes."""
    needed = sum(sizes)
    if len(sizes) > len(labels):
        raise too_few(domain, len(labels), "training", len(sizes), f"Lower {client_count_key}")
    if not (sizes and min(sizes) > 0 and needed <= len(labels)):
        low, high = min(sizes, default=0), max(sizes, default=0)
        each = f"{low}" if low == high else f"{low} to {high}"
        raise DataError(
            f"Domain {domain!r} has {len(labels)} training examples, but "
            f"{len(sizes)} clients x {each} examples = {needed} were asked "
            f"for. Change {client_count_key}, data.fraction or data.examples-per-client."
        )
    rng = split_rng(seed, domain, "train")
    order = rng.permutation(len(labels))
    if every_class:
        kinds = len(np.unique(labels))
        if min(sizes) < kinds:
            raise DataError(
                f"Each client of domain {domain!r} is to hold all {kinds} classes, but "
                f"{min(sizes)} examples each were asked for. Raise data.fraction or "
                "data.examples-per-client."
            )
        order = cover_every_class(order, labels, sizes, rng)
    return np.split(order[:needed], np.cumsum(sizes)[:-1])


def apply_partitioner(data_set: DataSet, domain: str, split: str, labels: Ints) -> list[Ints]:
    """What the data set's own partitioner makes of a domain: the rows of each part.

    ``DataError`` if it cannot divide these.
    """
    from datasets import Dataset  # seconds to import, hence only here

    partitioner = data_set.partitioner()
    columns = {"label": labels, **data_set.columns(domain, split)}
    partitioner.dataset = Dataset.from_dict({**columns, "row": np.arange(len(labels))})
    kind = type(partitioner).__name__
    problem = f"{kind} cannot divide the {split} examples of {domain!r} by {', '.join(columns)}"
    with explained(problem):
        parts = [partitioner.load_partition(k) for k in range(partitioner.num_partitions)]
    return [np.asarray(part["row"][:], np.int64) for part in parts]


def cover_every_class(
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


def split_rng(seed: int, domain: str, split: str) -> np.random.Generator:
    """The random numbers for one split of one domain."""
    return np.random.default_rng([seed, *f"{domain}/{split}".encode()])
