"""What a strategy is: how it merges, what it needs for this, what it keeps, and its options."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from types import MappingProxyType, NoneType
from typing import Annotated, Any, ClassVar, TypedDict, get_origin, get_type_hints

import numpy as np
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.earlier_names import EarlierNames
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.participation import Participation, Uniform
from fairflower.aggregation.records import is_buffer
from fairflower.arguments import ArgumentSpec, Range
from fairflower.errors import ConfigError
from fairflower.numerics.clustering import Clusters
from fairflower.registry.measurements import MEASUREMENTS

Diagnostic = NDArray[np.float64] | float


class StrategyHooks(EarlierNames):
    """Hooks of `FairStrategy`: a subclass defines ``weigh`` or ``merge``, and others if needed."""

    # --- what a subclass may define ----------------------------------------------------------

    #: Paper of the strategy, for ``fairflower list`` and the report.
    paper: ClassVar[str] = ""
    #: Extra of fairflower that the strategy needs: ``"solvers"``, or "" if it needs none.
    extra: ClassVar[str] = ""

    #: Measurements that clients return with their model, by name in
    #: `fairflower.registry.measurements`. The train message's config lists them under ``measure``.
    measurements: tuple[str, ...] = ()
    #: Metrics that the strategy uses and that clients always report.
    reported_metrics: tuple[str, ...] = ()
    #: Metric or measurement -> a range of its values that is narrower than in the table
    #: (`fairflower.registry.measurements`).
    ranges: Mapping[str, tuple[float, float]] = MappingProxyType({})

    #: Attributes kept from round to round and in checkpoints: numbers, None, arrays, and dicts
    #: of these with text or whole numbers (client ids) as keys.
    STATE: ClassVar[tuple[str, ...]] = ()
    #: Whether the merged model may lie outside the hull of the received and returned models.
    extrapolates: ClassVar[bool] = False
    #: Whether the merged model is the clients' model if all clients return the same model.
    keeps_agreement: ClassVar[bool] = True

    #: Smallest number of clients that the strategy can merge, and the reason.
    fewest_clients: tuple[int, str] = (1, "")

    #: Whether the strategy needs only numbers and one weighted sum of the clients' updates. It then
    #: supports secure aggregation, where `weigh` sees no update and `combine` only the sum.
    sums_suffice: bool = False
    #: Otherwise: why it needs individual updates ("it ..."), and the most similar strategy that
    #: does not.
    single_updates: ClassVar[tuple[str, str]] = (
        "may use individual updates (its class does not set sums_suffice)",
        "uniform",
    )
    #: Whether the model is a mean of the clients' models with weights that depend only on numbers
    #: that clients send. Then the proof in docs/differential-privacy.md covers it (``privacy.*``).
    private: ClassVar[bool] = False
    #: Measurements of the trained model that `weigh` uses from the next round on.
    used_next_round: tuple[str, ...] = ()

    #: Argument -> run config keys. `read_config` reads an argument that is None from the config of
    #: the train messages. A strategy whose argument has several keys overrides `read_config`.
    config_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        """Return the clients' weights, shape (K,): non-negative, with sum 1."""
        raise NotImplementedError(f"{type(self).__name__}: define the method weigh or merge.")

    def merge(self, cohort: Cohort) -> Arrays:
        """Return the next global model; default: ``combine`` with the weights from ``weigh``."""
        weights = np.asarray(self.weigh(cohort))
        self.diagnostics["weights"] = weights
        return self.combine(cohort, weights)

    def combine(self, cohort: Cohort, weights: NDArray[np.float64]) -> Arrays:
        """Return the next global model for these weights, by default the weighted mean.

        If ``sums_suffice`` is set, the model may depend on the updates only through their sum with
        these weights, or with a multiple of them.
        """
        return cohort.average(weights)

    def square_factors(self, cohort: Cohort) -> NDArray[np.float64] | None:
        """Return f, shape (K,), if ``combine`` uses sum_k w_k f_k ||Delta_k||^2; else None.

        Under secure aggregation, ``cohort.squared_norms()`` is correct only within this sum.
        """
        return None

    def note_trained(self, cohort: Cohort) -> None:
        """Store the measurements `used_next_round`; secure aggregation calls it after ``weigh``."""

    def client_config(self, client_id: int) -> Mapping[str, float | str]:
        """Return values for the config of this client's train message."""
        return {}

    def read_config(self, config: Mapping[str, Any]) -> None:
        """Read arguments from the config of the train messages.

        Called before every round, since the learning rate may change, and when a run config is
        validated. Raises ``ValueError`` if the strategy does not support the clients' training.
        """
        if self._config_arguments is None:
            self._config_arguments = tuple(a for a in self.config_keys if getattr(self, a) is None)
        for attribute in self._config_arguments:
            (key,) = self.config_keys[attribute]
            setattr(self, attribute, config.get(key, getattr(self, attribute)))

    # --- what the base class sets ------------------------------------------------------------

    #: Values that explain the last merge: numbers, arrays of shape (K,) per client, or (K, K)
    #: per pair of clients. A subclass that overrides `merge` must set ``weights``. If updates are
    #: bounded, ``clipped`` has the factors by which they were scaled down.
    diagnostics: dict[str, Diagnostic]
    #: Clusters of the last cohort; None if the strategy does not cluster.
    clusters: Clusters | None
    #: The run's seed, for a strategy's own random draws. fairflower's draws use ``_seed``.
    seed: int = 0
    _seed: int = 0
    #: Shared state that is sent in addition to the model.
    exchanges: tuple[Exchange, ...]
    weighted_by_key: str
    arrayrecord_key: str
    #: Selects the clients of every round.
    _participation: Participation
    #: Names of arrays that are not trained; None derives them from names and dtypes.
    _buffers: frozenset[str] | None
    #: Names of arrays that are known to be trained, although they may be named like buffers.
    _trained: Collection[str] = frozenset()
    #: Arguments that the config sets; None before the first config.
    _config_arguments: tuple[str, ...] | None = None

    def _check_config_arguments(self) -> None:
        for attribute in self._config_arguments or ():
            if getattr(self, attribute) is None:
                name, (key,) = type(self).__name__, self.config_keys[attribute]
                raise ConfigError(
                    f"{attribute} = None: {name} needs it. Set {name}({attribute}=...), or send "
                    f"{key!r} in the config of train messages, as {name}.start sends the rounds."
                )

    @property
    def _measurements(self) -> tuple[str, ...]:
        """Measurements that the strategy and its exchanges need, without duplicates."""
        others = (name for exchange in self.exchanges for name in exchange.measurements)
        return tuple(dict.fromkeys((*self.measurements, *others)))

    @property
    def _array_measurements(self) -> list[str]:
        return [n for n in self._measurements if MEASUREMENTS.assumed(n).shape != "number"]

    @property
    def _beside_model(self) -> set[str]:
        """Names of the metrics and records that are read from replies beside the model."""
        exchanges = (exchange.name for exchange in self.exchanges)
        return {*self._measurements, *self.reported_metrics, *exchanges}

    def buffers_of(self, model: Arrays) -> frozenset[str]:
        """Return the names of the model's arrays that are not trained.

        Raises ``ConfigError`` if ``buffers`` has a name that the model lacks.
        """
        given = self._buffers or frozenset()
        if model and (unknown := sorted(given - model.keys())):  # an empty one is a placeholder
            raise ConfigError(
                f"buffers: the model has no array {unknown[0]!r}; its arrays are "
                f"{', '.join(list(model)[:5])}, ..."
            )
        guessed = {name for name, array in model.items() if is_buffer(name, array)}
        return given | guessed.difference(self._trained)


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
    clip_update_norm: Annotated[float | None, Range(above=0, high=inf)]
    clip_update_median: Annotated[float | None, Range(above=0, high=inf)]
    #: Policy that selects the clients of a round. By default `Uniform`. In your own Flower
    #: app it selects among the connected clients. A client is identified by its ``client-id`` after
    #: its first reply, and by its node id before.
    participation: Participation
    #: Function of the round and all client ids that returns the ids of available clients. By
    #: default all clients are available.
    availability: Callable[[int, Collection[int]], list[int]] | None


#: Options that fairflower adds to Flower's ``FedAvg`` -> default.
_DEFAULTS: dict[str, Any] = {
    "buffers": None,
    "min_clients": None,
    "exchanges": (),
    "observers": (),
    "max_client_weight": 1.0,
    "clip_update_norm": None,
    "clip_update_median": None,
    "availability": None,
}

#: Option -> its type, what errors say of it, and a further check.
_OBJECTS: dict[str, tuple[Any, str, Callable[[Any], bool]]] = {
    "exchanges": (
        Sequence,
        "a list of Exchange objects",
        lambda v: all(isinstance(exchange, Exchange) for exchange in v),
    ),
    "observers": (Sequence, "a list of functions", lambda v: all(map(callable, v))),
    "participation": (Participation, "a Participation object", lambda v: True),
    "availability": ((Callable, NoneType), "a function (round, ids) -> ids", lambda v: True),
    "buffers": ((Collection, NoneType), "a list of names", lambda v: not isinstance(v, str)),
}


_HINTS = get_type_hints(Options, include_extras=True)


def checked_options(options: Options) -> dict[str, Any]:
    """Return the options, with defaults for those that fairflower adds to Flower's ``FedAvg``.

    Raises ``ConfigError``, with the option's name, for a value of another type or out of range.
    """
    values = {**_DEFAULTS, "participation": Uniform(), **options}
    for name, hint in _HINTS.items():
        if get_origin(hint) is Annotated and name in options:
            ArgumentSpec.of(None, hint).check(name, values[name])
    for name, (kind, expected, fits) in _OBJECTS.items():
        if not (isinstance(values[name], kind) and fits(values[name])):
            raise ConfigError(f"{name} = {values[name]!r}: expected {expected}.")
    values |= {name: tuple(values[name]) for name in ("exchanges", "observers")}
    values["buffers"] = None if values["buffers"] is None else frozenset(values["buffers"])
    return values
