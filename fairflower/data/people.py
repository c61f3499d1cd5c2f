"""Groups of people, defined by a sensitive attribute of each example (``data.groups``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fairflower.data.data_set import DataSet
from fairflower.data.federation import Ints
from fairflower.data.files import check_twins
from fairflower.errors import DataError

#: Maximum number of groups. An attribute with more values is probably a number, such as an age in
#: years.
MAX_GROUPS = 100


class GroupsOfFiles(DataSet):
    """A data set whose files give each example a value of the attribute ``data.groups``.

    The group names are the sorted values of all domains.
    """

    @abstractmethod
    def group_values(self, domain: str, split: str) -> Sequence[str]:
        """Return the value of ``data.groups`` for each example of a split, N strings.

        Raises ``DataError`` with the name of the file if the file has no values.
        """

    @cached_property
    def _values(self) -> dict[tuple[str, str], npt.NDArray[np.str_]]:
        places = [(domain, split) for domain in self.domains for split in ("train", "test")]
        return {place: np.asarray(self.group_values(*place), np.str_) for place in places}

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        if not self.config.groups:
            return ()
        held: dict[str, set[str]] = {}
        for (domain, _), values in self._values.items():
            held.setdefault(domain, set()).update(map(str, set(values)))
        names = sorted(set().union(*held.values()))
        if len(names) > MAX_GROUPS:
            raise DataError(
                f"data.groups = {self.config.groups!r}: found {len(names)} different values, such "
                f"as {', '.join(names[:3])}; expected at most {MAX_GROUPS} groups. Store ranges "
                "of values instead."
            )
        check_twins(f"data.groups = {self.config.groups!r}: the groups", held, "Change the values")
        return tuple(names)

    def group_of(self, domain: str, split: str) -> Ints:
        names = np.array(self.group_names)
        return np.searchsorted(names, self._values[domain, split]).astype(np.int64)


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
