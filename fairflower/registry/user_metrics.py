"""User-defined metrics: functions of logits and labels, named in ``evaluate.metrics``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import STOPS, ConfigError, failure_text, quoted
from fairflower.registry import METRICS
from fairflower.registry.measurements import LARGEST, range_of
from fairflower.registry.named import add_cwd_to_path

#: Metric names that ``history.csv`` and clients' replies already use.
RESERVED = frozenset(
    ("accuracy", "balanced_accuracy", "auc", "loss", "eval_loss", "personal_accuracy")
)

#: Beginnings of names that ``history.csv`` and callbacks give to metrics of other splits or levels.
_PREFIXES = ("validation_", "held_out_", "global_", "worst_client_")

#: Name of the record in a client's reply that says why metrics failed.
FAILED_METRICS = "failed-metrics"


def metric_names(places: str) -> dict[str, str]:
    """Parse a comma-separated list of metrics into name -> ``module:function``; import nothing.

    The name of a metric is the name of its function. Raises ``ConfigError`` if a name is already
    used.

    >>> metric_names("my.metrics:macro_f1, my.metrics:ece")
    {'macro_f1': 'my.metrics:macro_f1', 'ece': 'my.metrics:ece'}
    """
    place_of: dict[str, str] = {}
    for place in filter(None, map(str.strip, places.split(","))):
        name = place.rpartition(":")[2].rpartition(".")[2]
        if name in place_of or name in RESERVED or name.startswith(_PREFIXES):
            taken = (
                f"{place_of[name]} has the same name"
                if name in place_of
                else "it is, or begins like, one of fairflower's metrics"
            )
            raise ConfigError(
                f"evaluate.metrics: the name of {place} is already used: {taken}. Rename the "
                "function."
            )
        place_of[name] = place
    return place_of


def load_metrics(places: str) -> dict[str, Any]:
    """Return the functions by name; raise ``ConfigError`` if a function cannot be imported."""
    loaded = {}
    for name, place in metric_names(places).items():
        try:
            if place not in METRICS:
                raise ConfigError(
                    f"The metric {quoted(place)} is unknown: expected module:function."
                )
            loaded[name] = load_function(place)
            directions({name: loaded[name]})
        except ConfigError as error:
            raise ConfigError(f"evaluate.metrics: {error}") from error
    return loaded


@functools.cache
def load_function(place: str) -> Any:
    """Import a metric's function, once per process."""
    add_cwd_to_path()
    return METRICS[place]


def directions(functions: Mapping[str, Any]) -> dict[str, int]:
    """Return each metric's direction: 1 if higher is better, -1 if lower is (``better = -1``)."""
    direction_of = {}
    for name, function in functions.items():
        try:
            better = getattr(function, "better", 1)
        except Exception as error:
            raise ConfigError(f"{name}.better raised {failure_text(error)}.") from error
        if not isinstance(better, int | float | np.integer) or better not in (1, -1):
            raise ConfigError(f"{name}.better = {quoted(better)}: expected 1 or -1.")
        direction_of[name] = int(better)
    return direction_of


def compute_metrics(
    places: str, logits: NDArray[np.float64], labels: NDArray[np.int64]
) -> tuple[dict[str, float], dict[str, str]]:
    """Compute all metrics; return values by name, and the reasons why other metrics failed.

    ``logits`` has the shape [N, C] and ``labels`` the shape [N]. Every function gets copies of
    both.
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
    if np.ma.is_masked(returned):
        raise _WrongValue("it returned a masked value; expected a number")
    if array.dtype.kind not in "biuf":
        raise _WrongValue(f"it returned a {type(returned).__name__}; expected a number")
    value = float(array)
    if not abs(value) <= LARGEST:  # NaN, too
        raise _WrongValue(f"it returned {value}; expected a finite number")
    if range_of(name) == (0, 1) and not 0 <= value <= 1:
        raise _WrongValue(
            f"it returned {value}; expected a number from 0 to 1, because the name ends in accuracy"
        )
    return value
