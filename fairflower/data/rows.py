"""Division of a data set's rows among the clients of each domain, for every split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from fairflower.config import DataConfig
from fairflower.data.client_groups import ClientGroup, client_groups
from fairflower.data.data_set import (
    DataSet,
    client_count_key,
    labels_of,
    too_few_examples_error,
)
from fairflower.data.federation import Federation, Ints
from fairflower.data.partition import divide, like_training, split_rng
from fairflower.data.validation import hold_out, set_aside

#: Split of a federation -> split of the data set from which its examples are taken.
SPLITS = {"train": "train", "validation": "train", "test": "test"}
#: Group -> rows of each of its clients, int64 [n].
Rows = dict[str, list[Ints]]


def divided_rows(
    data_set: DataSet,
) -> tuple[dict[str, dict[str, Ints]], list[ClientGroup], dict[str, Rows]]:
    """Return labels by split and domain, groups of clients, and rows by split, group and client."""
    domains = {"train": data_set.client_domains, "test": data_set.domains}
    labels = {s: {d: labels_of(data_set, d, s) for d in domains[s]} for s in domains}
    groups = client_groups(data_set, labels["train"])
    return labels, groups, _rows(data_set, groups, labels)


def _rows(
    data_set: DataSet, groups: list[ClientGroup], labels: Mapping[str, Mapping[str, Ints]]
) -> dict[str, Rows]:
    """Divide the rows by split, group and client. Validation rows are optional (a setting)."""
    config = data_set.config
    train = train_rows(data_set, groups, labels["train"])
    test = test_rows(config, groups, labels["test"])
    skewed = bool(config.dirichlet_alpha or groups[0].trained_on)
    if skewed:
        test = _like_training(groups, train, labels["train"], test, labels["test"])
    if count := config.validation_examples:
        pools = {group.name: group.rows for group in groups}
        unused = set_aside(pools, train, count, config.seed)
        if skewed:
            unused = _like_training(groups, train, labels["train"], unused, labels["train"])
        return {"train": train, "validation": unused, "test": test}
    if not config.validation_fraction:
        return {"train": train, "test": test}
    group_labels = {group.name: labels["train"][group.domain] for group in groups}
    divided = hold_out(train, group_labels, config.validation_fraction, config.seed)
    kept, held_out = ({name: pair[i] for name, pair in divided.items()} for i in range(2))
    return {"train": kept, "validation": held_out, "test": test}


def train_rows(data_set: DataSet, groups: list[ClientGroup], labels: Mapping[str, Ints]) -> Rows:
    """Divide the training rows of each group among its clients."""
    if groups[0].trained_on:
        return {group.name: list(group.trained_on) for group in groups}
    config, rows = data_set.config, {}
    for group in groups:
        shares = divide(
            group.name,
            labels[group.domain][group.rows],
            group.sizes,
            config.seed,
            every_class=data_set.every_class,
            alpha=config.dirichlet_alpha,
            client_count_key=client_count_key(config),
        )
        rows[group.name] = [group.rows[share] for share in shares]
    return rows


def test_rows(config: DataConfig, groups: list[ClientGroup], labels: Mapping[str, Ints]) -> Rows:
    """Shuffle each group's test rows, limit their number and divide them among its clients.

    If there are fewer rows than clients, some get none: `check_clients_can_test` refuses this if
    clients test.
    """
    rows = {}
    for group in groups:
        if group.tested_on:
            rows[group.name] = list(group.tested_on)
            continue
        order = split_rng(config.seed, group.domain, "test").permutation(len(labels[group.domain]))
        kept = order[: config.test_examples or None]
        if not len(kept):
            raise too_few_examples_error(group.name, 0, "test", len(group.sizes), "")
        rows[group.name] = np.array_split(kept, len(group.sizes))
    return rows


def check_clients_can_test(config: DataConfig, federation: Federation, split: str) -> None:
    """Raise ``DataError`` if a domain has fewer examples in a split than clients."""
    clients = Counter(client.domain for client in federation.clients)
    for domain, count in zip(federation.domains, federation.sizes(split), strict=True):
        if count < clients[domain]:
            limit = " or raise data.test-examples" * (count == config.test_examples > 0)
            remedy = (
                f"Lower {client_count_key(config)}{limit}, or let the server test (evaluate.by)"
            )
            raise too_few_examples_error(domain, count, split, clients[domain], remedy)


def _like_training(
    groups: list[ClientGroup],
    train: Rows,
    train_labels: Mapping[str, Ints],
    test: Rows,
    test_labels: Mapping[str, Ints],
) -> Rows:
    """Divide test or validation rows by class as the training rows of each group are divided."""
    rows = dict(test)
    for group in groups:
        if group.tested_on:
            continue
        trained, tested = train_labels[group.domain], test_labels[group.domain]
        most = 1 + max(trained.max(), tested.max())
        counts = np.array([np.bincount(trained[own], minlength=most) for own in train[group.name]])
        kept = np.concatenate(test[group.name])
        rows[group.name] = [kept[share] for share in like_training(tested[kept], counts)]
    return rows
