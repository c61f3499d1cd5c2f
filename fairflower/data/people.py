"""Groups of people, defined by a sensitive attribute of each example (``data.groups``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fairflower.data.data_set import DataSet, labels_of
from fairflower.data.federation import Ints
from fairflower.errors import DataError


def check_comparable(name: str, groups: str, group_names: Sequence[str], num_classes: int) -> None:
    """Raise ``DataError`` if there is only one group of people, or not exactly two classes."""
    if groups and len(group_names) < 2:
        raise DataError(
            f"data.groups = {groups!r}: found only the group {', '.join(group_names)}; expected at"
            " least two groups. Name another attribute, or remove data.groups."
        )
    if groups and num_classes != 2:
        raise DataError(
            f"data.groups = {groups!r}: group-fairness metrics need two classes (class 1 is the"
            f" positive class), but {name} has {num_classes}. Remove data.groups."
        )


def check_smallest(data_set: DataSet, least: int) -> None:
    """Raise ``DataError`` if fewer than ``least`` examples have a class or group of people.

    Only names and numbers that come from the examples are checked, such as labels in a file. Labels
    that count the classes, 0, 1, 2 and so on without a gap, reveal nothing, nor do names that a
    data set's class declares.
    """
    kind = type(data_set)
    declared = isinstance(kind.num_classes, int) or (
        isinstance(kind.classes, tuple) and kind.classes
    )
    grouped = data_set.config.groups and kind.group_names is not DataSet.group_names
    places = [(domain, split) for split in ("train", "test") for domain in data_set.domains]
    numbers: dict[str, Any] = {} if declared else {"classes": partial(labels_of, data_set)}
    numbers |= {"groups": data_set.group_of} if grouped else {}
    for what, of in numbers.items():
        values = np.concatenate([of(*place) for place in places])
        different, counts = np.unique(values, return_counts=True)
        counted = what == "classes" and not data_set.classes
        if counted and len(counts) == different.max(initial=-1) + 1:
            continue
        if rare := int((counts < least).sum()):
            raise DataError(
                f"{rare} of the {len(counts)} {what} have fewer than {least} examples here "
                "(data.smallest-group, and smallest-group in the node config), so they may say "
                "who has them. Join them with others, or lower both numbers.",
                public=True,
            )


def check_used(data_set: DataSet, arrays: Mapping[str, Any], least: int) -> None:
    """Raise ``DataError`` if a run uses fewer than ``least`` of a site's examples of a split.

    A site that has no more may use them. Groups of people are counted, so each needs ``least``.
    """
    for split in (split for split in ("train", "test", "validation") if f"y_{split}" in arrays):
        source = "test" if split == "test" else "train"
        has = len(labels_of(data_set, data_set.domains[0], source))
        _, counts = np.unique(arrays.get(f"g_{split}", ()), return_counts=True)
        few = f"the run uses {len(arrays[f'y_{split}'])} of this site's {split} examples"
        if rare := int((counts < least).sum()):
            few = f"{rare} of the groups of people have too few {split} examples here"
        if rare or len(arrays[f"y_{split}"]) < min(least, has):
            raise DataError(
                f"{few}, fewer than {least} (data.smallest-group, and smallest-group in the node "
                "config). Use more examples, join groups, or lower both numbers.",
                public=True,
            )


def people_by_domain(
    data_set: DataSet, labels: Mapping[str, Mapping[str, Ints]]
) -> dict[tuple[str, str], Ints]:
    """Return the groups of people by domain and split of the source; empty without ``data.groups``.

    ``labels`` maps such a split and a domain to the labels of the examples.
    """
    if not data_set.config.groups:
        return {}
    return {
        (domain, split): _checked(data_set, domain, split, values)
        for split, by_domain in labels.items()
        for domain, values in by_domain.items()
    }


def _checked(data_set: DataSet, domain: str, split: str, labels: Ints) -> Ints:
    count, values = len(data_set.group_names), np.asarray(data_set.group_of(domain, split))
    where = f"{type(data_set).__name__}: {domain}: {split}: groups"
    found: Any = f"{values.dtype} {list(values.shape)}"
    if values.dtype != np.int64 or values.shape != labels.shape:
        raise DataError(f"{where}: found {found}; expected int64 {list(labels.shape)}.")
    if len(values) and not 0 <= values.min() <= values.max() < count:
        raise DataError(
            f"{where}: found numbers from {values.min()} to {values.max()}; expected 0 to "
            f"{count - 1}, the indices of group_names."
        )
    return values
