"""Groups of clients, by domain or by image quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairflower.config.text import argument_to_key
from fairflower.data.data_set import DataSet, labels_of, too_few_examples_error
from fairflower.data.federation import Ints
from fairflower.data.partition import apply_partitioner
from fairflower.errors import DataError
from fairflower.seeds import derive_seed

#: Largest ``data.imbalance-factor``: up to here, powers of doubles give exact numbers of clients.
MAX_IMBALANCE = 10**6


@dataclass(frozen=True)
class ClientGroup:
    """The clients of a domain, or only its clean or only its corrupted clients.

    Its ``name`` is listed in the federation's ``domains``. All its examples come from the data
    set's ``domain``. With ``corrupted``, all its training and test examples are corrupted. Client
    k gets ``sizes[k]`` of the training examples ``rows``, int64 [N].
    """

    name: str
    domain: str
    rows: Ints
    sizes: tuple[int, ...]
    corrupted: bool = False
    #: Training and test rows of each client. Set only if a partitioner divides the examples.
    trained_on: tuple[Ints, ...] = ()
    tested_on: tuple[Ints, ...] = ()


def client_groups(data_set: DataSet, labels: Mapping[str, Ints]) -> list[ClientGroup]:
    """Return the groups of clients: one per domain, or a clean and a corrupted one per domain.

    A data set with a partitioner is divided by `partitioner_groups`. ``data.imbalance-factor``
    selects `imbalanced_groups`, and ``data.corrupted-clients`` selects `quality_groups`. Otherwise,
    every domain has ``data.clients-per-domain`` clients of equal size. ``labels`` are the labels of
    each domain's training examples. Raises ``DataError`` if settings conflict or leave no
    clean client.
    """
    config = data_set.config
    if data_set.partitioner() is not None:
        return partitioner_groups(data_set, labels)
    if config.imbalance_factor > 1:
        if config.corrupted_clients:
            raise DataError(
                "data.imbalance-factor and data.corrupted-clients cannot be combined. Set the "
                "first to 1 or the second to 0."
            )
        return imbalanced_groups(data_set, labels)
    if config.corrupted_clients:
        return quality_groups(data_set, labels)
    groups = []
    for domain, values in labels.items():
        sizes = _sizes(data_set, domain, len(values), config.clients_per_domain)
        groups.append(ClientGroup(domain, domain, np.arange(len(values)), sizes))
    return groups


def quality_groups(data_set: DataSet, labels: Mapping[str, Ints]) -> list[ClientGroup]:
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
    for domain, values in labels.items():
        rng = np.random.default_rng(derive_seed(config.seed, domain, "groups"))
        clean = stratified_mask(values, lambda count: round((1 - corrupted / clients) * count), rng)
        prefix = f"{domain} " if len(labels) > 1 else ""
        for name, chosen, members in (
            ("clean", clean, clients - corrupted),
            ("corrupted", ~clean, corrupted),
        ):
            rows = np.flatnonzero(chosen)
            if len(rows) < members:
                raise DataError(
                    f"{len(rows)} of the {len(values)} training examples of domain {domain!r} are "
                    f"for its {members} {name} clients. Lower data.clients-per-domain, or change "
                    "data.corrupted-clients."
                )
            sizes = _sizes(data_set, domain, len(rows), members)
            group = ClientGroup(prefix + name, domain, rows, sizes, corrupted=name == "corrupted")
            groups.append(group)
    return groups


def imbalanced_groups(data_set: DataSet, labels: Mapping[str, Ints]) -> list[ClientGroup]:
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
    ratio = series_ratio(factor, len(labels))
    groups: list[ClientGroup] = []
    total = 0
    for place, (domain, values) in enumerate(labels.items()):
        clients = round(ratio ** (len(labels) - 1 - place))
        if place == 0:
            total = data_set.train_size(domain, len(values), clients)
        else:
            total = min(int(total / ratio), len(values))
        within = data_set.imbalanced_within and clients > 1
        step = factor ** (1 / (clients - 1)) if within else ratio
        weights = step ** np.arange(1 - clients, 1)  # the last is 1: none can overflow
        sizes = tuple((total * weights / weights.sum() + 1e-9).astype(int).tolist())
        groups.append(ClientGroup(domain, domain, np.arange(len(values)), sizes))
    return groups


def partitioner_groups(data_set: DataSet, labels: Mapping[str, Ints]) -> list[ClientGroup]:
    """Return one group per domain, with clients that the data set's partitioner defines.

    Each client is a partition with at least two training examples and a test example. If there are
    more than ``data.clients-per-domain``, that many are drawn with ``data.seed``. Raises
    ``DataError`` if there are fewer, or if a setting divides the examples in another way.
    """
    config = data_set.config
    for key in (
        "fraction",
        "examples_per_client",
        "dirichlet_alpha",
        "corrupted_clients",
        "validation_examples",  # the clients have all examples of their partitions
    ):
        _refuse(config.name, key, getattr(config, key))
    _refuse(config.name, "imbalance_factor", config.imbalance_factor > 1)
    groups = []
    for domain, values in labels.items():
        test = None
        if data_set.columns(domain, "test"):
            _refuse(config.name, "test_examples", config.test_examples)
            test = labels_of(data_set, domain, "test")
        trained_on, tested_on = apply_partitioner(data_set, domain, values, test)
        usable = [
            k
            for k, rows in enumerate(trained_on)
            if len(rows) > 1 and (test is None or len(tested_on[k]))
        ]
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


def _refuse(name: str, setting: str, value: float) -> None:
    if value:
        raise DataError(
            f"data.{argument_to_key(setting)}: {name} is divided by its partitioner. Leave this "
            "setting at its default."
        )


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
    labels: Ints, wanted: Callable[[int], int], rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return a mask, bool [N], of ``wanted(n)`` random images out of the ``n`` of each class."""
    chosen = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen[members[: wanted(len(members))]] = True
    return chosen


def _sizes(data_set: DataSet, domain: str, available: int, clients: int) -> tuple[int, ...]:
    if clients > available:  # before there is a list of all of them
        remedy = "Lower data.clients-per-domain"
        raise too_few_examples_error(domain, available, "training", clients, remedy)
    total = data_set.train_size(domain, available, clients)
    each, rest = divmod(total, clients)
    if data_set.config.dirichlet_alpha:  # the Dirichlet partitioner takes any number
        return (each + 1,) * rest + (each,) * (clients - rest)
    return (each,) * clients
