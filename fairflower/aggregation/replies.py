"""Validation and parsing of a round's replies; those that are not usable are dropped."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from statistics import median_low, mode
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fairflower.aggregation.cohort import Arrays, Cohort, UnknownModel
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.hooks import StrategyHooks
from fairflower.aggregation.records import (
    InvalidReply,
    NotFinite,
    check_arrays,
    check_finite,
    check_group_counts,
    check_mergeable,
    check_metric,
    check_representation,
    check_round,
    check_values,
    decode_record,
    measured_arrays,
    norm,
    others_medians,
    stack_common_metrics,
    usual_layout,
    with_zeros,
)
from fairflower.aggregation.reply_filter import ReplyFilter
from fairflower.errors import ConfigError, logger
from fairflower.registry.measurements import MEASUREMENTS

#: Smallest ratio of norms at which a sum in single precision loses the shorter vectors.
LOST_RATIO = 2.0**24

#: Smallest ratio of norms at which a vector is listed if training diverges.
LISTED_RATIO = 1000.0

_NOT_CONFIGURED = "super().configure_train(...) was not called: call it in every round"
_OTHER_ARRAYS = (
    "the clients' models are unlike the one that was sent ({}): start from a model with the names, "
    "shapes and dtypes of theirs"
)


def _layout(arrays: Arrays) -> tuple[Any, ...]:
    """Return the names, shapes and dtypes of arrays, sorted."""
    return tuple(sorted((name, a.shape, a.dtype.str) for name, a in arrays.items()))


class ParsedReply(NamedTuple):
    """A usable reply to a train message, with its decoded arrays."""

    content: RecordDict
    metrics: MetricRecord
    arrays: Arrays
    measured: dict[str, Arrays]


class ReplyParser:
    """Parses and validates replies to a round's train messages.

    Parameters
    ----------
    strategy : StrategyHooks
        The strategy, which determines what replies must contain.
    received : dict of name -> ndarray, or None
        The global model that the clients received; None if not known.
    sizes : mapping of int -> int
        Number of training examples by client id, where known.
    """

    def __init__(
        self, strategy: StrategyHooks, received: Arrays | None, sizes: Mapping[int, int]
    ) -> None:
        self.strategy, self.sizes = strategy, sizes
        self.large_norms: list[str] = []  # very long vectors, with their clients, as text
        self.received, self.trained, self.norm = received or {}, dict[str, Any](), 0.0
        self.buffers: frozenset[str] = frozenset()
        self.infinite: list[str] = []
        #: Why the model that the clients received is not known, and what to do; "" if it is known.
        self.unknown = _NOT_CONFIGURED if received is None else ""
        if received:
            self._expect(received, measured_arrays(received, received)[1])

    def _expect(self, received: Arrays, usual_norm: float) -> None:
        """Expect models like ``received``; raise ``ConfigError`` if they cannot be merged."""
        self.received, self.norm = received, usual_norm
        self.buffers = self.strategy.buffers_of(received)
        self.trained = {name: a for name, a in received.items() if name not in self.buffers}
        self.infinite = check_mergeable(received, self.trained)

    def _unknown_model(self, like: Arrays) -> UnknownModel:
        return UnknownModel(like, type(self.strategy).__name__, self.unknown)

    def _expect_theirs(self, replies: Iterable[Message]) -> None:
        """Expect the clients' arrays if no client returns arrays like those that were sent.

        The initial model may be a placeholder, or clients may return a part of it.
        """
        layouts: dict[tuple[Any, ...], list[Arrays]] = {}
        for reply in replies:
            with suppress(InvalidReply):
                arrays = {} if reply.has_error() else decode_record(self._model_in(reply.content))
                layouts.setdefault(_layout(arrays), []).append(arrays)
        layouts.pop((), None)
        if not layouts or _layout(self.received) in layouts:
            return
        usual = layouts[max(sorted(layouts), key=lambda layout: len(layouts[layout]))]
        try:
            check_arrays(usual[0], self.received)
        except InvalidReply as difference:
            self.unknown = self.unknown or _OTHER_ARRAYS.format(difference)
        layout, norms = usual_layout(usual), [0.0]
        self._expect(layout, 0.0)
        for arrays in usual:
            with suppress(NotFinite):
                norms.append(measured_arrays(arrays, layout)[1])
        self.norm = median_low(norms[1:] or norms)

    def parse(self, client: int, content: RecordDict, metrics: MetricRecord) -> ParsedReply:
        """Return a client's parsed reply; ``InvalidReply`` says what is wrong with it."""
        self._check_size(client, metrics)
        if "state-round" in metrics:
            check_round("state-round", metrics["state-round"])
        arrays, model_norm = measured_arrays(decode_record(self._model_in(content)), self.received)
        self._check_norm(client, "model", model_norm, self.norm, "the received model has")
        measured: dict[str, Arrays] = {}
        arrays_needed = self.strategy._array_measurements
        for name in (*self.strategy._measurements, *self.strategy.reads):
            if name in arrays_needed:
                measured[name] = self._vectors(name, content)
                if name == "received_group_counts":
                    examples = float(metrics[self.strategy.weighted_by_key])  # type: ignore[arg-type]
                    check_group_counts(measured[name]["h"], None, examples)
            else:
                self._check_number(name, metrics)
        self.check_policy(metrics)
        if "train_loss" in metrics:
            check_finite("train_loss", metrics["train_loss"])
        for exchange in self.strategy.exchanges:
            if exchange.returned:
                measured[exchange.name] = self._returned(exchange, content, metrics)
        return ParsedReply(content, metrics, arrays, measured)

    def parse_all(
        self, replies: Iterable[Message], reply_filter: ReplyFilter
    ) -> dict[int, ParsedReply]:
        """Return the usable replies by client id; raise ``RoundFailed`` if there are too few."""
        if reply_filter.enrolled.nodes is None:
            replies = list(replies)
            self._expect_theirs(replies)
            if self.unknown and self.strategy.exchanges:
                raise ConfigError(self._unknown_model({}).text)
            if self.unknown and reply_filter.asked:
                reply_filter.remark = f"{self.unknown}."
                logger.warning("Round %d: %s", reply_filter.server_round, reply_filter.remark)
        parsed = reply_filter.usable(replies, self.parse)
        reply_filter.check_enough(len(parsed))
        self._drop_odd_shapes(parsed, reply_filter)
        self._drop_large_norms(parsed, reply_filter)
        return parsed

    def _drop_odd_shapes(self, parsed: dict[int, ParsedReply], reply_filter: ReplyFilter) -> None:
        """Drop clients whose arrays differ in shape from those of most clients."""
        shape_functions: dict[str, Callable[[Arrays], tuple[int, ...]]] = {
            exchange.name: exchange.shape_of
            for exchange in self.strategy.exchanges
            if exchange.returned
        }
        for name in self.strategy._array_measurements:
            if MEASUREMENTS[name].shape == "vector":
                shape_functions[name] = lambda arrays: arrays["h"].shape
        for name, shape_of in sorted(shape_functions.items()):
            shapes = {client: shape_of(reply.measured[name]) for client, reply in parsed.items()}
            usual = mode(sorted(shapes.values()))  # the smallest of equally frequent shapes
            for client, shape in shapes.items():
                if shape != usual:
                    reply_filter.drop(
                        client, f"its {name!r} has shape {shape}; most clients sent {usual}"
                    )
                    del parsed[client]
            reply_filter.check_enough(len(parsed))

    def _drop_large_norms(self, parsed: dict[int, ParsedReply], reply_filter: ReplyFilter) -> None:
        """Drop clients whose additional arrays are so long that others would be lost in a sum."""
        for name in sorted(next(iter(parsed.values())).measured):
            norms = {client: norm(m.measured[name]) for client, m in parsed.items()}
            for client, usual in sorted(others_medians(norms).items()):
                own = norms[client]
                try:
                    self._check_norm(client, repr(name), own, usual, "the others' median is")
                except NotFinite as problem:
                    reply_filter.drop(client, str(problem))
                    reply_filter.diverged.add(client)
                    del parsed[client]
            reply_filter.check_enough(len(parsed))

    def _check_norm(self, client: int, what: str, own: float, usual: float, reference: str) -> None:
        """Raise ``NotFinite`` if a vector is over ``LOST_RATIO`` times the usual norm (or 1)."""
        ratio = own / max(usual, 1.0)
        text = f"{what} has norm {own:.3g}, but {reference} only {usual:.3g}"
        if ratio > LOST_RATIO:
            raise NotFinite(
                f"its {text}: in single precision, adding it would erase all other vectors. "
                "Lower train.lr, or exclude the client"
            )
        if ratio > LISTED_RATIO:
            self.large_norms.append(f"client {client}'s {text}")

    def cohort(
        self,
        parsed: Mapping[int, ParsedReply],
        server_round: int,
        population: int,
        max_weight: float,
    ) -> Cohort:
        """Return the replies as a cohort, in the order of client ids."""
        ordered = [parsed[i] for i in sorted(parsed)]
        if server_round == 1:
            self._warn_of_unread(ordered[0].content)
        metrics = stack_common_metrics([reply.metrics for reply in ordered])
        models = [self.received, *(reply.arrays for reply in ordered)]
        (received, *returned), self.unset = with_zeros(models, self.infinite)
        if self.unknown:
            received = self._unknown_model(returned[0])
        return Cohort(
            server_round=server_round,
            client_ids=tuple(sorted(parsed)),
            num_examples=metrics[self.strategy.weighted_by_key],
            received=received,
            returned=tuple(returned),
            metrics=metrics,
            buffers=self.buffers,
            measured={
                name: tuple(reply.measured[name] for reply in ordered)
                for name in ordered[0].measured
            },
            population=population,
            max_weight=max_weight,
        )

    def check_numbers(self, client: int, metrics: MetricRecord, names: Iterable[str]) -> None:
        """Raise ``InvalidReply`` if a client's metrics ``names`` are missing or impossible."""
        self._check_size(client, metrics)
        for name in names:
            self._check_number(name, metrics)

    def check_policy(self, metrics: Container[str]) -> None:
        """Raise ``InvalidReply`` if metrics are missing that the participation policy reads."""
        for name in (policy := self.strategy._participation).reads:
            self._check_present(name, "metric", metrics, type(policy).__name__)

    def _check_number(self, name: str, metrics: MetricRecord) -> None:
        self._check_present(name, "metric", metrics)
        within = self.strategy.ranges.get(name)
        if within is None and name in self.strategy._measurements:
            measured = MEASUREMENTS.assumed(name)
            within = measured.low, measured.high
        check_metric(name, metrics[name], within)

    def _check_size(self, client: int, metrics: MetricRecord) -> None:
        key, known = self.strategy.weighted_by_key, self.sizes.get(client)
        if known is not None and metrics[key] != known:
            raise InvalidReply(
                f"{key} = {metrics[key]}, but it had {known} training examples when the run "
                "started. Restore its data, or start a new run"
            )

    def _warn_of_unread(self, content: RecordDict) -> None:
        key = self.strategy.arrayrecord_key
        unread = sorted(content.array_records.keys() - self.strategy._beside_model - {key})
        if unread and key in content.array_records:  # else the unread one is the model
            logger.warning(
                "Clients send the ArrayRecord %r, which %s does not read. A trainer that shares "
                "more than the model, such as SCAFFOLD, learns nothing without its exchange: pass "
                "the strategy exchanges=[ControlVariates()].",
                unread[0],
                type(self.strategy).__name__,
            )

    def _model_in(self, content: RecordDict) -> ArrayRecord:
        records, key = content.array_records, self.strategy.arrayrecord_key
        if key in records:
            return records[key]
        beside = self.strategy._beside_model
        others = [record for name, record in records.items() if name not in beside]
        if len(others) == 1:
            return others[0]
        raise InvalidReply(f"it has no ArrayRecord {key!r}, only {sorted(records)}")

    def _check_present(self, name: str, kind: str, sent: Container[str], reader: str = "") -> None:
        if name not in sent:
            remedy = (
                "must compute the measurements that the message's config lists under 'measure'"
                if name in self.strategy._measurements
                else "must report it"
            )
            reader = reader or type(self.strategy).__name__
            raise InvalidReply(
                f"it sent no {kind} {name!r}, which {reader} needs. The client {remedy}"
            )

    def _vectors(self, name: str, content: RecordDict) -> Arrays:
        """Return a measurement that consists of arrays."""
        self._check_present(name, "ArrayRecord", content.array_records)
        with _naming_record(name):
            arrays = decode_record(content.array_records[name])
            if MEASUREMENTS[name].shape == "vector":
                arrays = check_representation(arrays)
            else:
                arrays = self._checked_parameters(arrays)
            check_values(arrays, MEASUREMENTS[name].low, MEASUREMENTS[name].high)
        return arrays

    def _checked_parameters(self, arrays: Arrays) -> Arrays:
        """Return arrays for the trained parameters; ``InvalidReply`` says which should be named."""
        try:
            return check_arrays(arrays, self.trained)
        except InvalidReply as problem:
            if absent := next((name for name in self.trained if name not in arrays), ""):
                remedy = f"If {absent!r} is not trained, add it to the strategy's buffers=[...]"
                problem.args = (f"{problem}. {remedy}",)
            raise

    def _returned(self, exchange: Exchange, content: RecordDict, metrics: MetricRecord) -> Arrays:
        """Return a client's arrays for an exchange."""
        if exchange.name not in content.array_records:
            raise InvalidReply(
                f"it sent no ArrayRecord {exchange.name!r}, which the exchange "
                f"{type(exchange).__name__} needs. Choose a client.name that returns it"
            )
        with _naming_record(exchange.name):
            arrays = decode_record(content.array_records[exchange.name])
            examples = float(metrics[self.strategy.weighted_by_key])  # type: ignore[arg-type]
            return exchange.check(arrays, self.trained, examples)


@contextmanager
def _naming_record(name: str) -> Iterator[None]:
    """Put the record's name before the message of an `InvalidReply`."""
    try:
        yield
    except InvalidReply as problem:
        problem.args = (f"its {name!r}: {problem}",)  # keeps the class NotFinite
        raise
