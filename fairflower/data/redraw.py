"""Other draws of training and test examples (``data.redraw``), and what two draws share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflower.data.data_set import DataSet
from fairflower.data.federation import Ints
from fairflower.data.partition import ClientGroup
from fairflower.data.rows import SPLITS, Rows
from fairflower.errors import DataError
from fairflower.seeds import derive_seed


def draw_anew(data_set: DataSet) -> None:
    """Let a data set draw its training and test examples with ``data.seed``, by ``data.redraw``.

    The examples of both splits of a domain are pooled, and as many test examples as before are
    drawn: in each class, or by examples that stay together (`DataSet.units`).
    """
    config, splits = data_set.config, ("train", "test")
    if data_set.partitioner() is not None:
        raise DataError("data.redraw: a partitioner divides the data. Remove the setting.")
    labels, examples, group_of = data_set.labels, data_set.examples, data_set.group_of

    @cache
    def drawn(domain: str) -> tuple[int, dict[str, Ints]]:
        """Return the number of training examples in the files, and each split's places."""
        trained, tested = (np.asarray(labels(domain, split)) for split in splits)
        rng = np.random.default_rng(derive_seed(config.seed, domain, "redraw"))
        if config.redraw == "rows":
            test = _by_class(trained, tested, rng)
        else:
            units = np.concatenate([np.asarray(data_set.units(domain, s), str) for s in splits])
            if len(np.unique(units)) < 2:
                raise DataError(
                    f"data.redraw = {config.redraw!r}: {domain!r} has only one. Set it to rows."
                )
            test = _by_unit(units, len(tested), rng)
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

    vars(data_set).update(
        labels=partial(of_all, labels),
        group_of=partial(of_all, group_of),
        examples=examples_of,
        places=places,
    )


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


def _by_class(train: Ints, test: Ints, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return a mask, bool [N], of as many random test examples of each class as in ``test``."""
    pooled = np.concatenate([train, test])
    chosen = np.zeros(len(pooled), np.bool_)
    for label in np.unique(test):
        members = rng.permutation(np.flatnonzero(pooled == label))
        chosen[members[: np.count_nonzero(test == label)]] = True
    return chosen


def _by_unit(
    units: npt.NDArray[np.str_], count: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return a mask, bool [N], of random units that have about ``count`` examples together."""
    _, unit, sizes = np.unique(units, return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    nearest = np.abs(np.cumsum(sizes[order])[:-1] - count).argmin()  # one unit is left to train on
    return np.isin(unit, order[: 1 + nearest])
