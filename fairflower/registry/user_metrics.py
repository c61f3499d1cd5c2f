"""User-defined metrics: functions of outputs and targets, named in ``evaluate.metrics``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import STOPS, ConfigError, failure_text, quoted
from fairflower.registry import METRICS
from fairflower.registry.measurements import LARGEST, range_of

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
            loaded[name] = METRICS.load(place)
            direction(name, loaded[name])
        except ConfigError as error:
            raise ConfigError(f"evaluate.metrics: {error}") from error
    return loaded


def direction(name: str, function: Any) -> int:
    """Return a metric's direction: 1 if higher is better, -1 if lower is (``better = -1``)."""
    try:
        better = getattr(function, "better", 1)
    except Exception as error:
        raise ConfigError(f"{name}.better raised {failure_text(error)}.") from error
    if not isinstance(better, int | float | np.integer) or better not in (1, -1):
        raise ConfigError(f"{name}.better = {quoted(better)}: expected 1 or -1.")
    return int(better)


def compute_metrics(
    places: str, logits: NDArray[np.float64], labels: NDArray[Any]
) -> tuple[dict[str, float], dict[str, str]]:
    """Compute all metrics; return values by name, and the reasons why other metrics failed.

    For classes, ``logits`` has the shape [N, C] and ``labels`` the shape [N]; for other tasks, they
    are `Task.for_users` and the targets. Every function gets copies of both.
    """
    values, wrong = {}, {}
    for name, place in metric_names(places).items():
        try:
            returned = load_metrics(place)[name](logits.copy(), labels.copy())
            values[name] = _number(name, returned)
        except ConfigError as error:
            wrong[name] = str(error)
        except STOPS:
            raise
        except BaseException as error:
            wrong[name] = f"it raised {failure_text(error)}"
    return values, wrong


def _number(name: str, returned: Any) -> float:
    """Return a metric's value; raise ``ConfigError`` if it is no number in the metric's range."""
    try:
        array = np.asarray(returned)
    except Exception:  # for example a tensor on another device
        array = np.empty((), dtype=object)
    got, wanted = "", "a number"
    if array.shape != ():
        got = f"an array of shape {array.shape}"
    elif np.ma.is_masked(returned):
        got = "a masked value"
    elif array.dtype.kind not in "biuf":
        got = f"a {type(returned).__name__}"
    elif not abs(float(array)) <= LARGEST:  # NaN, too
        got, wanted = f"{float(array)}", "a finite number"
    elif range_of(name) == (0, 1) and not 0 <= array <= 1:
        got = f"{float(array)}"
        wanted = "a number from 0 to 1, because the name ends in accuracy"
    if got:
        raise ConfigError(f"it returned {got}; expected {wanted}")
    return float(array)
