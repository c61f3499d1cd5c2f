"""A client's update as a vector within SecAgg+'s range, and the sum of these vectors.

Flower's protocol multiplies a vector by the client's weight, clips it to ``CLIPPING``, rounds it to
integers below ``quantization_range`` and adds masks modulo 2**32. Here updates are scaled so that
no value is clipped; an update that is too large for this is an error.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.records import is_buffer
from fairflower.config.secure import WEIGHT_KEY
from fairflower.errors import ConfigError
from fairflower.numerics import Vector

#: Bound on weighted values, from -CLIPPING to CLIPPING; Flower's default.
CLIPPING = 8.0

#: Scale of integer arrays, such as BatchNorm's batch counters.
INTEGERS = 2.0**16

#: Number of check values per client; in the sum they reveal whether a client used a wrong weight.
CHECKS = 3

#: Units in which squared norms are sent. The server reads the smallest unit in which no client is
#: out of range, so that the sum is precise for any norm.
UNITS = 16.0 ** np.arange(-10, 16)

#: Largest factor of a squared norm: q-FFL's for a loss of 0.
MOST_FACTOR = 1e10

#: Names in the config of a train message.
_RANGE, _CHECKS = "secure.range", "secure.checks"
_FACTOR, _BUFFERS = "secure.square-factor", "secure.buffers"


def quantization_range(clients: int) -> int:
    """Return the largest power of two, up to 2**30, for which a sum over clients is below 2**32.

    >>> [quantization_range(K) == 2**bits for K, bits in ((3, 30), (10, 28), (1023, 22))]
    [True, True, True]
    """
    return int(2 ** min(30, 32 - clients.bit_length()))


@dataclass(frozen=True)
class MaskingInstructions:
    """Values that the server sends to one client; raises ``ValueError`` if they are invalid."""

    #: The client's weight as an integer from 0 to ``range``, the largest weight of any client.
    weight: int
    #: The quantization range.
    range: int
    #: Random numbers that the client appends to its vector.
    checks: tuple[float, ...]
    #: Factor of the update's squared norm, if the strategy needs the sum of these norms.
    factor: float | None = None
    #: Names of arrays that are not part of this norm, because they are not trained.
    buffers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        integers = type(self.weight) is int and type(self.range) is int
        checks = [value for value in self.checks if isinstance(value, float) and abs(value) <= 1]
        if not (
            (integers and 0 <= self.weight <= self.range)
            and len(checks) == len(self.checks) == CHECKS
            and (self.factor is None or 0 <= self.factor <= MOST_FACTOR)
        ):
            raise ValueError(
                f"the server sent the weight {self.weight!r}, the largest weight {self.range!r}, "
                f"{self.checks} and the factor {self.factor!r}. Expected are integers from 0 to "
                f"the largest, {CHECKS} numbers from -1 to 1, and a factor up to {MOST_FACTOR:g}"
            )

    @property
    def ratio(self) -> float:
        """The client's weight as a share of the largest, 0 to 1."""
        return self.weight / self.range

    def to_config(self) -> dict[str, Any]:
        """Return the values for the config of the client's message."""
        values = {WEIGHT_KEY: self.weight, _RANGE: self.range, _CHECKS: list(self.checks)}
        if self.factor is not None:
            values |= {_FACTOR: self.factor, _BUFFERS: list(self.buffers)}
        return values

    @classmethod
    def from_config(cls, config: ConfigRecord | Mapping[str, Any]) -> Self:
        """Read a message's config; raise ``ValueError`` if a value is invalid or missing."""
        checks, buffers = config.get(_CHECKS, []), config.get(_BUFFERS, [])
        numbers = config.get(WEIGHT_KEY), config.get(_RANGE), tuple(checks)  # type: ignore[arg-type]
        return cls(*numbers, config.get(_FACTOR), tuple(buffers))  # type: ignore[arg-type]


def scale_of(received: NDArray[Any]) -> float:
    """Return the number by which an array's updates are divided before they are masked."""
    if received.dtype.kind in "iu":
        return INTEGERS
    return max(1.0, float(np.abs(received[np.isfinite(received)]).max(initial=0)))


def encode(
    received: Arrays,
    sent: Arrays,
    instructions: MaskingInstructions,
    trained: Collection[str] | None = None,
) -> Vector:
    """Return the client's vector for the protocol, which multiplies it by the client's weight.

    ``trained`` has the names of the trained arrays; by default, all that do not look like buffers.
    Raises ``ValueError`` if an array has another shape, or its update is out of range and would be
    clipped. Only the site's own log has the error's text.
    """
    if received.keys() != sent.keys():
        raise ValueError("the trained arrays differ from the received arrays")
    parts = []
    squares = 0.0
    for name, before in received.items():
        if sent[name].shape != before.shape:
            raise ValueError(
                f"the trained array {name!r} has shape {sent[name].shape}, the received array "
                f"{before.shape}"
            )
        if before.dtype.kind != "f":
            update = np.asarray(sent[name].astype(object) - before, np.float64)  # exact
        else:  # 0 where both are infinite or NaN
            still = ~(np.isfinite(before) | np.isfinite(sent[name]))
            update = np.where(still, 0, sent[name]).astype(np.float64) - np.where(still, 0, before)
        largest, scale = float(np.abs(update).max(initial=0)), scale_of(before)
        if not largest <= CLIPPING * scale:  # also true for NaN
            raise ValueError(
                f"the update of {name!r} is out of range: secure aggregation allows values of at "
                f"most {CLIPPING * scale:.3g} ({CLIPPING:g} times the array's largest value, at "
                "least 1). Lower train.lr"
            )
        if name not in instructions.buffers:
            squares += float(np.square(update).sum())
        elif largest > 0 and (name in trained if trained else not is_buffer(name, before)):
            # Otherwise the server could ask for the norm of a single array.
            raise ValueError(f"{_BUFFERS} names {name!r}, but this array is trained")
        parts.append(update.reshape(-1) / scale)
    parts.append(np.array(instructions.checks, np.float64))
    if instructions.factor is not None:
        parts.append(_in_units(instructions.factor * squares, instructions.ratio))
    return np.concatenate(parts)


def size_of(received: Arrays, squares: bool) -> int:
    """Return the length of the vectors that `encode` returns."""
    return sum(a.size for a in received.values()) + CHECKS + (2 * len(UNITS) if squares else 0)


def _in_units(value: float, ratio: float) -> Vector:
    """Return a number in each of the `UNITS`, and a mark of 1 for each unit that is too small.

    Marks are divided by the weight, so that the weighted sum counts each of them as 1.
    """
    if ratio == 0:
        return np.zeros(2 * len(UNITS))
    weighted = ratio * value / UNITS
    marks = weighted > CLIPPING
    return np.concatenate([np.minimum(weighted, CLIPPING) / ratio, marks / ratio])


@dataclass(frozen=True)
class WeightedSum:
    """Values that the server learns from a round's masked vectors."""

    #: Weights of the clients in the sum, shape (K,), with sum 1.
    weights: Vector
    #: sum_k w_k Delta_k, by array.
    means: dict[str, NDArray[np.float64]]
    #: Largest possible distance from the unmasked mean, as a share of an array's scale.
    error: float
    #: The mean of ||Delta_k||^2 with weights w_k f_k; None if the strategy does not need it.
    square: float | None = None


class WrongSum(ValueError):
    """A sum in which a client used a different weight, or has a too large squared norm."""


def max_error(instructions: Sequence[MaskingInstructions]) -> float:
    """Return the largest possible error of an entry of the vectors' weighted mean.

    A client's entry is rounded by less than one step, 2 CLIPPING / range. Weights are rounded by
    at most half of 1 / range, both in the sum and in the total weight that divides it.
    """
    return 3 * len(instructions) * CLIPPING / sum(t.weight for t in instructions)


def decode(
    mean: Vector, received: Arrays, instructions: Sequence[MaskingInstructions]
) -> WeightedSum:
    """Return the weighted sum over clients from the weighted mean of their vectors.

    ``instructions`` has the values that the server sent to these clients. Raises `WrongSum` if a
    client used a different weight, or if a squared norm is out of range of all `UNITS`.
    """
    ratios = np.array([t.ratio for t in instructions])
    weights, error = ratios / ratios.sum(), max_error(instructions)
    means, start = {}, 0
    for name, array in received.items():
        part = mean[start : start + array.size] * scale_of(array)
        means[name] = part.reshape(array.shape)
        start += array.size
    checks = mean[start : start + CHECKS]
    expected = weights @ np.array([t.checks for t in instructions])
    if not np.abs(checks - expected).max() <= error:
        raise WrongSum(
            "the sum of the masked weights differs from the sum of the weights that the server "
            "sent, because a client used a different weight, or has another version of fairflower"
        )
    if instructions[0].factor is None:
        return WeightedSum(weights, means, error)
    totals, marks = mean[start + CHECKS :].reshape(2, -1) * ratios.sum()
    if marks.min() >= 0.5:
        raise WrongSum(
            "the squared norm of a client's update times its factor is too large for secure "
            "aggregation. Lower train.lr"
        )
    unit = int(np.argmax(marks < 0.5))  # the smallest in which no client is out of range
    factors = np.array([t.factor for t in instructions], np.float64)
    squares = max(totals[unit], 0.0) * UNITS[unit] / ratios.sum()
    return WeightedSum(weights, means, error, float(squares / (weights @ factors)))


@dataclass(frozen=True)
class SumCohort(Cohort):
    """A cohort for which the server knows the weighted sum of updates, but no individual update.

    Before the masked exchange, ``total`` is None, and the cohort contains only numbers.
    """

    total: WeightedSum | None = None

    def __len__(self) -> int:
        return len(self.client_ids)

    def blocks(self, *args: Any, **options: Any) -> NoReturn:
        """Raise ``ConfigError``, because individual updates are not known."""
        _refuse_individual_updates()

    gram = blocks

    def squared_norms(self, names: Sequence[str] | None = None) -> Vector:
        """Return K equal squared norms with the known sum_k w_k f_k ||Delta_k||^2."""
        if self.total is None or self.total.square is None:
            _refuse_individual_updates()
        return np.full(len(self), self.total.square)

    def average(self, weights: Vector, mask_of: Any = None) -> Arrays:
        """Return theta + sum_k w_k Delta_k for the weights that clients used, within the cap."""
        if mask_of is not None:
            _refuse_individual_updates()
        return self._moved(self._factor_within_cap(weights), self.floats)

    def move(
        self, coefficients: Vector | Mapping[str, Vector], weights: Vector | None = None
    ) -> Arrays:
        """Return theta + c sum_k w_k Delta_k for coefficients that are c times these weights."""
        if isinstance(coefficients, Mapping):
            _refuse_individual_updates()
        c = float(np.sum(coefficients))
        self._factor_within_cap(np.asarray(coefficients) / c if c else coefficients)
        return self._moved(c, self.floats if weights is None else self.parameters)

    def _factor_within_cap(self, weights: Vector) -> float:
        """Return the factor that keeps every weight within the cap; reject unknown weights."""
        if self.total is None or not np.allclose(weights, self.total.weights, atol=1e-6):
            _refuse_individual_updates()
        return min(1.0, self.max_weight / float(weights.max()))

    def _moved(self, factor: float, names: Sequence[str]) -> Arrays:
        """Return the received model plus the mean update, times ``factor`` for arrays ``names``."""
        assert self.total is not None
        moved: Arrays = {}
        for name, received in self.received.items():
            step = self.total.means[name] * (factor if name in names else 1.0)
            if received.dtype.kind == "f":
                values = received + step
                if name in self.buffers and name.endswith("running_var"):
                    values = np.maximum(values, 0)
                moved[name] = np.asarray(values, received.dtype)
                continue
            # Above 0.5 the sum would be raised instead of rounded to the nearest number.
            margin = min(0.5, 1e-6 + self.total.error * scale_of(received))
            if received.dtype.kind == "b":  # the majority's value, as in `merge_integers`
                moved[name] = np.asarray(received ^ (np.abs(step) > 0.5 + margin))
            else:  # rounded down, as there; a sum of integers is exact above 2**53, too
                down = np.floor(step + margin).astype(np.int64)
                moved[name] = np.asarray(received + down.astype(received.dtype))
        return moved


def _refuse_individual_updates() -> NoReturn:
    raise ConfigError(
        "the strategy uses individual updates, but secure aggregation provides only their "
        "weighted sum. Set secure-aggregation = false, or choose another strategy."
    )
