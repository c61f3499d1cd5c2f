"""The measurements that strategies can request: of which model, in which shape and in which range.

`fairflower.training.measurements` says how clients compute them. Other packages add a measurement
with a function that is declared by `measurement`; its name is ``module:function``, or that of an
entry point in the group ``fairflower.measurements``.
"""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fairflower.errors import ConfigError
from fairflower.registry import OWN_MEASUREMENTS

#: Largest absolute value of a number, because sums of larger numbers may overflow.
LARGEST = 1e300

#: Largest count: doubles represent all whole numbers up to it.
MAX_COUNT = 2**53


@dataclass(frozen=True)
class Measurement:
    """What the server may assume of a measurement."""

    #: Measured model: received (before training) or trained.
    model: Literal["received", "trained"]
    #: Description for tables.
    description: str = ""
    #: A number in the reply's metrics, or an ArrayRecord: a single array ``h``, of the same length
    #: for every client, or an array for each trainable parameter.
    shape: Literal["number", "vector", "parameters"] = "number"
    #: Range of the number, or of the arrays' values.
    low: float = -LARGEST
    high: float = LARGEST
    #: Whether the number is a count, which has no range for the noise of differential privacy.
    count: bool = False
    #: Whether the value contains means over a client's classes; see ``Exchange.mean_of``.
    class_means: bool = False
    #: What a task must have: ``classes``, or a primary score that is a ``share``, from 0 to 1.
    needs: Literal["", "classes", "share"] = ""
    #: Whether a client knows the value of the trained model before it trains.
    planned: bool = False
    #: Whether the next round needs the model that the client trains in this round.
    needs_last_trained: bool = False
    #: Whether the value is computed once and then kept in the client's state.
    cached: bool = False


class _Measurements(UserDict[str, Measurement]):
    """Measurements by name; iteration yields only built-in names."""

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in OWN_MEASUREMENTS

    def __missing__(self, name: str) -> Measurement:
        """Return a measurement of another package; raise ``ConfigError`` if it is not declared."""
        return load_measurement(name).measurement  # type: ignore[no-any-return]

    def assumed(self, name: str) -> Measurement:
        """Return a requested measurement; a number if only clients of another app know it."""
        if name in self:
            return self[name]
        low, high = range_of(name)
        return Measurement("received", low=low, high=high)


_received, _trained = partial(Measurement, "received"), partial(Measurement, "trained")
_share = partial(_received, low=0, high=1)
_vector = partial(Measurement, shape="vector")
_PEOPLE = (
    "a single array named ``h``: for each group of people (``data.groups``) the numbers of "
    "training examples, positive predictions, positive labels, both, negative labels, and "
    "positive predictions with a negative label"
)

MEASUREMENTS = _Measurements(
    received_loss=_received("mean loss: the cross entropy for classes"),
    received_score=_share("primary score from 0 to 1: accuracy for classes", needs="share"),
    received_accuracy=_share("accuracy, 0 to 1", needs="classes"),
    received_balanced_accuracy=_share("mean accuracy over the client's classes", needs="classes"),
    local_loss=_received(
        "lowest loss that the client reaches by training alone, computed once", cached=True
    ),
    sharpness=_received("increase in the mean loss at distance rho along the gradient"),
    perturbed_loss=_received("mean loss at distance rho along the gradient"),
    minus_score=_share(
        "``received_score`` of the received model without the client's part",
        needs_last_trained=True,
        needs="share",
    ),
    minus_accuracy=_share(
        "accuracy of the received model without the client's part",
        needs_last_trained=True,
        needs="classes",
    ),
    minus_balanced_accuracy=_share(
        "like ``minus_accuracy``, but the mean over the client's classes",
        needs_last_trained=True,
        needs="classes",
    ),
    gradient=_received("gradient of the mean loss", "parameters"),
    steps=_trained(
        "number of optimizer steps in the round", low=0, high=MAX_COUNT, count=True, planned=True
    ),
    trained_loss=_trained("mean loss: the cross entropy for classes"),
    fisher=_trained(
        "diagonal of the empirical Fisher information: mean of squared per-sample gradients",
        "parameters",
        low=0,
    ),
    representation=_vector(
        "trained",
        "a single array named ``h``: mean over classes of each class's mean representation",
        class_means=True,
        needs="classes",
    ),
    received_representation=_vector(
        "received",
        "like ``representation``, but computed by the received model",
        class_means=True,
        needs="classes",
    ),
    received_group_counts=_vector("received", _PEOPLE, low=0, needs="classes"),
    class_counts=_vector(
        "received",
        "a single array named ``h``: number of training examples per class",
        low=0,
        needs="classes",
    ),
)


def measurement(
    model: Literal["received", "trained"] = "received", **facts: Any
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Declare a function of a trainer as a measurement; ``facts`` are fields of `Measurement`.

    The function gets the `Trainer`, whose model is in eval mode and must not be changed; torch's
    global generator is seeded. It returns a number, a tensor (shape ``"vector"``) or a dict of
    tensors by parameter (shape ``"parameters"``).

    >>> @measurement("trained", low=0)
    ... def median_loss(trainer): ...
    >>> median_loss.measurement.model
    'trained'
    """

    def declare(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        function.measurement = Measurement(model, **facts)  # type: ignore[attr-defined]
        return function

    return declare


def load_measurement(name: str) -> Any:
    """Import another package's function.

    Raises ``ConfigError`` if it cannot be imported, or `measurement` does not declare it: a server
    must not be able to make a client call just any function.
    """
    function = OWN_MEASUREMENTS.load(name)
    if not isinstance(getattr(function, "measurement", None), Measurement):
        raise ConfigError(
            f"The function {name!r} is not declared as a measurement. Decorate it with "
            "@measurement(...) from fairflower.registry.measurements."
        )
    return function


def check_scalar(metric: str, example: str) -> None:
    """Raise ``ValueError`` if a name is empty or that of a vector."""
    if not metric or MEASUREMENTS.assumed(metric).shape != "number":
        raise ValueError(
            f"metric = {metric!r}: expected the name of a scalar metric, for example {example!r}."
        )


def range_of(metric: str) -> tuple[float, float]:
    """Return the range of a metric: that of a built-in measurement, or 0 to 1 for accuracies.

    A metric is an accuracy if its name ends so. Nothing is imported, because a client may choose
    the name.

    >>> range_of("received_accuracy"), range_of("personal_accuracy"), range_of("entropy")
    ((0, 1), (0, 1), (-1e+300, 1e+300))
    """
    if metric in MEASUREMENTS.data:
        return MEASUREMENTS[metric].low, MEASUREMENTS[metric].high
    return (0, 1) if metric.endswith("accuracy") else (-LARGEST, LARGEST)
