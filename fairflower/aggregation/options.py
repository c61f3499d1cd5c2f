"""Arguments that every strategy accepts, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Annotated, Any, TypedDict, get_origin, get_type_hints

from flwr.app import MetricRecord, RecordDict

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.hooks import Diagnostic
from fairflower.aggregation.participation import Participation, Uniform
from fairflower.arguments import ArgumentSpec, Range
from fairflower.errors import ConfigError

#: Called with each merged cohort; the result is added to the round's diagnostics.
Observer = Callable[[Cohort], Mapping[str, Diagnostic]]


class Options(TypedDict, total=False):
    """Arguments that every strategy accepts in addition to those of its paper.

    The first ten are those of ``flwr.serverapp.strategy.FedAvg``.
    """

    fraction_train: Annotated[float, Range(0, 1)]
    fraction_evaluate: Annotated[float, Range(0, 1)]
    min_train_nodes: Annotated[int, Range(0)]
    min_evaluate_nodes: Annotated[int, Range(0)]
    min_available_nodes: Annotated[int, Range(0)]
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None
    evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None
    #: Names of further arrays that are not trained, such as frozen parameters. Integer arrays and
    #: names ending in ``running_mean``, ``running_var``, ``num_batches_tracked`` always count.
    buffers: Collection[str] | None
    #: Smallest number of usable replies in a round; with fewer, ``RoundFailed`` is raised. By
    #: default half of the selected clients, rounded up.
    min_clients: Annotated[int | None, Range(1)]
    #: Shared state that the clients' training method needs in addition to the model.
    exchanges: Sequence[Exchange]
    #: Functions that are called with every merged cohort; their results are added to
    #: ``diagnostics``. Checkpoints include the ``STATE`` of an observer.
    observers: Sequence[Observer]
    #: Cap on a client's weight, at least 1/K; the excess goes to the others in proportion to
    #: their weights. 1, the default, means no cap.
    max_client_weight: Annotated[float, Range(above=0, high=1)]
    #: Cap on an update's norm, absolute and as a multiple of the round's median norm; larger
    #: updates are scaled down. The second cap also applies to clients' arrays for exchanges.
    #: None, the default, means no cap.
    clip_update_norm: float | None
    clip_update_median: float | None
    #: Policy that selects the clients of a round. By default `Uniform`. In your own Flower
    #: app it selects among the connected clients. A client is identified by its ``client-id`` after
    #: its first reply, and by its node id before.
    participation: Participation
    #: Function of the round and all client ids that returns the ids of available clients. By
    #: default all clients are available.
    availability: Callable[[int, Collection[int]], list[int]] | None


def checked_options(options: Options) -> dict[str, Any]:
    """Return the options, with defaults for those that fairflower adds to Flower's ``FedAvg``.

    Raises ``ConfigError``, with the option's name, for a value of another type or out of range.
    """
    values: dict[str, Any] = {
        "buffers": None,
        "min_clients": None,
        "exchanges": (),
        "observers": (),
        "max_client_weight": 1.0,
        "clip_update_norm": None,
        "clip_update_median": None,
        "availability": None,
        **options,
    }
    values.setdefault("participation", Uniform())
    for name, hint in get_type_hints(Options, include_extras=True).items():
        if get_origin(hint) is Annotated and name in options:
            ArgumentSpec.of(None, hint).check(name, values[name])
    for name in ("clip_update_norm", "clip_update_median"):
        if (value := values[name]) is not None:
            _check(name, value, Real, "a positive number, or None", lambda v: v > 0)
    exchanges, observers = values["exchanges"], values["observers"]
    _check("exchanges", exchanges, Sequence, "a list of Exchange objects", _all_exchanges)
    _check("observers", observers, Sequence, "a list of functions", lambda v: all(map(callable, v)))
    values["exchanges"], values["observers"] = tuple(exchanges), tuple(observers)
    _check("participation", values["participation"], Participation, "a Participation object")
    if values["availability"] is not None:
        _check("availability", values["availability"], Callable, "a function (round, ids) -> ids")
    if (buffers := values["buffers"]) is not None:
        _check("buffers", buffers, Collection, "a list of names", lambda v: not isinstance(v, str))
        values["buffers"] = frozenset(buffers)
    return values


def _all_exchanges(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Exchange) for value in values)


def _check(
    name: str,
    value: Any,
    kind: Any,
    expected: str,
    within: Callable[[Any], bool] = lambda value: True,
) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not within(value):
        raise ConfigError(f"{name} = {value!r}: expected {expected}.")
