"""Units of examples, groups of clients, and division of a group's units among its clients."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.config.text import argument_to_key
from fairflower.data.data_set import (
    DataSet,
    invalid_values_error,
    labels_of,
    strata_of,
    too_few_examples_error,
)
from fairflower.data.federation import Ints
from fairflower.data.files import explained, numbered
from fairflower.errors import DataError, require
from fairflower.seeds import derive_seed

#: Largest ``data.imbalance-factor``: up to here, powers of doubles give exact numbers of clients.
MAX_IMBALANCE = 10**6


@dataclass(frozen=True)
class Units:
    """What is divided of a domain's split: patients, families or devices, or single examples.

    They are numbered by their first examples. ``labels``, int64 [U], are their most frequent
    labels, by which they are divided. ``sizes``, int64 [U], are their numbers of examples, and
    ``of``, int64 [N], is each example's unit.
    """

    labels: Ints
    sizes: Ints
    of: Ints

    @classmethod
    def single(cls, labels: Ints) -> Units:
        """Return a unit for each example."""
        return cls(labels, np.ones(len(labels), np.int64), np.arange(len(labels)))

    def rows(self, chosen: Ints) -> Ints:
        """Return the rows of these units, one unit's after another's, int64 [n]."""
        return np.concatenate([self._rows[unit] for unit in chosen])

    @cached_property
    def _rows(self) -> list[Ints]:
        return np.split(np.argsort(self.of, kind="stable"), np.cumsum(self.sizes)[:-1])


def units_of(data_set: DataSet, domain: str, split: str, labels: Ints) -> Units:
    """Return the units of examples with these labels, by ``data.patient``."""
    if not data_set.config.patient:
        return Units.single(labels)
    values = np.asarray(data_set.units(domain, split), str)
    if values.shape != labels.shape:
        expected = f"{len(labels)}, one for each example"
        raise invalid_values_error(data_set, domain, split, "units", len(values), expected)
    of = numbered(values)
    pairs, counts = np.unique(np.stack([of, labels]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    _, first = np.unique(pairs[0][order], return_index=True)
    return Units(pairs[1][order][first], np.bincount(of), of)


@dataclass(frozen=True)
class ClientGroup:
    """The clients of a domain, or only its clean or only its corrupted clients.

    Its ``name`` is listed in the federation's ``domains``. All its examples come from the data
    set's ``domain``. With ``corrupted``, all its training and test examples are corrupted. Client
    k gets ``sizes[k]`` of the training examples ``rows``, int64 [N], which are numbers of `Units`.
    """

    name: str
    domain: str
    rows: Ints
    sizes: tuple[int, ...]
    corrupted: bool = False
    #: Training and test rows of each client. Set only if a partitioner divides the examples.
    trained_on: tuple[Ints, ...] = ()
    tested_on: tuple[Ints, ...] = ()


def client_groups(data_set: DataSet, units: Mapping[str, Units]) -> list[ClientGroup]:
    """Return the groups of clients: one per domain, or a clean and a corrupted one per domain.

    A data set with a partitioner is divided by `partitioner_groups`. ``data.imbalance-factor``
    selects `imbalanced_groups`, and ``data.corrupted-clients`` selects `quality_groups`. Otherwise,
    every domain has ``data.clients-per-domain`` clients of equal size. ``units`` are those of each
    domain's training examples. Raises ``DataError`` if settings conflict or leave no clean client.
    """
    config = data_set.config
    if data_set.partitioner() is not None:
        return partitioner_groups(data_set, units)
    if config.imbalance_factor > 1:
        if config.corrupted_clients:
            raise DataError(
                "data.imbalance-factor and data.corrupted-clients cannot be combined. Set the "
                "first to 1 or the second to 0."
            )
        return imbalanced_groups(data_set, units)
    if config.corrupted_clients:
        return quality_groups(data_set, units)
    groups = []
    for domain, own in units.items():
        sizes = _sizes(data_set, domain, own.sizes, config.clients_per_domain)
        groups.append(ClientGroup(domain, domain, np.arange(len(own.sizes)), sizes))
    return groups


def quality_groups(data_set: DataSet, units: Mapping[str, Units]) -> list[ClientGroup]:
    """Return a clean and a corrupted group per domain, as in FedISM (IJCAI 2024).

    Let ``ratio`` be the fraction of corrupted clients. Of the ``n`` images of a class in a domain,
    ``round((1 - ratio) n)`` go to the clean clients, and the rest go to the corrupted clients. The
    images are drawn at random with ``data.seed``. Both groups are tested on the same images, but
    those of the corrupted group are corrupted.

    FedISM's code instead gives the first images in its file to the clean clients. But images sorted
    by name are often sorted by source as well, for example by hospital in ISIC 2019. The groups
    would then differ in more than the corruption.
    """
    config = data_set.config
    clients, corrupted = config.clients_per_domain, config.corrupted_clients
    if corrupted >= clients:
        raise DataError(
            f"data.corrupted-clients = {corrupted}: at least one of the {clients} clients of a "
            "domain must stay clean. Lower it, or raise data.clients-per-domain."
        )
    groups = []
    for domain, own in units.items():
        rng = np.random.default_rng(derive_seed(config.seed, domain, "groups"))
        kinds, counts = np.unique(own.labels, return_counts=True)
        wanted = np.rint((1 - corrupted / clients) * counts).astype(int)
        clean = stratified_mask(own.labels, kinds, wanted, rng)
        prefix = f"{domain} " if len(units) > 1 else ""
        members_of = {"clean": clients - corrupted, "corrupted": corrupted}
        for name, members in members_of.items():
            rows = np.flatnonzero(clean == (name == "clean"))
            if len(rows) < members:
                raise DataError(
                    f"{len(rows)} of the {len(clean)} training examples of domain {domain!r} are "
                    f"for its {members} {name} clients. Lower data.clients-per-domain, or change "
                    "data.corrupted-clients."
                )
            sizes = _sizes(data_set, domain, own.sizes[rows], members)
            groups.append(ClientGroup(prefix + name, domain, rows, sizes, name == "corrupted"))
    return groups


def imbalanced_groups(data_set: DataSet, units: Mapping[str, Units]) -> list[ClientGroup]:
    """Return groups of geometrically decreasing size: the domain imbalance of FedGCR (AAAI 2024).

    With ``D`` domains, numbered from 0, domain i has ``round(ratio^(D - 1 - i))`` clients. Its
    images are those of domain i - 1 divided by ``ratio``, or all its images if it has fewer. Client
    j of a domain gets images in proportion to ``ratio^j``. On PACS it gets them in proportion to
    ``factor^(j / (n - 1))``, so that the last of ``n`` clients has ``factor`` times the images of
    the first. The first domain has as many images as without imbalance, and
    ``data.examples-per-client`` is the mean over its clients.

    ==================  ===================  ================================================
    ``D``, factor       ratio                clients
    ==================  ===================  ================================================
    5 (Digit-Five)      5: 1.5, 10: 1.8      5 3 2 2 1, 10 6 3 2 1
    6 (DomainNet)       5: 1.4, 10: 1.6      5 4 3 2 1 1, 10 7 4 3 2 1
    4 (PACS)            5: 1.7, 10: 2.16     5 3 2 1, 10 5 2 1
    ==================  ===================  ================================================

    The ratios are those of the released code; the paper does not state them. For factor 1, the code
    has two clients per domain with sizes 1 : 3; here their sizes are equal.
    """
    factor = data_set.config.imbalance_factor
    ratio = series_ratio(factor, len(units))
    groups: list[ClientGroup] = []
    total = 0
    for place, (domain, own) in enumerate(units.items()):
        clients, available = round(ratio ** (len(units) - 1 - place)), len(own.of)
        if place == 0:
            total = data_set.train_size(domain, available, clients)
        else:
            total = min(int(total / ratio), available)
        within = data_set.imbalanced_within and clients > 1
        step = factor ** (1 / (clients - 1)) if within else ratio
        shares = step ** np.arange(1 - clients, 1)  # the last is 1: none can overflow
        sizes = tuple((total * shares / shares.sum() + 1e-9).astype(int).tolist())
        groups.append(ClientGroup(domain, domain, np.arange(len(own.sizes)), sizes))
    return groups


def partitioner_groups(data_set: DataSet, units: Mapping[str, Units]) -> list[ClientGroup]:
    """Return one group per domain, with clients that the data set's partitioner defines.

    Each client is a partition with at least two training examples and a test example. If there are
    more than ``data.clients-per-domain``, that many are drawn with ``data.seed``. Raises
    ``DataError`` if there are fewer, or if a setting divides the examples in another way.
    """
    config = data_set.config
    keys = ["fraction", "examples_per_client", "dirichlet_alpha", "corrupted_clients"]
    # The clients have all examples of their partitions, so none is for validation.
    keys += ["validation_examples", "imbalance_factor", "patient"]
    keys += ["test_examples"] * any(data_set.columns(domain, "test") for domain in units)
    for key in keys:
        if getattr(config, key) != getattr(DataConfig, key):
            raise DataError(
                f"data.{argument_to_key(key)}: {config.name} is divided by its partitioner. Leave "
                "this setting at its default."
            )
    groups = []
    for domain, every in units.items():
        trained_on, tested_on = apply_partitioner(data_set, domain, every.labels)
        large = [k for k, rows in enumerate(trained_on) if len(rows) > 1]
        usable = [k for k in large if not tested_on or len(tested_on[k])]
        if len(usable) < config.clients_per_domain:
            raise DataError(
                f"Domain {domain!r} has only {len(usable)} partitions with at least two training "
                f"examples and a test example; expected {config.clients_per_domain}. Lower "
                "data.clients-per-domain."
            )
        rng = np.random.default_rng(derive_seed(config.seed, domain, "parts"))
        drawn = sorted(rng.permutation(usable)[: config.clients_per_domain].tolist())
        own = tuple(trained_on[k] for k in drawn)
        tests = tuple(tested_on[k] for k in drawn) if tested_on else ()
        sizes, pool = tuple(map(len, own)), np.concatenate(own)
        groups.append(ClientGroup(domain, domain, pool, sizes, trained_on=own, tested_on=tests))
    return groups


def series_ratio(factor: int, domains: int) -> float:
    """Return the ratio of a geometric sequence whose first term is ``factor`` times its last.

    The ratio is ``factor^(1 / (domains - 1))``, rounded to the fewest decimals that reproduce the
    rounded factor. For 4 domains and factor 10, it is 2.16 as in FedGCR's released code, not 2.15.

    >>> [series_ratio(factor, 5) for factor in (2, 5, 10)]
    [1.2, 1.5, 1.8]
    """
    if (factor, domains) == (10, 4):
        return 2.16
    if domains < 2:
        raise DataError(
            f"data.imbalance-factor = {factor} needs several domains, but there is only 1. Set it "
            "to 1, or select several domains with data.domains."
        )
    if factor > MAX_IMBALANCE:
        raise DataError(
            f"data.imbalance-factor = {factor}: expected at most {MAX_IMBALANCE}, so that the "
            "numbers of clients are exact."
        )
    exact: float = factor ** (1 / (domains - 1))
    decimals = 1
    while round(round(exact, decimals) ** (domains - 1)) != factor:
        decimals += 1
    return round(exact, decimals)


def stratified_mask(
    labels: Ints, kinds: Ints, counts: Sequence[int] | Ints, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return a mask, bool [N], of ``counts[k]`` random examples with the label ``kinds[k]``."""
    chosen = np.zeros(len(labels), np.bool_)
    for kind, count in zip(kinds, counts, strict=True):
        chosen[rng.permutation(np.flatnonzero(labels == kind))[:count]] = True
    return chosen


def _sizes(data_set: DataSet, domain: str, units: Ints, clients: int) -> tuple[int, ...]:
    """Return the number of examples for each client of these units, given by their sizes."""
    available = int(units.sum())
    if clients > available:  # before there is a list of all of them
        remedy = "Lower data.clients-per-domain"
        raise too_few_examples_error(domain, available, "training examples", clients, remedy)
    total = data_set.train_size(domain, available, clients)
    # The Dirichlet partitioner takes any number, and units of several examples are never equal.
    if data_set.config.dirichlet_alpha or data_set.config.patient:
        return equal_sizes(total, clients)
    return (total // clients,) * clients


def equal_sizes(total: int, clients: int) -> tuple[int, ...]:
    """Return numbers of examples that differ by at most one, the larger ones first.

    >>> equal_sizes(5, 3)
    (2, 2, 1)
    """
    each, rest = divmod(total, clients)
    return (each + 1,) * rest + (each,) * (clients - rest)


def noun(weights: Ints) -> str:
    """Return what units with these numbers of examples are, for messages."""
    return "examples" if weights.max(initial=1) == 1 else "patients (data.patient)"


def deal(order: Ints, sizes: Sequence[int], weights: Ints) -> list[Ints]:
    """Give client k units with about ``sizes[k]`` examples; return the units of each client.

    ``order`` are units at random, int64 [U], of which the first are used, and ``weights``, int64,
    the number of examples in each. If all are 1, sizes are exact. Otherwise as many units are used
    as come nearest to the sum of the sizes, and the largest are given first, each to the client
    that lacks most. A client gets none only if there are fewer units than clients.

    >>> [own.tolist() for own in deal(np.arange(5), [3, 3], np.array([1, 3, 1, 1, 9]))]
    [[1], [0, 2, 3]]
    """
    if weights.max(initial=1) == 1:
        return np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])
    nearest = np.abs(np.cumsum(weights[order]) - sum(sizes)).argmin()
    used = order[: max(len(sizes), 1 + nearest)]
    lacking, client = np.array(sizes, np.int64), np.empty(len(used), np.int64)
    for place in np.argsort(-weights[used], kind="stable"):
        client[place] = lacking.argmax()
        lacking[client[place]] -= weights[used[place]]
    return [used[own] for own in rows_of_each(client, len(sizes))]


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
    weights: Ints | None = None,
) -> list[Ints]:
    """Divide a domain's rows among its clients at random; return disjoint rows of each, int64 [n].

    The result depends only on the seed (``data.seed``), the domain's name and its labels, int64
    [N]. (In FedHEAL's code it also depends on the number of rounds.) Client k gets ``sizes[k]``
    rows. With ``every_class``, `cover_every_class` ensures that each client gets every class. With
    ``alpha``, ``sum(sizes)`` rows are divided by `dirichlet_shares` instead. ``client_count_key``
    is the setting that determines the number of clients, for error messages. With ``weights``,
    int64 [N], rows are units with as many examples (`deal`), and classes are divided by unit.

    Raises ``DataError`` if there are too few rows.

    >>> [rows.tolist() for rows in divide("mnist", np.arange(6) % 2, [2, 3], seed=0)]
    [[3, 0], [4, 2, 5]]
    """
    weights = np.ones(len(labels), np.int64) if weights is None else weights
    pools = [sum(sizes)] if alpha else sizes
    needed, available = sum(sizes), int(weights.sum())
    if len(pools) > len(labels):
        what, remedy = f"training {noun(weights)}", f"Lower {client_count_key}"
        raise too_few_examples_error(domain, len(labels), what, len(pools), remedy)
    if not min(pools):
        raise DataError(
            f"{pools.count(0)} of the {len(pools)} clients of domain {domain!r} would get no "
            f"training example. Lower {client_count_key}, or raise data.fraction or "
            "data.examples-per-client."
        )
    if needed > available:
        each = " to ".join(map(str, sorted({min(pools), max(pools)})))
        raise DataError(
            f"Domain {domain!r} has {available} training examples, but "
            f"{len(pools)} clients x {each} examples = {needed} are needed. Change "
            f"{client_count_key}, data.fraction or data.examples-per-client."
        )
    rng = split_rng(seed, domain, "train")
    order = rng.permutation(len(labels))
    if every_class:
        kinds = len(np.unique(labels))
        if min(pools) < kinds:
            raise DataError(
                f"Each client of domain {domain!r} needs examples of all {kinds} classes, but gets"
                f" only {min(pools)} examples. Raise data.fraction or data.examples-per-client."
            )
        order = cover_every_class(order, labels, pools, rng)
    dealt = deal(order, pools, weights)
    if not alpha:
        return dealt
    (pool,) = dealt
    rng = np.random.default_rng(derive_seed(seed, domain, "dirichlet"))
    shares = dirichlet_shares(labels[pool], len(sizes), alpha, rng)
    if shares is None:
        raise DataError(
            f"No Dirichlet partition with data.dirichlet-alpha = {alpha:g} gives each of "
            f"{len(sizes)} clients at least two of the {len(pool)} training {noun(weights)} of "
            f"domain {domain!r}. Raise it, or lower {client_count_key}."
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


def apply_partitioner(data_set: DataSet, domain: str, train: Ints) -> tuple[list[Ints], list[Ints]]:
    """Divide a domain with the data set's partitioner; return each partition's rows, by split.

    ``train`` are the training labels. If test examples have columns, both are divided together,
    because a partitioner numbers the partitions of each call anew: client k would be tested on the
    examples of another one. Otherwise the second list is empty.

    Raises ``DataError`` if the partitioner fails or columns differ between the splits.
    """
    require("sim", f"The partitioner of data.name = {data_set.config.name!r}", "datasets")
    from datasets import Dataset  # seconds to import, hence only here

    partitioner = data_set.partitioner()
    columns = {"label": train, **data_set.columns(domain, "train")}
    tested = data_set.columns(domain, "test")
    if tested:
        tested = {"label": strata_of(data_set, labels_of(data_set, domain, "test")), **tested}
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
    if not tested:
        return rows, []
    return [r[r < len(train)] for r in rows], [r[r >= len(train)] - len(train) for r in rows]


def cover_every_class(
    order: Ints, labels: Ints, sizes: Sequence[int], rng: np.random.Generator
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


def split_rng(seed: int, *purpose: str) -> np.random.Generator:
    """Return the random generator for a purpose, such as a domain and a split of it."""
    return np.random.default_rng([seed, *"/".join(purpose).encode()])
