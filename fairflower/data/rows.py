"""Division of a data set's rows among the clients of each domain, for every split.

Also clients' validation examples, and other draws of the test examples (``data.redraw``).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.data.data_set import (
    DataSet,
    client_count_key,
    labels_of,
    strata_of,
    too_few_examples_error,
)
from fairflower.data.federation import Federation, Ints
from fairflower.data.partition import (
    ClientGroup,
    Units,
    client_groups,
    deal,
    divide,
    equal_sizes,
    like_training,
    split_rng,
    stratified_mask,
    units_of,
)
from fairflower.errors import DataError
from fairflower.seeds import derive_seed
from fairflower.tasks import Targets, task_of

#: Split of a federation -> split of the data set from which its examples are taken.
SPLITS = {"train": "train", "validation": "train", "test": "test"}
#: Group -> rows of each of its clients, int64 [n].
Rows = dict[str, list[Ints]]


def divided_rows(
    data_set: DataSet,
) -> tuple[dict[str, dict[str, Targets]], list[ClientGroup], dict[str, Rows]]:
    """Return targets by split and domain, groups of clients, and rows by split, group and client.

    Validation rows are optional (a setting). With ``data.patient``, units are divided instead of
    examples, and then replaced by their rows.
    """
    config, domains = data_set.config, {"train": data_set.client_domains, "test": data_set.domains}
    targets = {s: {d: labels_of(data_set, d, s) for d in domains[s]} for s in domains}
    check_patients(data_set, data_set.client_domains)
    units = {
        s: {d: units_of(data_set, d, s, strata_of(data_set, y)) for d, y in of.items()}
        for s, of in targets.items()
    }
    if config.dirichlet_alpha and not task_of(data_set.task).classes:
        raise DataError(
            f"data.dirichlet-alpha = {config.dirichlet_alpha:g} divides classes, but the task is "
            f"{data_set.task}. Set it to 0."
        )
    if config.patient and data_set.every_class:
        found = f"data.patient: {config.name} gives every class to each client"
        raise DataError(f"{found}, which whole patients cannot do. Remove the setting.")
    groups = client_groups(data_set, units["train"])
    rows: dict[str, Rows] = {"train": {}, "validation": {}, "test": {}}
    for group in groups:
        trained, tested = (units[split][group.domain] for split in ("train", "test"))
        train, test = train_rows(data_set, group, trained), test_rows(config, group, tested)
        skewed = config.dirichlet_alpha or group.trained_on
        if skewed and not group.tested_on:
            test = _like_training(train, trained, test, tested)
        rows["train"][group.name], rows["test"][group.name] = train, test
        if config.validation_examples:
            unused = set_aside(group, train, config.validation_examples, config.seed, trained)
            if skewed:
                unused = _like_training(train, trained, unused, trained)
            rows["validation"][group.name] = unused
    if config.validation_fraction and not config.validation_examples:
        labels = {group.name: units["train"][group.domain].labels for group in groups}
        unit = "patient" if config.patient else "example"
        divided = hold_out(rows["train"], labels, config.validation_fraction, config.seed, unit)
        rows["train"], rows["validation"] = divided
    rows = {split: by_group for split, by_group in rows.items() if by_group}
    if config.patient:
        rows = {s: _of_units(config, groups, s, own, units[SPLITS[s]]) for s, own in rows.items()}
    return targets, groups, rows


def check_patients(data_set: DataSet, domains: tuple[str, ...]) -> None:
    """Raise ``DataError`` if a patient of a domain has training and test examples.

    The message has counts only: numbers of patients, and no patient.
    """
    for domain in domains if data_set.config.patient else ():
        train, test = (set(data_set.units(domain, split)) for split in ("train", "test"))
        if both := len(train & test):
            found = f"{both} of {len(train | test)} patients have training and test examples"
            remedy = "Correct the split, or set data.redraw = rows to draw whole patients."
            setting = f"data.patient = {data_set.config.patient!r}"
            public = f"{setting}: {found}. {remedy}"
            raise DataError(f"{setting}: {domain!r}: {found}. {remedy}", public=public)


def train_rows(data_set: DataSet, group: ClientGroup, units: Units) -> list[Ints]:
    """Divide the training rows of a group among its clients."""
    if group.trained_on:
        return list(group.trained_on)
    shares = divide(
        group.name,
        units.labels[group.rows],
        group.sizes,
        data_set.config.seed,
        every_class=data_set.every_class,
        alpha=data_set.config.dirichlet_alpha,
        client_count_key=client_count_key(data_set.config),
        weights=units.sizes[group.rows],
    )
    return [group.rows[share] for share in shares]


def test_rows(config: DataConfig, group: ClientGroup, units: Units) -> list[Ints]:
    """Shuffle a group's test rows, limit their number and divide them among its clients.

    If there are fewer rows than clients, some get none: `check_clients_can_test` refuses this if
    clients test.
    """
    if group.tested_on:
        return list(group.tested_on)
    order = split_rng(config.seed, group.domain, "test").permutation(len(units.sizes))
    if not len(order):
        raise too_few_examples_error(group.name, 0, "test examples", len(group.sizes), "")
    count = min(config.test_examples or len(units.of), len(units.of))
    return deal(order, equal_sizes(count, len(group.sizes)), units.sizes)


def check_clients_can_test(config: DataConfig, federation: Federation, split: str) -> None:
    """Raise ``DataError`` if a domain has fewer examples in a split than clients."""
    clients = Counter(client.domain for client in federation.clients)
    for domain, count in zip(federation.domains, federation.sizes(split), strict=True):
        if count < clients[domain]:
            limit = " or raise data.test-examples" * (count == config.test_examples > 0)
            key = f"{client_count_key(config)}{limit}"
            remedy = f"Lower {key}, or let the server test (evaluate.by)"
            what = f"{split} examples"
            raise too_few_examples_error(domain, count, what, clients[domain], remedy)


def _like_training(train: list[Ints], trained: Units, rows: list[Ints], units: Units) -> list[Ints]:
    """Divide a group's test or validation rows, of these units, by class as training rows are."""
    most = 1 + max(trained.labels.max(), units.labels.max())
    counts = np.array([np.bincount(trained.labels[own], minlength=most) for own in train])
    kept = np.concatenate(rows)
    return [kept[share] for share in like_training(units.labels[kept], counts)]


def hold_out(
    rows: Mapping[str, Sequence[Ints]],
    labels: Mapping[str, Ints],
    share: float,
    seed: int,
    unit: str = "example",
) -> tuple[Rows, Rows]:
    """Divide each client's rows into training and validation rows, in this order.

    ``rows`` are those of each client, int64 [n], by group, and ``labels`` those of all rows of the
    group's domain, int64 [N]. A client with ``n`` rows gets ``int(share * n)`` validation rows, but
    at least 1. They depend only on ``seed`` (``data.seed``), the group's name and the client's
    position in the group. Each class contributes its proportional share, but at least one row of
    each class stays in training. Both parts keep the order of the rows.

    Raises ``DataError`` if a client has too few rows. The message states the largest possible
    share.
    """
    _check(rows, labels, share, unit)
    kept, validation = {}, {}
    for name, clients in rows.items():
        drawn = [
            _drawn(labels[name][own], share, derive_seed(seed, name, position, "validation"))
            for position, own in enumerate(clients)
        ]
        kept[name] = [own[~out] for own, out in zip(clients, drawn, strict=True)]
        validation[name] = [own[out] for own, out in zip(clients, drawn, strict=True)]
    return kept, validation


def set_aside(
    group: ClientGroup, train: list[Ints], count: int, seed: int, units: Units
) -> list[Ints]:
    """Draw each client's validation rows from the rows of its group on which no client trains.

    ``count`` unused rows (or all, if there are fewer) are drawn at random, with a generator derived
    from ``seed`` and the group's name, and divided among the clients
    (`fairflower.data.partition.deal`). ``units`` are those of the domain's training examples, and
    ``train`` the training rows of clients. Raises ``DataError`` if there are no unused rows.
    """
    unused = np.setdiff1d(group.rows, np.concatenate(train))
    if not len(unused):
        raise DataError(
            f"data.validation-examples = {count}: the {len(train)} clients of {group.name!r} leave"
            f" none of its {len(group.rows)} training examples unused. Lower data.fraction or "
            "data.examples-per-client, or use data.validation-fraction."
        )
    rng = np.random.default_rng(derive_seed(seed, group.name, "validation"))
    most = min(max(count, len(train)), int(units.sizes[unused].sum()))
    return deal(rng.permutation(unused), equal_sizes(most, len(train)), units.sizes)


def _wanted(images: int, share: float) -> int:
    # 1e-9, because a product such as 0.29 * 100 = 28.999999999999996 stands for 29.
    return max(1, int(share * images + 1e-9))


def _drawn(labels: Ints, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return a random mask of a client's validation rows, bool [N]."""
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    quotas = share * counts
    taken = np.minimum((quotas + 1e-9).astype(int), counts - 1)
    order = rng.permutation(len(classes))  # breaks ties between classes at random
    while taken.sum() < _wanted(len(labels), share):
        claims = np.where(taken < counts - 1, quotas - taken, -np.inf)
        taken[order[np.argmax(claims[order])]] += 1
    return stratified_mask(labels, classes, taken, rng)


def _check(
    rows: Mapping[str, Sequence[Ints]], labels: Mapping[str, Ints], share: float, unit: str
) -> None:
    """Raise ``DataError`` if a client has too few rows for the share."""
    named = [(name, held) for name, clients in rows.items() for held in clients]
    sizes = [(name, len(held), len(np.unique(labels[name][held]))) for name, held in named]
    for client, (name, images, classes) in enumerate(sizes):
        if _wanted(images, share) <= images - classes:
            continue
        largest = min((n - kinds) / n for _, n, kinds in sizes)
        remedy = f"Set it to at most {math.floor(1e4 * largest) / 1e4:g}."
        if largest == 0:
            remedy = (
                f"No fraction works, because a client has only one {unit} of each class. Raise "
                "data.fraction, data.examples-per-client or data.dirichlet-alpha, or set "
                "data.validation-fraction to 0."
            )
        raise DataError(
            f"data.validation-fraction = {share:g}: client {client} ({name}) has {images} training "
            f"{unit}s of {classes} classes; one {unit} of each class must stay in training. "
            f"{remedy}"
        )


def draw_anew(data_set: DataSet) -> None:
    """Let a data set draw its training and test examples with ``data.seed``, by ``data.redraw``.

    The examples of both splits of a domain are pooled, and as many test examples as before are
    drawn: in each class, or by examples that stay together (`DataSet.units`). A copy of the data
    set keeps the published splits, so what the data set loads later is loaded twice.
    """
    config, splits = data_set.config, ("train", "test")
    if data_set.partitioner() is not None:
        raise DataError("data.redraw: a partitioner divides the data. Remove the setting.")
    published, examples = copy(data_set), data_set.examples

    @cache
    def drawn(domain: str) -> tuple[int, dict[str, Ints]]:
        """Return the number of training examples in the files, and each split's places."""
        trained, tested = (strata_of(published, labels_of(published, domain, s)) for s in splits)
        rng = np.random.default_rng(derive_seed(config.seed, domain, "redraw"))
        if not config.unit[1]:
            counts = np.unique(tested, return_counts=True)
            test = stratified_mask(np.concatenate([trained, tested]), *counts, rng)
        else:
            units = np.concatenate([np.asarray(published.units(domain, s), str) for s in splits])
            if len(np.unique(units)) < 2:
                setting, name = config.unit
                raise DataError(
                    f"{setting} = {name!r}: {domain!r} has only one, so there is nothing to draw. "
                    "Remove the setting."
                )
            _, unit, sizes = np.unique(units, return_inverse=True, return_counts=True)
            order = rng.permutation(len(sizes))
            ends = np.cumsum(sizes[order])[:-1]  # one unit is left to train on
            test = np.isin(unit, order[: 1 + np.abs(ends - len(tested)).argmin()])
        return len(trained), {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}

    def places(domain: str, split: str, rows: Ints) -> Ints:
        return drawn(domain)[1][split][rows]

    def of_all(method: Any, domain: str, split: str) -> Any:
        return np.concatenate([method(domain, s) for s in splits])[drawn(domain)[1][split]]

    def examples_of(domain: str, split: str, rows: Ints) -> Any:
        count, at = drawn(domain)[0], places(domain, split, rows)
        first = at < count
        parts = (("train", at[first]), ("test", at[~first] - count))
        return np.concatenate([examples(domain, s, part) for s, part in parts if len(part)])

    for name in ("labels", "group_of", "units"):
        setattr(data_set, name, partial(of_all, getattr(published, name)))
    vars(data_set).update(examples=examples_of, places=places)


def division_of(data_set: DataSet, groups: list[ClientGroup], rows: Mapping[str, Rows]) -> str:
    """Return `Federation.division`, from the rows of each client, in any order."""
    digest = hashlib.sha256()
    for split, by_group in rows.items():
        for group in groups:
            for own in by_group[group.name]:
                places = np.sort(data_set.places(group.domain, SPLITS[split], own))
                digest.update(f"{split} {group.name} {len(places)} ".encode() + places.tobytes())
    return digest.hexdigest()[:16]


def draw_facts(
    data_set: DataSet, groups: list[ClientGroup], rows: Mapping[str, Rows], labels: Any
) -> dict[str, float]:
    """Return `Federation.redraw`: n of N examples are, in another draw, n / N times the same."""
    redrawn, same, sizes = bool(data_set.config.redraw), {"train": 0.0, "test": 0.0}, Counter[str]()
    for split, domain in product(("train", "test"), dict.fromkeys(g.domain for g in groups)):
        own = [part for g in groups if g.domain == domain for part in rows[split][g.name]]
        available = sum(len(labels[s][domain]) for s in labels if redrawn or s == split)
        n = len(np.unique(np.concatenate(own)))
        same[split] += n * n / available
        sizes[split] += n
    facts = {split: round(same[split] / n, 6) for split, n in sizes.items()}
    if redrawn:
        facts["tests per training example"] = sizes["test"] / sizes["train"]
    trained = (part for s in rows if s != "test" for own in rows[s].values() for part in own)
    facts["unused"] = max(0, sum(map(len, labels["train"].values())) - sum(map(len, trained)))
    return facts


def _of_units(
    config: DataConfig, groups: list[ClientGroup], split: str, rows: Rows, of: Mapping[str, Units]
) -> Rows:
    """Return a split's rows, given each client's units; raise ``DataError`` for one without any."""
    for name, clients in rows.items():
        if not min(map(len, clients)):
            what, remedy = f"{split} patients (data.patient)", f"Lower {client_count_key(config)}"
            count = sum(map(len, clients))
            raise too_few_examples_error(name, count, what, len(clients), remedy)
    return {g.name: [of[g.domain].rows(own) for own in rows[g.name]] for g in groups}
