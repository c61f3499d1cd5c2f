"""Flower's records as arrays and numbers, and what must hold for those of a reply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, partial_squared_sums
from fairflower.arrays import arrays_of

BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")


#: Beyond it doubles no longer tell a number from the next, and nobody counts as far.
MOST = 2**53

#: Of a number that a rule reckons with: sums and differences of larger ones may be no doubles.
LARGEST = 1e300


class InvalidReply(ValueError):
    """A reply that cannot enter a cohort; the message says what is wrong with it."""


class NotFinite(InvalidReply):
    """A reply that holds NaN or infinite values, or what makes them of all that it is added to."""


def decode_record(record: ArrayRecord) -> Arrays:
    """All arrays of a record by name, without copying; ``InvalidReply`` names a bad one."""
    try:
        return arrays_of(record)
    except ValueError as error:
        raise InvalidReply(str(error)) from error


def check_arrays(arrays: Mapping[str, NDArray[Any]], received: Arrays) -> Arrays:
    """The arrays in the model's order, or ``InvalidReply`` naming the first misfit."""
    return measured_arrays(arrays, received)[0]


def measured_arrays(arrays: Mapping[str, NDArray[Any]], received: Arrays) -> tuple[Arrays, float]:
    """As `check_arrays`, and how long the real numbers among them are, as one vector."""
    missing = [name for name in received if name not in arrays]
    extra = [name for name in arrays if name not in received]
    if missing or extra:
        raise InvalidReply(
            f"its arrays are not the model's: missing {missing[:3]}, unexpected {extra[:3]}"
        )
    total = 0.0
    for name, expected in received.items():
        got = arrays[name]
        if got.shape != expected.shape:
            raise InvalidReply(f"array {name!r} has shape {got.shape}, expected {expected.shape}")
        if got.dtype != expected.dtype:
            raise InvalidReply(f"array {name!r} is {got.dtype}, expected {expected.dtype}")
        total += squared_length(got)
        # Squares may overflow without any value being infinite, hence the second look.
        if not (math.isfinite(total) or np.isfinite(got).all()):
            raise NotFinite(f"array {name!r} holds NaN or infinite values")
    return {name: arrays[name] for name in received}, math.sqrt(total)


def check_representation(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """One array ``h`` of real numbers, or ``InvalidReply`` saying what is there instead."""
    if list(arrays) != ["h"]:
        raise InvalidReply(f"expected one array 'h', got {list(arrays)[:3]}")
    h = arrays["h"]
    if h.ndim != 1 or h.size == 0 or not is_real(h):
        raise InvalidReply(f"expected 'h' as real numbers in a row, got {h.dtype} {h.shape}")
    return check_arrays(arrays, {"h": h})


def check_non_negative(arrays: Arrays) -> None:
    """Refuse negative values."""
    for name, array in arrays.items():
        if array.size and array.min() < 0:
            raise InvalidReply(f"array {name!r} holds negative values")


def check_finite(name: str, value: object) -> None:
    """Refuse a metric that is NaN or infinite."""
    if not math.isfinite(float(value)):  # type: ignore[arg-type]
        raise NotFinite(f"{name} = {value}: expected a finite number")


def check_metric(name: str, value: object, least: float = -LARGEST, most: float = LARGEST) -> None:
    """Refuse a metric that is no finite number in a range, or an accuracy that is not 0 to 1."""
    check_finite(name, value)
    number = float(value)  # type: ignore[arg-type]
    if number < least:
        raise InvalidReply(f"{name} = {value}: expected a number from {least:g}")
    if number > most:
        raise InvalidReply(f"{name} = {value}: expected a number up to {most:g}")
    if name.endswith("accuracy") and not 0 <= number <= 1:
        raise InvalidReply(f"{name} = {value}: expected a number from 0 to 1")


def check_round(name: str, value: object) -> None:
    """Refuse what is no round: a whole number from 0, which says that there was none."""
    number = float(value)  # type: ignore[arg-type]
    if not (number >= 0 and number.is_integer()):
        raise InvalidReply(f"{name} = {value}: expected a round, a whole number from 0")


def scalar_metrics(content: RecordDict) -> MetricRecord:
    """The scalars of all of a reply's metric records together, under names that can be printed.

    ``InvalidReply`` names an integer that is too large for a float.
    """
    every = (item for record in content.metric_records.values() for item in record.items())
    scalars: dict[str, Any] = {
        name: value
        for name, value in every
        if isinstance(value, (int, float)) and name.isprintable()
    }
    for name, value in scalars.items():
        try:
            float(value)
        except OverflowError:  # nor can Python print every such integer
            raise InvalidReply(f"{name}: an integer too large for a float") from None
    return MetricRecord(scalars)


def is_buffer(name: str, array: NDArray[Any]) -> bool:
    """Tell by its name and dtype that an array is not trained."""
    return array.dtype.kind != "f" or name.endswith(BUFFER_SUFFIXES)


def length(arrays: Arrays) -> float:
    """How long the real numbers of all arrays are, as one vector."""
    return math.sqrt(sum(map(squared_length, arrays.values())))


def squared_length(array: NDArray[Any]) -> float:
    """The sum of an array's squares, in double precision from block to block; 0 of integers."""
    if array.dtype.kind != "f":
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(partial_squared_sums(array.reshape(-1)))


def is_real(array: NDArray[Any]) -> bool:
    """Tell whether an array holds real numbers of at most double precision."""
    return array.dtype.kind == "f" and array.dtype.itemsize <= 8


def is_finite(array: NDArray[Any]) -> bool:
    """Look for NaN and infinite values; true where there are none."""
    if array.dtype.kind != "f":
        return True
    # A sum is finite only if every term is, and costs a quarter of the full
    # check; it may overflow without any term being infinite, hence the second look.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())
