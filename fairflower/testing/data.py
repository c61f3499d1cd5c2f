"""What every data set has to keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from fairflower.config import DataConfig
from fairflower.data import DataError, DataSet
from fairflower.data.federation import Ints


def check_data(
    made_by: Callable[..., DataSet], config: DataConfig | None = None, **arguments: Any
) -> None:
    """Check what every data set keeps: labels and examples that belong together, always the same.

    Parameters
    ----------
    made_by
        A subclass of `DataSet`, `FeatureSet` or `TokenSet`, called with ``config`` and these
        ``arguments``.
    config
        Where its files are; by default in $FAIRFLOWER_DATA, if it has any.

    Raises
    ------
    AssertionError
        With what is broken, and what to do.
    """
    config = DataConfig() if config is None else config
    one, two = made_by(config, **arguments), made_by(config, **arguments)
    name = type(one).__name__
    assert one.domains, f"{name}: it has no domains."
    assert len(set(one.domains)) == len(one.domains), f"{name}: two domains have one name."
    assert json.dumps(one.fingerprint()) == json.dumps(two.fingerprint()), (
        f"{name}: two of the same files have different fingerprints."
    )
    for scale in (one.mean, one.std) if one.kind == "features" else ():
        count = _examples(one, one.domains[0], "train", np.array([0])).shape[1]
        assert len(scale) in (0, count), f"{name}: {count} features, {len(scale)} in mean or std."
    if one.classes:
        assert one.num_classes in (None, len(one.classes)), (
            f"{name}: {len(one.classes)} names for {one.num_classes} classes."
        )
    for domain in one.domains:
        assert one.source(domain), f"{name}: it does not say where {domain} comes from."
        for split in ("train", "test"):
            _check_split(one, two, domain, split)


def _check_split(one: DataSet, two: DataSet, domain: str, split: str) -> None:
    words = f"{type(one).__name__}: {domain}, {split}"
    y = one.labels(domain, split)
    fits = y.ndim == 1 and y.dtype == np.int64
    assert fits, f"{words}: labels are {y.dtype} {y.shape}, expected int64 [N]."
    assert len(y), f"{words}: there are no {one.kind}."
    fits = y.min() >= 0 and (one.num_classes is None or y.max() < one.num_classes)
    assert fits, f"{words}: labels from {y.min()} to {y.max()}, expected 0 to num_classes - 1."
    assert np.array_equal(y, two.labels(domain, split)), (
        f"{words}: labels differ from call to call."
    )

    rows = np.unique(np.linspace(0, len(y) - 1, 5).astype(np.int64))
    x = _examples(one, domain, split, rows)
    fits = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3))
    assert fits or one.kind != "images", (
        f"{words}: images are {x.dtype} {x.shape}, expected uint8 [N, H, W] or [N, H, W, 3]."
    )
    assert len(x) == len(rows), f"{words}: {len(x)} {one.kind} for {len(rows)} rows."
    for k, row in enumerate(rows):
        (alone,) = two.examples(domain, split, np.array([row]))
        assert np.array_equal(alone, x[k]), (
            f"{words}: {one.kind} of row {row} differ from call to call, or by the rows beside it."
        )


def _examples(data_set: DataSet, domain: str, split: str, rows: Ints) -> Any:
    """What a set gives; of features and token ids it checks itself what they are."""
    try:
        return data_set.examples(domain, split, rows)
    except DataError as error:
        raise AssertionError(str(error)) from error
