"""Groups of people: the group of each example by a sensitive attribute (``data.groups``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflower.data.client_groups import ClientGroup
from fairflower.data.data_set import DataSet
from fairflower.data.federation import Ints
from fairflower.errors import DataError

#: Largest number of groups: an attribute with more values is a number, such as an age in years.
MOST_GROUPS = 100


class GroupsOfFiles(DataSet):
    """A data set whose files have a value of ``data.groups`` for every example.

    Groups have the values as names, sorted, over all domains.
    """

    @abstractmethod
    def group_values(self, domain: str, split: str) -> Sequence[str]:
        """Return the value of ``data.groups`` for each example of a split, N texts.

        ``DataError`` names the file if it has no values.
        """

    @cached_property
    def _values(self) -> dict[tuple[str, str], npt.NDArray[np.str_]]:
        places = [(domain, split) for domain in self.domains for split in ("train", "test")]
        return {place: np.asarray(self.group_values(*place), np.str_) for place in places}

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        if not self.config.groups:
            return ()
        names = sorted({str(name) for values in self._values.values() for name in set(values)})
        if len(names) > MOST_GROUPS:
            raise DataError(
                f"data.groups = {self.config.groups!r}: found {len(names)} different values, such "
                f"as {', '.join(names[:3])}; expected at most {MOST_GROUPS} groups. Store ranges."
            )
        return tuple(names)

    def group_of(self, domain: str, split: str) -> Ints:
        names = np.array(self.group_names)
        return np.searchsorted(names, self._values[domain, split]).astype(np.int64)


def check_comparable(name: str, groups: str, group_names: Sequence[str], num_classes: int) -> None:
    """Raise ``DataError`` for a single group of people, or another number of classes than two."""
    if groups and len(group_names) < 2:
        raise DataError(
            f"data.groups = {groups!r}: found the group {', '.join(group_names)} alone; expected "
            "at least two to compare. Name another attribute, or remove data.groups."
        )
    if groups and num_classes != 2:
        raise DataError(
            f"data.groups = {groups!r}: metrics of group fairness need two classes, of which 1 is "
            f"the positive one, and {name} has {num_classes}. Remove data.groups."
        )


def groups_by_client(
    data_set: DataSet,
    groups: Sequence[ClientGroup],
    rows: Mapping[str, Mapping[str, Sequence[Ints]]],
    labels: Mapping[str, Mapping[str, Ints]],
    source_of: Mapping[str, str],
) -> list[dict[str, Ints]]:
    """Return the groups of each client's people by split; without ``data.groups`` empty.

    ``rows`` are by split, name of the group of clients, and client; ``labels`` by split of the
    source and domain; ``source_of`` maps splits to those of the source.
    """
    if not data_set.config.groups:
        return [{} for group in groups for _ in group.sizes]
    read = {
        (domain, split): _checked(data_set, domain, split, labels[split][domain])
        for domain in dict.fromkeys(group.domain for group in groups)
        for split in dict.fromkeys(source_of[s] for s in rows)
    }
    return [
        {s: read[group.domain, source_of[s]][rows[s][group.name][k]] for s in rows}
        for group in groups
        for k in range(len(group.sizes))
    ]


def _checked(data_set: DataSet, domain: str, split: str, labels: Ints) -> Ints:
    count, values = len(data_set.group_names), data_set.group_of(domain, split)
    where = f"{type(data_set).__name__}: {domain}: {split}: groups"
    found: Any = f"{values.dtype} {list(values.shape)}"
    if values.dtype != np.int64 or values.shape != labels.shape:
        raise DataError(f"{where}: found {found}; expected int64 {list(labels.shape)}.")
    if len(values) and not 0 <= values.min() <= values.max() < count:
        raise DataError(
            f"{where}: found numbers from {values.min()} to {values.max()}; expected 0 to "
            f"{count - 1}, one for each of group_names."
        )
    return values
