"""Checks for data sets."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from fairflower.config import DataConfig
from fairflower.data import DataSet
from fairflower.data.data_set import labels_of, mean_and_std, source_of
from fairflower.testing.failures import as_assertions


def check_data(
    made_by: Callable[..., DataSet], config: DataConfig | None = None, **arguments: Any
) -> None:
    """Check that labels and examples of a data set match and are the same on every call.

    The subclass of `DataSet`, `FeatureSet` or `TokenSet` is called with ``config`` and
    ``arguments``; ``config`` is the run config's table ``data``, with the folder of the data set's
    files. Default folder: $FAIRFLOWER_DATA, if files are needed. Raises ``AssertionError`` if a
    property is violated; the message explains how to correct it.

    Examples
    --------
    >>> from fairflower.published.tables import RandHIE
    >>> check_data(RandHIE, groups="site")
    """
    config = DataConfig() if config is None else config
    with as_assertions(made_by):
        _check(made_by(config, **arguments), made_by(config, **arguments))


def _check(first: DataSet, second: DataSet) -> None:
    assert first.domains, "the data set has no domains."
    assert len(set(first.domains)) == len(first.domains), "two domains have the same name."
    assert json.dumps(first.fingerprint()) == json.dumps(second.fingerprint()), (
        "the fingerprint differs between calls."
    )
    if first.classes:
        assert first.num_classes in (None, len(first.classes)), (
            f"{len(first.classes)} names for {first.num_classes} classes."
        )
    for domain in first.domains:
        source_of(first, domain)
        for split in ("train", "test"):
            _check_split(first, second, domain, split)
        (example,) = first.examples(domain, "train", np.array([0]))
        gray = first.kind == "images" and example.ndim == 2
        mean_and_std(first, (1,) if gray else (example.shape[-1],))


def _check_split(first: DataSet, second: DataSet, domain: str, split: str) -> None:
    where = f"{domain}, {split}"
    y = labels_of(first, domain, split)
    assert len(y), f"{where}: there are no {first.kind}."
    assert np.array_equal(y, labels_of(second, domain, split), equal_nan=y.dtype.kind == "f"), (
        f"{where}: labels differ between calls."
    )
    rows = np.unique(np.linspace(0, len(y) - 1, 5).astype(np.int64))
    x = first.examples(domain, split, rows)
    for k, row in enumerate(rows):
        (alone,) = second.examples(domain, split, np.array([row]))
        assert np.array_equal(alone, x[k]), (
            f"{where}: {first.kind} of row {row} differ between calls, or depend on the other rows."
        )
    if first.config.patient:
        units = [np.asarray(data_set.units(domain, split), str) for data_set in (first, second)]
        assert units[0].shape == (len(y),), f"{where}: {len(units[0])} units, expected {len(y)}."
        assert np.array_equal(units[0], units[1]), f"{where}: units differ between calls."
    if not first.config.groups:
        return
    g, names = np.asarray(first.group_of(domain, split)), first.group_names
    fits = g.dtype == np.int64 and g.shape == (len(y),)
    assert fits, f"{where}: groups are {g.dtype} {g.shape}, expected int64 {(len(y),)}."
    fits = g.min() >= 0 and g.max() < len(names)
    assert fits, f"{where}: groups from {g.min()} to {g.max()}, expected 0 to {len(names) - 1}."
    assert np.array_equal(g, second.group_of(domain, split)), (
        f"{where}: groups differ between calls."
    )
