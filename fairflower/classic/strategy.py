"""Adapter from strategies to classic Flower strategies, for ``ServerAppComponents``."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fairflower.aggregation.records import decode_record
from fairflower.aggregation.strategy import FairStrategy
from fairflower.arrays import record_of
from fairflower.classic.packing import MEASURED, SHARED, count, unpack
from fairflower.errors import ConfigError
from fairflower.flower_compat import (
    ClientManager,
    ClientProxy,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    ensure_task_identity,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
    proxy_node_id,
    set_ids,
)
from fairflower.flower_compat import FedAvg as ClassicFedAvg
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.strategies.fedavg import FedAvg

NDArrays = list[NDArray[Any]]
Metrics = dict[str, Scalar]

#: Attributes of a strategy that need each client's update, where they are set.
_BOUNDS = ("max_client_weight", "clip_update_norm", "clip_update_median")
_NEED_UPDATES = (*_BOUNDS, "exchanges", "_observers")

#: Serialization format of the arrays that classic Flower sends.
TENSOR_TYPE = "numpy.ndarray"


class LegacyStrategy(ClassicFedAvg):  # type: ignore[misc]
    """A ``flwr.server.strategy.FedAvg`` that uses a fairflower strategy.

    The strategy gets the same messages as with Flower's message API and computes exactly the same
    results. It selects among all clients of the client manager; a manager's own ``sample`` and
    ``Criterion`` are not called. Each client must be a `flwr.client.NumPyClient` that appends
    measured arrays to its parameters (`fairflower.classic.packing.pack`) and reports measured
    numbers in its metrics. In both directions, arrays of exchanges follow the model's arrays
    (`fairflower.classic.packing.split`). `fairflower.classic.client.NumPyTrainer` is a client that
    does this.

    Raises ``ValueError`` if the strategy has exchanges and ``initial_parameters`` is not a mapping.

    Parameters
    ----------
    strategy : FairStrategy
        A fairflower strategy, for example ``FedHEAL(tau=0.4, fraction_train=0.5)``.
    initial_parameters : mapping of str -> ndarray, or Parameters, optional
        The initial model. A mapping, for example ``{k: v.numpy() for k, v in
        net.state_dict().items()}``, also gives the names of the arrays, which identify BatchNorm
        statistics and are required by exchanges. By default a random client sends the model. In
        this case, and for ``Parameters``, arrays are named "0", "1", ..., and only integer arrays
        are treated as not trained unless the strategy's ``buffers`` names more.
    **options
        Other arguments of `flwr.server.strategy.FedAvg`: ``evaluate_fn``, ``on_fit_config_fn``,
        ``on_evaluate_config_fn``, ``fit_metrics_aggregation_fn``,
        ``evaluate_metrics_aggregation_fn`` (by default numbers are averaged) and
        ``accept_failures``. The strategy's arguments say how many clients are selected.

    Attributes
    ----------
    strategy : FairStrategy
        The strategy, with its attributes ``diagnostics``, ``client_ids`` and ``dropped``.

    See Also
    --------
    NumPyTrainer : The client for this strategy.

    Examples
    --------
    >>> from flwr.server import ServerAppComponents, ServerConfig
    >>> from fairflower.classic.strategy import LegacyStrategy
    >>> from fairflower.strategies import FedHEAL
    >>> def server_fn(context):
    ...     strategy = LegacyStrategy(FedHEAL(tau=0.4, fraction_train=0.5))
    ...     return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=30))
    """

    def __init__(
        self,
        strategy: FairStrategy,
        initial_parameters: Mapping[str, NDArray[Any]] | Parameters | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(strategy, FairStrategy):
            raise ConfigError(
                f"strategy = {strategy!r}: expected fairflower's, such as FedHEAL(tau=0.4)."
            )
        if not isinstance(initial_parameters, Mapping | Parameters | None):
            raise ConfigError(
                f"initial_parameters has type {type(initial_parameters).__name__}: expected a dict "
                "{name: array}, Flower's Parameters (ndarrays_to_parameters makes them of a list), "
                "or None."
            )
        if strategy.exchanges and not isinstance(initial_parameters, Mapping):
            names = ", ".join(type(exchange).__name__ for exchange in strategy.exchanges)
            raise ValueError(
                f"Exchanges ({names}) need the names of the arrays. Pass LegacyStrategy a dict "
                f"of initial parameters: {{k: v.numpy() for k, v in net.state_dict().items()}}."
            )
        self.strategy = strategy
        self._names: list[str] | None = None
        if isinstance(initial_parameters, Mapping):
            self._names = list(initial_parameters)
            initial_parameters = _parameters(record_of(initial_parameters))
        super().__init__(
            fraction_fit=strategy.fraction_train,
            fraction_evaluate=strategy.fraction_evaluate,
            min_fit_clients=strategy.min_train_nodes,
            min_evaluate_clients=strategy.min_evaluate_nodes,
            min_available_clients=strategy.min_available_nodes,
            initial_parameters=initial_parameters,
            **options,
        )

    def __repr__(self) -> str:
        return f"LegacyStrategy({type(self.strategy).__name__})"

    # --- training --------------------------------------------------------------------------

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        return self.initial_parameters

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        configure, more = self.strategy.configure_train, self.on_fit_config_fn
        return self._asked(FitIns, configure, more, server_round, parameters, client_manager)

    def _asked(
        self,
        kind: type[Any],
        configure: Callable[..., Iterable[Message]],
        more: Callable[[int], Metrics] | None,
        server_round: int,
        parameters: Parameters,
        manager: ClientManager,
    ) -> list[tuple[ClientProxy, Any]]:
        """Return the strategy's messages, with new ids, as instructions for client proxies."""
        ensure_task_identity()
        proxies: dict[int, ClientProxy] = {}

        def get_node_ids() -> list[int]:
            present = {proxy_node_id(proxy): proxy for proxy in manager.all().values()}
            proxies.update(present)
            return list(present)

        grid = SimpleNamespace(get_node_ids=get_node_ids)  # strategies call only this method
        config: Mapping[str, Any] = more(server_round) if more else {}
        arrays = self._record(parameters.tensors)
        messages = configure(server_round, arrays, ConfigRecord(dict(config)), grid)
        asked = {message.metadata.dst_node_id: message for message in messages}
        for number, message in enumerate(asked.values()):
            set_ids(message, message_id=f"message-{number}")
        return [(proxies[n], kind(*self._ins(parameters, m))) for n, m in asked.items()]

    def _ins(self, parameters: Parameters, message: Message) -> tuple[Parameters, Metrics]:
        """Convert a message to parameters and config; the exchanges' arrays follow the model's."""
        records = message.content.array_records
        config: Metrics = dict(message.content.config_records[self.strategy.configrecord_key])
        shared = {e.name: records[e.name] for e in self.strategy.exchanges if e.name in records}
        if not shared:
            return parameters, config
        config[SHARED] = json.dumps({name: list(record) for name, record in shared.items()})
        extra = [array.data for record in shared.values() for array in record.values()]
        return Parameters([*parameters.tensors, *extra], TENSOR_TYPE), config

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, Metrics]:
        if failures and not self.accept_failures:
            return None, {}
        request = self.strategy._request("train", server_round)
        sent = request.arrays or ArrayRecord()
        if len(results) > 1 and len({id(result.parameters) for _, result in results}) == 1:
            self._check_secure_aggregation()
            mean = _typed_as(sent, results[0][1].parameters)
            results = [(proxy, replace(result, parameters=mean)) for proxy, result in results]
        content = partial(self._fit_content, sent)
        replies = _replies(request.messages, "train", results, failures, content)
        merged, metrics = self.strategy.aggregate_train(server_round, replies)
        means = _plain(metrics)
        if self.fit_metrics_aggregation_fn:
            means = self.fit_metrics_aggregation_fn(self._sent_metrics(results))
        return (None if merged is None else _parameters(merged)), means

    def _check_secure_aggregation(self) -> None:
        ours = self.strategy
        extra = [name for name in _NEED_UPDATES if getattr(ours, name) not in (None, 1, ())]
        if type(ours) is not FedAvg or extra:
            name = " with ".join([type(ours).__name__, *(e.lstrip("_") for e in extra)])
            raise ValueError(
                "Flower's secure aggregation returns only the mean of the clients' models, "
                f"weighted by examples, so {name} would have no effect. Use FedAvg without bounds, "
                "exchanges and observers, or disable secure aggregation. (fairflower's app can "
                "weight masked models: secure-aggregation = true.)"
            )

    def _fit_content(self, sent: ArrayRecord, result: FitRes) -> RecordDict:
        """Return the content of the reply that a client would send with the message API."""
        tensors, note = result.parameters.tensors, str(result.metrics.get(MEASURED, "{}"))
        size = len(sent) or max(0, len(tensors) - count(note))
        content = RecordDict(
            {
                self.strategy.arrayrecord_key: self._record(tensors[:size]),
                "metrics": self._metrics(result.num_examples, result.metrics),
            }
        )
        measured = unpack(note, tensors[size:])
        wanted = self.strategy._beside_model
        for kind, vectors in measured.items():
            if kind not in wanted:
                continue
            named = self._names or MEASUREMENTS.assumed(kind).shape == "vector"
            names = list(vectors) if named else self._trained(sent, kind, len(vectors))
            content[kind] = _named(names, list(vectors.values()))
        return content

    def _trained(self, sent: ArrayRecord, kind: str, count: int) -> list[str]:
        """Return the names of the trained arrays, for a model whose arrays are numbered."""
        received = decode_record(sent)
        buffers = self.strategy.buffers_of(received)
        names = [name for name in received if name not in buffers]
        if len(names) != count:
            raise ValueError(
                f"its {kind!r} has {count} arrays, but the model seems to have {len(names)} "
                "trained arrays. Pass LegacyStrategy a dict of initial parameters"
            )
        return names

    # --- tests -----------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        configure, more = self.strategy.configure_evaluate, self.on_evaluate_config_fn
        return self._asked(EvaluateIns, configure, more, server_round, parameters, client_manager)

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, Metrics]:
        if failures and not self.accept_failures:
            return None, {}

        def content(result: EvaluateRes) -> RecordDict:
            metrics = {**result.metrics, "eval_loss": result.loss}
            return RecordDict({"metrics": self._metrics(result.num_examples, metrics)})

        asked = self.strategy._request("evaluate", server_round).messages
        replies = _replies(asked, "evaluate", results, failures, content)
        means = _plain(self.strategy.aggregate_evaluate(server_round, replies))
        loss = means.pop("eval_loss", None)
        if self.evaluate_metrics_aggregation_fn:
            means = self.evaluate_metrics_aggregation_fn(self._sent_metrics(results))
        return (None if loss is None else float(loss)), means

    def _sent_metrics(
        self, results: Sequence[tuple[ClientProxy, Any]]
    ) -> list[tuple[int, Metrics]]:
        """Return numbers of examples and metrics of the clients that were not dropped."""
        clients = self.strategy._enrolled.clients
        nodes = [proxy_node_id(proxy) for proxy, _ in results]
        return [
            (result.num_examples, result.metrics)
            for node, (_, result) in zip(nodes, results, strict=True)
            if clients.get(node, node) not in self.strategy.dropped and result.num_examples
        ]

    # --- from and to classic Flower's types --------------------------------------------------

    def _record(self, tensors: Sequence[bytes]) -> ArrayRecord:
        names = self._names or [*map(str, range(len(tensors)))]
        if len(tensors) > len(names):
            raise ValueError(f"it has {len(tensors)} arrays, but the initial model {len(names)}")
        return _named(names, tensors)

    def _metrics(self, num_examples: int, metrics: Mapping[str, Scalar]) -> MetricRecord:
        numbers = {
            key: int(value) if isinstance(value, int) else float(value)
            for key, value in _plain(metrics).items()
        }
        return MetricRecord({**numbers, self.strategy.weighted_by_key: num_examples})


def _typed_as(sent: ArrayRecord, mean: Parameters) -> Parameters:
    """Return Flower's mean of masked models, in float64, with the types of the model sent."""
    if len(sent) != len(mean.tensors):
        raise ConfigError(
            f"Flower's secure aggregation returned {len(mean.tensors)} arrays, but as far as "
            f"known {len(sent)} were sent. Call super().configure_fit in every round."
        )
    typed = []
    pairs = zip(decode_record(sent).items(), parameters_to_ndarrays(mean), strict=True)
    for (name, like), array in pairs:
        if like.ndim == 0 and like.dtype.kind == "f":
            raise ConfigError(
                f"Flower's secure aggregation returns a wrong number for {name!r}, which has no "
                "dimensions. Give it the shape (1,), or disable secure aggregation."
            )
        # Integers are rounded down, beyond the error of masks; counters without dimensions stay.
        whole = np.floor(array + 0.01) if like.ndim else like
        typed.append((array if like.dtype.kind == "f" else whole).astype(like.dtype))
    return ndarrays_to_parameters(typed)


def _replies(
    messages: Iterable[Message],
    kind: str,
    results: Sequence[tuple[ClientProxy, Any]],
    failures: Sequence[tuple[ClientProxy, Any] | BaseException],
    content_of: Callable[[Any], RecordDict],
) -> list[Message]:
    """Return a reply for every client that replied or failed.

    A subclass of `LegacyStrategy` may have asked clients itself, so there may be no message.
    """
    ensure_task_identity()
    missing = {message.metadata.dst_node_id: message for message in messages}

    def message_to(proxy: ClientProxy) -> Message:
        node = proxy_node_id(proxy)
        return missing.pop(node, None) or Message(RecordDict(), node, kind)

    replies = []
    for proxy, result in results:
        message = message_to(proxy)
        try:
            replies.append(Message(content_of(result), reply_to=message))
        except ValueError as problem:
            replies.append(_error(message, str(problem)))
    exceptions = [failure for failure in failures if isinstance(failure, BaseException)]
    for failure in failures:
        if not isinstance(failure, BaseException):
            proxy, result = failure
            replies.append(_error(message_to(proxy), result.status.message))
    # Flower does not say which client raised which exception, so the reply of every client without
    # a result lists all exceptions.
    if reason := " | ".join(dict.fromkeys(str(e) or repr(e) for e in exceptions)):
        replies += [_error(message, reason) for message in missing.values()]
    return replies


def _error(message: Message, reason: str) -> Message:
    return Message(Error(code=0, reason=reason), reply_to=message)


def _named(names: Iterable[str], tensors: Sequence[bytes]) -> ArrayRecord:
    """Return serialized arrays as a record, with names and without decoding them."""
    return ArrayRecord(
        {
            name: Array(dtype="", shape=(), stype=TENSOR_TYPE, data=tensor)
            for name, tensor in zip(names, tensors, strict=False)  # checked when decoded
        }
    )


def _parameters(record: ArrayRecord) -> Parameters:
    return Parameters([array.data for array in record.values()], TENSOR_TYPE)


def _plain(metrics: Mapping[str, Any] | None) -> Metrics:
    return {k: v for k, v in (metrics or {}).items() if isinstance(v, (int, float))}
