"""Metrics of users: functions of a test's logits and labels, named in ``evaluate.metrics``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import STOPS, ConfigError, failure_text
from fairflower.registry import METRICS
from fairflower.registry.named import add_cwd_to_path

#: Names that ``history.csv`` and replies of clients already use.
RESERVED = frozenset(
    ("accuracy", "balanced_accuracy", "auc", "loss", "eval_loss", "personal_accuracy")
)

#: Name of the record in a reply with the reasons of metrics that failed at a client.
FAILED_METRICS = "failed-metrics"

#: Largest absolute value of a metric: sums of larger numbers may overflow.
LARGEST = 1e300


def metric_names(places: str) -> dict[str, str]:
    """Return the metrics of a comma-separated text: name -> place; imports nothing.

    A metric's name is that of its function. ``ConfigError`` for a name that is taken.

    >>> metric_names("my.metrics:macro_f1, my.metrics:ece")
    {'macro_f1': 'my.metrics:macro_f1', 'ece': 'my.metrics:ece'}
    """
    found: dict[str, str] = {}
    for place in filter(None, map(str.strip, places.split(","))):
        name = place.rpartition(":")[2].rpartition(".")[2]
        if name in found or name in RESERVED:
            taken = f"{found[name]} has it, too" if name in found else "fairflower has this metric"
            raise ConfigError(
                f"evaluate.metrics: the name of {place} is taken: {taken}. Give the function "
                "another name."
            )
        found[name] = place
    return found


def load_metrics(places: str) -> dict[str, Any]:
    """Return the functions by name; ``ConfigError`` if a function cannot be imported."""
    loaded = {}
    for name, place in metric_names(places).items():
        try:
            if place not in METRICS:
                raise ConfigError(f"The metric {place!r} is unknown: expected module:function.")
            loaded[name] = load_function(place)
            directions({name: loaded[name]})
        except ConfigError as error:
            raise ConfigError(f"evaluate.metrics: {error}") from error
    return loaded


@functools.cache
def load_function(place: str) -> Any:
    """Return a metric's function, imported once per process."""
    add_cwd_to_path()
    return METRICS[place]


def directions(functions: Mapping[str, Any]) -> dict[str, int]:
    """Return 1 for metrics whose higher values are better, and -1 for others (``better = -1``)."""
    found = {name: getattr(function, "better", 1) for name, function in functions.items()}
    for name, better in found.items():
        if better not in (1, -1):
            raise ConfigError(f"{name}.better = {better!r}: expected 1 or -1.")
    return found


def compute_metrics(
    places: str, logits: NDArray[np.float64], labels: NDArray[np.int64]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the metrics of a test by name, and the reasons of metrics that failed.

    ``logits`` has the shape [N, C], ``labels`` [N]. Every function gets copies.
    """
    values, wrong = {}, {}
    for name, place in metric_names(places).items():
        try:
            returned = load_metrics(place)[name](logits.copy(), labels.copy())
            values[name] = _number(name, returned)
        except (ConfigError, _WrongValue) as error:
            wrong[name] = str(error)
        except STOPS:
            raise
        except BaseException as error:
            wrong[name] = f"it raised {failure_text(error)}"
    return values, wrong


class _WrongValue(Exception):
    """A metric did not return a finite number."""


def _number(name: str, returned: Any) -> float:
    try:
        array = np.asarray(returned)
    except Exception:  # for example a tensor on another device
        array = np.empty((), dtype=object)
    if array.shape != ():
        raise _WrongValue(f"it returned an array of shape {array.shape}; expected a number")
    if array.dtype.kind not in "biuf":
        raise _WrongValue(f"it returned a {type(returned).__name__}; expected a number")
    value = float(array)
    if not abs(value) <= LARGEST:  # NaN, too
        raise _WrongValue(f"it returned {value}; expected a finite number")
    if name.endswith("accuracy") and not 0 <= value <= 1:
        raise _WrongValue(
            f"it returned {value}; expected a number from 0 to 1, as the name ends in accuracy"
        )
    return value
