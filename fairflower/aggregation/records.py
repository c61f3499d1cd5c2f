"""Functions that decode Flower's records into arrays and numbers, and validate those of a reply."""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, partial_squared_sums
from fairflower.arrays import arrays_of
from fairflower.errors import ConfigError
from fairflower.numerics.group_fairness import COUNTS, GROUP_COUNTS, check_counts
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.registry.measurements import LARGEST, range_of

BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")


class InvalidReply(ValueError):
    """A reply that cannot be used; the message says what is wrong with it."""


class NotFinite(InvalidReply):
    """A reply with NaN or infinite values, or with values too large to be added to others."""


def decode_record(record: ArrayRecord) -> Arrays:
    """Return a record's arrays by name, not copied; raise ``InvalidReply`` if one is invalid."""
    try:
        return arrays_of(record)
    except ValueError as error:
        raise InvalidReply(str(error)) from error


def check_arrays(arrays: Mapping[str, NDArray[Any]], received: Arrays) -> Arrays:
    """Return the arrays in the model's order; raise ``InvalidReply`` if an array is wrong."""
    return measured_arrays(arrays, received)[0]


def measured_arrays(arrays: Mapping[str, NDArray[Any]], received: Arrays) -> tuple[Arrays, float]:
    """Return the arrays as `check_arrays` does, and the norm of their finite numbers.

    NaN and infinite values are allowed where the received array has them, as in a mask.
    """
    check_names(arrays, received)
    total = 0.0
    for name, expected in received.items():
        got = arrays[name]
        check_type(name, got, expected)
        square = squared_norm(got)
        if not math.isfinite(square):  # squares of finite values may overflow
            finite = np.isfinite(got)
            if (np.isfinite(expected) & ~finite).any():
                raise NotFinite(f"array {name!r} holds NaN or infinite values")
            square = squared_norm(np.where(finite, got, 0))
        total += square
    return {name: arrays[name] for name in received}, math.sqrt(total)


def check_mergeable(received: Arrays, trained: Container[str]) -> list[str]:
    """Return the names of buffers with NaN or infinite values, as in a mask.

    Raises ``ConfigError`` for such values in an array that is ``trained``, and for arrays that do
    not hold real numbers.
    """
    if odd := [name for name, a in received.items() if a.dtype.kind not in "fiub"]:
        raise ConfigError(
            f"Array {odd[0]!r} of the model has dtype {received[odd[0]].dtype}, but strategies "
            "merge only real numbers. Send other numbers as real arrays (complex numbers as two)."
        )
    infinite = [name for name, array in received.items() if not is_finite(array)]
    if wrong := [name for name in infinite if name in trained]:
        raise ConfigError(
            f"Array {wrong[0]!r} of the model holds NaN or infinite values. Initialize it or, if "
            "it is not trained, add it to the strategy's buffers=[...]."
        )
    return infinite


def usual_layout(models: Sequence[Arrays]) -> Arrays:
    """Return zeros, and the infinite values that most of the clients' models have, as in a mask."""
    layout = {name: np.zeros_like(array) for name, array in models[0].items()}
    for name, array in layout.items():
        if 2 * sum(not is_finite(model[name]) for model in models) > len(models):
            for value in (-np.inf, np.inf):
                array[2 * sum((m[name] == value).astype(int) for m in models) > len(models)] = value
    return layout


def with_zeros(models: list[Arrays], names: Iterable[str]) -> tuple[list[Arrays], Arrays]:
    """Return the received model and the clients' models without NaN and infinite values.

    In the arrays ``names`` these values become 0, so that no update is NaN. Also returned are masks
    of the values that stay as received, because not every client has set a finite value.
    """
    unset: Arrays = {}
    for name in names:
        finite, *others = (np.isfinite(model[name]) for model in models)
        unset[name] = ~finite & ~np.all(others, axis=0)
        zeros = [~finite, *[unset[name]] * len(others)]
        models = [
            m | {name: np.where(zero, 0, m[name])} for m, zero in zip(models, zeros, strict=True)
        ]
    return models, unset


def check_names(arrays: Mapping[str, NDArray[Any]], received: Arrays) -> None:
    """Raise ``InvalidReply`` unless the arrays have the names of the received model's."""
    missing = [name for name in received if name not in arrays]
    extra = [name for name in arrays if name not in received]
    if missing or extra:
        raise InvalidReply(
            f"its arrays differ from the model's: missing {missing[:3]}, unexpected {extra[:3]}"
        )


def check_type(name: str, got: NDArray[Any], expected: NDArray[Any]) -> None:
    """Raise ``InvalidReply`` unless an array has the expected shape and dtype."""
    if got.shape != expected.shape:
        raise InvalidReply(f"array {name!r} has shape {got.shape}, expected {expected.shape}")
    if got.dtype != expected.dtype:
        raise InvalidReply(f"array {name!r} has dtype {got.dtype}, expected {expected.dtype}")


def check_representation(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the arrays; raise ``InvalidReply`` unless they are a single real vector ``h``."""
    if list(arrays) != ["h"]:
        raise InvalidReply(f"expected a single array 'h', got {list(arrays)[:3]}")
    h = arrays["h"]
    if h.ndim != 1 or h.size == 0 or not is_real(h):
        raise InvalidReply(f"expected 'h' to be a vector of real numbers, got {h.dtype} {h.shape}")
    return check_arrays(arrays, {"h": np.zeros_like(h)})


def check_values(arrays: Arrays, low: float, high: float) -> None:
    """Raise ``InvalidReply`` for a value outside a range."""
    for name, array in arrays.items():
        if low > -LARGEST and array.size and float(array.min()) < low:
            below = "negative values" if low == 0 else f"values below {low:g}"
            raise InvalidReply(f"array {name!r} holds {below}")
        if high < LARGEST and array.size and float(array.max()) > high:
            raise InvalidReply(f"array {name!r} holds values above {high:g}")


def check_group_counts(values: Any, num_groups: int | None, total: float) -> None:
    """Raise ``InvalidReply`` for counts of people that contradict each other or the ``total``.

    ``values`` are six counts for each of ``num_groups`` groups (None allows any number of groups);
    see `fairflower.numerics.group_fairness`.
    """
    counts = np.asarray(values, np.float64)
    length = counts.size if num_groups is None else len(COUNTS) * num_groups
    if counts.shape != (length,) or not length or length % len(COUNTS):
        groups = "each group" if num_groups is None else f"each of {num_groups} groups"
        raise InvalidReply(
            f"it sent {counts.size} counts of people; expected {len(COUNTS)} for {groups}"
        )
    try:
        table = check_counts(counts.reshape(-1, len(COUNTS)))
    except ValueError as error:
        raise InvalidReply(str(error).rstrip(".")) from None
    if table[:, 0].sum() != total:
        raise InvalidReply(f"it counted {table[:, 0].sum():g} people; expected {total:g}")


def check_finite(name: str, value: object) -> None:
    """Raise ``NotFinite`` for a metric that is NaN or infinite."""
    if not math.isfinite(float(value)):  # type: ignore[arg-type]
        raise NotFinite(f"{name} = {value}: expected a finite number")


def check_metric(name: str, value: object, within: tuple[float, float] | None = None) -> None:
    """Raise ``InvalidReply`` for a metric outside a range, by default that of `range_of`."""
    check_finite(name, value)
    low, high = within or range_of(name)
    if not low <= (number := float(value)) <= high:  # type: ignore[arg-type]
        if -LARGEST < low <= high <= 1:
            expected = f"a number from {low:g} to {high:g}"
        else:
            expected = f"a number >= {low:g}" if number < low else f"at most {high:g}"
        raise InvalidReply(f"{name} = {value}: expected {expected}")


def check_test(
    examples_key: str,
    max_test_sizes: Mapping[int, int],
    num_groups: int,
    client: int,
    content: RecordDict,
    metrics: MetricRecord,
    *,
    scores: Sequence[Score] = (),
) -> MetricRecord:
    """Return a client's test metrics; raise ``InvalidReply`` if they are impossible.

    ``max_test_sizes`` has the largest possible number of test examples by client id, where known.
    Values of the task's ``scores`` must be in their ranges. With ``num_groups`` groups of people,
    the counts in ``content`` are added to the metrics.
    """
    metrics.pop(GROUP_COUNTS, None)  # these counts are in a record of their own
    most = max_test_sizes.get(client, math.inf)
    accuracy = [score.name for score in scores[:1] if score == ACCURACY]  # others may be undefined
    for key in (*accuracy, "eval_loss"):
        if key not in metrics:
            raise InvalidReply(f"its test metrics lack {key!r}; the client must report it")
    if float(metrics[examples_key]) > most:  # type: ignore[arg-type]
        raise InvalidReply(
            f"it tested the model on {metrics[examples_key]} examples, but its domain has only "
            f"{most}"
        )
    ranges = {name: (s.low, s.high) for s in scores for name in (s.name, f"personal_{s.name}")}
    for key, value in metrics.items():
        check_metric(key, value, ranges.get(key))
    if num_groups:
        counts = dict(content.metric_records.get(GROUP_COUNTS) or {}).get("counts", [])
        check_group_counts(counts, num_groups, float(metrics[examples_key]))  # type: ignore[arg-type]
        metrics[GROUP_COUNTS] = counts
    return metrics


def client_id(metrics: MetricRecord, default: int) -> int:
    """Return the ``client-id`` in a reply's metrics; raise ``InvalidReply`` if it is not an id."""
    value = metrics.get("client-id", default)
    if not (isinstance(value, (int, float)) and float(value).is_integer() and 0 <= value < 2**64):
        raise InvalidReply(f"client-id = {value!r}: expected a non-negative integer")
    return int(value)


def scalar_metrics(content: RecordDict) -> MetricRecord:
    """Return a reply's scalar metrics; metrics with unprintable names are ignored.

    Raises ``InvalidReply`` if an integer is too large for a float.
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
        except OverflowError:  # Python cannot even print every integer of this size
            raise InvalidReply(f"{name}: an integer too large for a float") from None
    return MetricRecord(scalars)


def stack_common_metrics(records: Sequence[MetricRecord]) -> dict[str, NDArray[np.float64]]:
    """Return the metrics that all records have, shape (K,) each."""
    keys = [key for key in records[0] if all(key in record for record in records)]
    return {key: np.array([record[key] for record in records], float) for key in keys}


#: The function that Flower's strategies call by default.
_FLOWERS_MEAN = FedAvg().train_metrics_aggr_fn


def aggregate_metrics(
    metrics: Mapping[str, NDArray[np.float64]],
    examples_key: str,
    function: Callable[[list[RecordDict], str], MetricRecord],
    contents: list[RecordDict],
) -> MetricRecord:
    """Average the clients' metrics, except ids, over examples, or call the user's function."""
    if function is not _FLOWERS_MEAN:
        return function(contents, examples_key)
    weights = metrics[examples_key] / metrics[examples_key].sum()
    skip = {examples_key, "client-id", "state-round"}
    means = {k: float(weights @ v) for k, v in metrics.items() if k not in skip}
    lists = {k: (weights @ v).tolist() for k, v in _common_lists(contents).items()}
    return MetricRecord({**lists, **means})


def _common_lists(contents: Sequence[RecordDict]) -> dict[str, NDArray[np.float64]]:
    """Return the metrics that are lists of the same length for all clients, shape (K, N) each."""
    lists = [
        {k: v for record in c.metric_records.values() for k, v in record.items()} for c in contents
    ]
    shapes = [{k: np.shape(v) for k, v in every.items()} for every in lists]
    return {
        key: np.array([every[key] for every in lists], float)
        for key, shape in shapes[0].items()
        if shape and key.isprintable() and all(other.get(key) == shape for other in shapes)
    }


def is_buffer(name: str, array: NDArray[Any]) -> bool:
    """Return whether an array is not trained, judging by its name and dtype."""
    return array.dtype.kind != "f" or name.endswith(BUFFER_SUFFIXES)


def norm(arrays: Arrays) -> float:
    """Return the Euclidean norm over all floating-point arrays; integer arrays are ignored."""
    return math.sqrt(sum(map(squared_norm, arrays.values())))


def others_medians(norms: Mapping[int, float]) -> dict[int, float]:
    """Return, for each client, the lower median of the other clients' norms; 0 without others.

    >>> others_medians({0: 1.0, 1: 2.0, 2: 9.0})
    {0: 2.0, 1: 1.0, 2: 1.0}
    """
    ranked = sorted(norms, key=norms.__getitem__)
    middle = (len(ranked) - 2) // 2  # among the others
    if middle < 0:
        return dict.fromkeys(ranked, 0.0)
    medians = (norms[ranked[middle + (rank <= middle)]] for rank in range(len(ranked)))
    return dict(zip(ranked, medians, strict=True))


def squared_norm(array: NDArray[Any]) -> float:
    """Return an array's sum of squares, added up in double precision; 0 for integers."""
    if array.dtype.kind != "f":
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(partial_squared_sums(array.reshape(-1)))


def is_real(array: NDArray[Any]) -> bool:
    """Return whether an array holds real numbers of at most double precision."""
    return array.dtype.kind == "f" and array.dtype.itemsize <= 8


def is_finite(array: NDArray[Any]) -> bool:
    """Return whether an array has neither NaN nor infinite values."""
    if array.dtype.kind != "f":
        return True
    # A sum costs a quarter of the full check, which is needed only if the sum is not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())
