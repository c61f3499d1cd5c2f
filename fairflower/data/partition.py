"""Division of a domain's rows among its clients."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflower.data.data_set import DataSet, too_few_examples_error
from fairflower.data.federation import Ints
from fairflower.data.files import explained
from fairflower.errors import DataError, require
from fairflower.seeds import derive_seed

#: Minimum number of rows per client in a Dirichlet partition: batch norm cannot train on one.
_LEAST = 2
#: Maximum number of draws of a Dirichlet partition. The first draw that gives each client `_LEAST`
#: rows is used.
_DRAWS = 11


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
    """Divide a domain's rows among its clients at random; return disjoint rows of each, int64 [n].

    The result depends only on the seed (``data.seed``), the domain's name and its labels, int64
    [N]. (In FedHEAL's code it also depends on the number of rounds.) Client k gets ``sizes[k]``
    rows. With ``every_class``, `cover_every_class` ensures that each client gets every class. With
    ``alpha``, ``sum(sizes)`` rows are divided by `dirichlet_shares` instead. ``client_count_key``
    is the setting that determines the number of clients, for error messages.

    Raises ``DataError`` if there are too few rows.

    >>> [rows.tolist() for rows in divide("mnist", np.arange(6) % 2, [2, 3], seed=0)]
    [[3, 0], [4, 2, 5]]
    """
    if not alpha:
        return _drawn(domain, labels, sizes, seed, every_class, client_count_key)
    (pool,) = _drawn(domain, labels, [sum(sizes)], seed, every_class, client_count_key)
    rng = np.random.default_rng(derive_seed(seed, domain, "dirichlet"))
    shares = dirichlet_shares(labels[pool], len(sizes), alpha, rng)
    if shares is None:
        raise DataError(
            f"No Dirichlet partition with data.dirichlet-alpha = {alpha:g} gives each of "
            f"{len(sizes)} clients at least two of the {len(pool)} training examples of domain "
            f"{domain!r}. Raise it, or lower {client_count_key}."
        )
    return [pool[share] for share in shares]


def dirichlet_shares(
    labels: Ints, clients: int, alpha: float, rng: np.random.Generator
) -> list[Ints] | None:
    """Divide the rows of each class among clients in random proportions.

    The draws match those of ``DirichletPartitioner`` in flwr-datasets, so both give the same
    partition. ``labels`` are int64 [N]; ``alpha``, above 0, is the concentration of the symmetric
    Dirichlet distribution of the proportions. Returns disjoint rows of each client, int64 [n] with
    n at least 2, or None if no draw gave every client 2 rows.
    """
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_DRAWS):
        parts: list[list[Ints]] = []
        for rows in members:
            upper = np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(rows)
            parts.append(np.split(rows, upper[:-1].astype(np.int64)))
        shares = [np.concatenate(share) for share in zip(*parts, strict=True)]
        if min(map(len, shares)) >= _LEAST:
            for share in shares:
                rng.shuffle(share)
            return shares
    return None


def like_training(labels: Ints, counts: Ints) -> list[Ints]:
    """Divide rows among clients so that each class is divided as in training.

    ``labels`` are int64 [N], and ``counts``, int64 [K, C], the training rows of each client and
    class; every label is below C. Returns disjoint rows of each client, int64 [n], in increasing
    order. Classes on which no client trains are divided evenly. A client that would get no row gets
    one of the client with most, as long as there is a client with several.

    >>> rows = like_training(np.array([0, 1, 0, 0, 0, 1]), np.array([[30, 0], [10, 0]]))
    >>> [client.tolist() for client in rows]
    [[0, 1, 2, 3], [4, 5]]
    """
    client = np.empty(len(labels), np.int64)
    owed = np.zeros(len(counts))  # what rounding has withheld from each client until now
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        weights = counts[:, label] if counts[:, label].any() else np.ones(len(counts))
        quota = weights / weights.sum() * len(members)
        given = np.floor(quota + 1e-9)
        owed += quota - given
        unrounded = np.where(quota > given, owed, -np.inf)
        rounded_up = np.argsort(-unrounded, kind="stable")[: len(members) - int(given.sum())]
        given[rounded_up] += 1
        owed[rounded_up] -= 1
        client[members] = np.repeat(np.arange(len(counts)), given.astype(np.int64))
    return rows_of_each(client, len(counts))


def rows_of_each(client: Ints, clients: int) -> list[Ints]:
    """Return the rows of each client in increasing order, given each row's client, int64 [N].

    A client without rows gets the last row of the client with most, if that one has several.
    """
    ends = np.cumsum(np.bincount(client, minlength=clients))[:-1]
    shares = np.split(np.argsort(client, kind="stable"), ends)
    most = [(-len(rows), k) for k, rows in enumerate(shares)]
    heapq.heapify(most)
    for k in (k for k, rows in enumerate(shares) if not len(rows)):
        count, giver = most[0]
        if count < -1:
            shares[k], shares[giver] = shares[giver][-1:], shares[giver][:-1]
            heapq.heapreplace(most, (count + 1, giver))
    return shares


def _drawn(
    domain: str, labels: Ints, sizes: Sequence[int], seed: int, every_class: bool, count_key: str
) -> list[Ints]:
    """Draw ``sizes[k]`` rows at random for each client k."""
    needed = sum(sizes)
    if len(sizes) > len(labels):
        remedy = f"Lower {count_key}"
        raise too_few_examples_error(domain, len(labels), "training", len(sizes), remedy)
    if not min(sizes):
        raise DataError(
            f"{sizes.count(0)} of the {len(sizes)} clients of domain {domain!r} would get no "
            f"training example. Lower {count_key}, or raise data.fraction or "
            "data.examples-per-client."
        )
    if needed > len(labels):
        low, high = min(sizes), max(sizes)
        each = f"{low}" if low == high else f"{low} to {high}"
        raise DataError(
            f"Domain {domain!r} has {len(labels)} training examples, but "
            f"{len(sizes)} clients x {each} examples = {needed} are needed. Change "
            f"{count_key}, data.fraction or data.examples-per-client."
        )
    rng = split_rng(seed, domain, "train")
    order = rng.permutation(len(labels))
    if every_class:
        kinds = len(np.unique(labels))
        if min(sizes) < kinds:
            raise DataError(
                f"Each client of domain {domain!r} needs examples of all {kinds} classes, but gets"
                f" only {min(sizes)} examples. Raise data.fraction or data.examples-per-client."
            )
        order = cover_every_class(order, labels, sizes, rng)
    return np.split(order[:needed], np.cumsum(sizes)[:-1])


def apply_partitioner(
    data_set: DataSet, domain: str, train: Ints, test: Ints | None = None
) -> tuple[list[Ints], list[Ints]]:
    """Divide a domain with the data set's partitioner; return each partition's rows.

    ``train`` and ``test`` are labels. Training and test examples are divided together, because a
    partitioner numbers the partitions of each call anew: client k would be tested on the examples
    of another one. Without ``test`` the second list is empty.

    Raises ``DataError`` if the partitioner fails or columns differ between the splits.
    """
    require("sim", f"The partitioner of data.name = {data_set.config.name!r}", "datasets")
    from datasets import Dataset  # seconds to import, hence only here

    partitioner = data_set.partitioner()
    columns = {"label": train, **data_set.columns(domain, "train")}
    if test is not None:
        tested = {"label": test, **data_set.columns(domain, "test")}
        if odd := sorted(columns.keys() ^ tested.keys()):
            raise DataError(
                f"Domain {domain!r}: only one of the splits has the column {odd[0]!r}. Return the "
                f"same columns for both from {type(data_set).__name__}.columns."
            )
        columns = {name: np.concatenate([columns[name], tested[name]]) for name in columns}
    partitioner.dataset = Dataset.from_dict({**columns, "row": np.arange(len(columns["label"]))})
    kind = type(partitioner).__name__
    with explained(f"{kind} cannot divide the examples of {domain!r} by {', '.join(columns)}"):
        parts = [partitioner.load_partition(k) for k in range(partitioner.num_partitions)]
    rows = [np.asarray(part["row"][:], np.int64) for part in parts]
    if test is None:
        return rows, []
    return [r[r < len(train)] for r in rows], [r[r >= len(train)] - len(train) for r in rows]


def cover_every_class(
    order: Ints,
    labels: npt.NDArray[Any],
    sizes: Sequence[int],
    rng: np.random.Generator,
) -> Ints:
    """Change a permutation as little as possible so that each client gets every class.

    Client 0 gets the first ``sizes[0]`` examples of ``order``, client 1 the next ``sizes[1]``, and
    so on; the remaining examples are unused. If a client lacks a class, one of its examples is
    exchanged: it gives away a random example of a class of which it has several, and it gets a
    random unused example of the missing class. If there is no unused example, it gets one from a
    client with several examples of the missing class. If there is none either, the class has fewer
    examples than there are clients, and a random example is shared.

    (FedHEAL's code draws the missing example from the whole domain, so clients may share an example
    even if there are enough examples.)

    ``order``, int64 [N], is a permutation of the domain's examples, and ``labels`` [N] are their
    classes. ``sizes`` sum to at most N, and each is at least the number of classes. Returns int64
    [N + number of shared examples].
    """
    order = order.copy()
    clients, ends, kinds = len(sizes), np.cumsum(sizes), np.unique(labels)
    for size, end in zip(sizes, ends, strict=True):
        held = np.arange(end - size, end)
        for label in np.setdiff1d(kinds, labels[order[held]]):
            classes = labels[order[held]]
            _, kind, counts = np.unique(classes, return_inverse=True, return_counts=True)
            given = rng.choice(held[counts[kind] > 1])
            candidates = np.flatnonzero(labels[order] == label)
            holder = np.searchsorted(ends, candidates, side="right")
            spare = candidates[holder == clients]
            if not len(spare):
                spare = candidates[np.bincount(holder)[holder] > 1]
            if len(spare):
                taken = rng.choice(spare)
                order[[given, taken]] = order[[taken, given]]
            else:
                order = np.append(order, order[given])
                order[given] = order[rng.choice(candidates)]
    return order


def split_rng(seed: int, domain: str, split: str) -> np.random.Generator:
    """Return the random generator for a split of a domain."""
    return np.random.default_rng([seed, *f"{domain}/{split}".encode()])
