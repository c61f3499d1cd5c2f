"""Units: examples of a patient, family or device, which stay together (``data.patient``)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fairflower.data.data_set import DataSet, invalid_values_error
from fairflower.data.federation import Ints
from fairflower.data.files import numbered
from fairflower.errors import DataError


@dataclass(frozen=True)
class Units:
    """The units of a domain's split, numbered by their first examples.

    ``labels``, int64 [U], are their most frequent labels, by which they are divided. ``sizes``,
    int64 [U], are their numbers of examples, and ``of``, int64 [N], is each example's unit.
    """

    labels: Ints
    sizes: Ints
    of: Ints

    def rows(self, chosen: Ints) -> Ints:
        """Return the rows of these units, one unit's after another's, int64 [n]."""
        return np.concatenate([self._rows[unit] for unit in chosen])

    @cached_property
    def _rows(self) -> list[Ints]:
        return np.split(np.argsort(self.of, kind="stable"), np.cumsum(self.sizes)[:-1])


def units_of(data_set: DataSet, domain: str, split: str, labels: Ints) -> Units:
    """Return the units of examples with these labels; each is alone without ``data.patient``."""
    if not data_set.config.patient:
        return Units(labels, np.ones(len(labels), np.int64), np.arange(len(labels)))
    values = np.asarray(data_set.units(domain, split), str)
    if values.shape != labels.shape:
        expected = f"{len(labels)}, one for each example"
        raise invalid_values_error(data_set, domain, split, "units", len(values), expected)
    of = numbered(values)
    pairs, counts = np.unique(np.stack([of, labels]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    _, first = np.unique(pairs[0][order], return_index=True)
    return Units(pairs[1][order][first], np.bincount(of), of)


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
