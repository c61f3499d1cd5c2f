"""Validation and parsing of a round's replies; those that are not usable are dropped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median_low, mode
from typing import Any, NamedTuple, TypeVar

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fairflower.aggregation.cohort import Arrays, Cohort, UnknownModel
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.hooks import StrategyHooks
from fairflower.aggregation.messages import EnrolledClients
from fairflower.aggregation.records import (
    MAX_COUNT,
    InvalidReply,
    NotFinite,
    check_arrays,
    check_finite,
    check_group_counts,
    check_metric,
    check_non_negative,
    check_representation,
    check_round,
    client_id,
    decode_record,
    measured_arrays,
    norm,
    others_medians,
    scalar_metrics,
    stack_common_metrics,
)
from fairflower.errors import ConfigError, Diverged, RoundFailed, escaped, logger, shorten_error
from fairflower.registry.user_metrics import LARGEST

#: Matches error messages of fairflower, PyTorch and NumPy that are caused by NaN or infinity.
_NOT_FINITE = re.compile(r"\b(nan|infs?|infinity|infinite|non-finite)\b", re.IGNORECASE)

#: Smallest ratio of norms at which a sum in single precision loses the shorter vectors.
LOST_RATIO = 2.0**24

#: Smallest ratio of norms at which a vector is listed if training diverges.
LISTED_RATIO = 1000.0

#: Largest number of characters in a reason; a hostile client may send a text of any length.
_LONGEST_REASON = 500

#: Why the model that the clients received is not known, and what to do.
_NOT_CONFIGURED = (
    "That model is not known: call super().configure_train(...) in every round, even if you send "
    "other messages."
)
_OTHER_ARRAYS = (
    "The clients' models are unlike the model that was sent ({}). Strategies that only average "
    "models take the clients' arrays; for others, start from a model with the names, shapes and "
    "dtypes of the clients' models."
)

#: Result of the caller's check of a reply.
Answer = TypeVar("Answer")


@dataclass
class ReplyFilter:
    """Filter that separates a round's usable replies from the others.

    fairflower's app knows whom it asked, and judges all of them. In other apps, subclasses and
    wrappers choose messages and replies: there, the filter judges the replies that it gets.
    """

    server_round: int
    asked: Sequence[Message]  # empty if not known
    enrolled: EnrolledClients  # gets the ids that new clients report
    examples_key: str  # name of the metric with the number of examples
    min_clients: int | None  # smallest number of usable replies; None: half, rounded up
    dropped: dict[int, str] = field(default_factory=dict)  # client -> reason
    diverged: set[int] = field(default_factory=set)  # dropped clients with NaN or infinite values
    large_norms: Sequence[str] = ()  # very long vectors of earlier rounds, as text
    given: int = 0  # number of clients whose replies were judged
    without_examples: list[int] = field(default_factory=list)  # clients among these
    remark: str = ""  # how the clients' arrays differ from the model that was sent

    def usable(
        self,
        replies: Iterable[Message],
        check: Callable[[int, RecordDict, MetricRecord], Answer],
    ) -> dict[int, Answer]:
        """Return ``check``'s results by client; drop error replies and invalid replies."""
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in self.asked}
        asked.pop("", None)  # messages that a grid has not sent have the id ""
        waiting, judged = {m.metadata.dst_node_id for m in self.asked}, set[int]()
        answers: dict[int, Answer] = {}
        for reply in sorted(replies, key=lambda m: m.metadata.src_node_id):
            # An error reply for a dead node comes from the SuperLink, not from the node.
            request_id = reply.metadata.reply_to_message_id
            node = asked.get(request_id, reply.metadata.src_node_id)
            client = self.enrolled.clients.get(node, node)
            strange = (asked and request_id not in asked) or node not in waiting
            if (self._knows_all and strange) or node in judged:
                logger.warning(
                    "Round %d ignores a reply from client %d, because it is late or the client has "
                    "already replied.",
                    self.server_round,
                    client,
                )
                continue
            waiting.discard(node)
            judged.add(node)
            try:
                client, metrics = self._read_claim(reply, node, client, answers)
                self.enrolled.clients[node] = client
                if self._has_no_examples(client, metrics):
                    self.without_examples.append(client)
                    continue
                self._check_examples(metrics)
                answers[client] = check(client, reply.content, metrics)
            except InvalidReply as problem:
                self.dropped[client] = str(problem)
                if isinstance(problem, NotFinite):
                    self.diverged.add(client)
        self.given = len(self.asked) if self._knows_all else len(judged)
        silent = self._silent(waiting, set(asked.values()))
        if self._knows_all:
            self.dropped |= silent
        for client, reason in sorted(self.dropped.items()):
            self.drop(client, reason)  # logs the reasons in the order of ids
        if silent and not self._knows_all:
            text = "Round %d: %d of %d clients are judged; the others:%s"
            logger.info(text, self.server_round, len(judged), len(self.asked), _listed(silent))
            self.dropped |= silent
        return answers

    @property
    def _knows_all(self) -> bool:
        """Whether all clients are enrolled, as in fairflower's app."""
        return self.enrolled.nodes is not None

    def drop(self, client: int, reason: str) -> None:
        """Drop a client, and log the reason, shortened and without unprintable characters."""
        self.dropped[client] = reason = escaped(reason[:_LONGEST_REASON])
        text = "Round %d continues without client %d: %s"
        logger.warning(text, self.server_round, client, _without_client(reason, client))

    def check_enough(self, usable: int) -> None:
        """Raise ``RoundFailed`` with all reasons if too few replies are usable.

        The error is ``Diverged`` if NaN and infinite values are the only reasons.
        """
        half = math.ceil(self.given / 2)
        needed = max(1, half if self.min_clients is None else self.min_clients)
        if usable + len(self.without_examples) < needed or not usable:
            diverged = self.dropped and self.dropped.keys() <= self.diverged
            error = Diverged if diverged else RoundFailed
            hint = ""
            if diverged and self.large_norms:
                hint = "\nUpdates with large norms, which clip-update-median would clip:"
                hint += "".join(f"\n  {text}" for text in self.large_norms)
            raise error(
                f"Round {self.server_round}: {usable} of {self.given or len(self.asked)} clients "
                f"sent a usable reply, fewer than the {needed} that min-clients requires."
                f"{self._reasons()}{hint}"
            )

    def check_cap(self, usable: int, max_weight: float) -> None:
        """Raise ``RoundFailed`` if the capped weights of ``usable`` clients cannot sum to 1."""
        if max_weight * usable < 1 - 1e-9:
            raise RoundFailed(
                f"Round {self.server_round}: the weights of {usable} usable replies cannot sum to "
                f"1 if each is at most {max_weight} (max_client_weight).{self._reasons()}"
            )

    def _reasons(self) -> str:
        """Return one line per reason, with the clients that were dropped for it."""
        empty = dict.fromkeys(self.without_examples, "it has no examples")
        return _listed({**self.dropped, **empty}) + (f"\n  {self.remark}" if self.remark else "")

    def _read_claim(
        self, reply: Message, node: int, client: int, answers: Container[int]
    ) -> tuple[int, MetricRecord]:
        """Return the client id that a reply claims, and its metrics; check the id."""
        if reply.has_error():
            reason = shorten_error(reply.error.reason or "it failed without a message")
            raise (NotFinite if _NOT_FINITE.search(reason) else InvalidReply)(reason)
        metrics = scalar_metrics(reply.content)
        claimed = client_id(metrics, default=client)
        if claimed != client and node in (self.enrolled.nodes or {}).values():
            raise InvalidReply(f"it claims to be client {claimed}")
        if claimed in answers:
            raise InvalidReply(f"client id {claimed} has already replied in this round")
        return claimed, metrics

    def _silent(self, waiting: Iterable[int], sent_to: set[int]) -> dict[int, str]:
        """Return why nodes have no reply, by client; ``sent_to`` are nodes that got a message."""
        unsent, silent = "no message was sent to it", "no reply was passed on"
        if self._knows_all:
            unsent, silent = "its SuperNode is not connected", "no reply before the timeout"
        elif not sent_to:  # no grid has set an id
            sent_to = set(waiting)
        return {
            self.enrolled.clients.get(node, node): silent if node in sent_to else unsent
            for node in waiting
        }

    def _has_no_examples(self, client: int, metrics: MetricRecord) -> bool:
        """Return whether a client has no examples; the log says so once."""
        none = not self._knows_all and metrics.get(self.examples_key) == 0
        if none and client not in self.enrolled.without_examples:
            self.enrolled.without_examples.add(client)
            logger.warning(
                "Client %d has no examples (%s = 0): it has no part in the model while this is so.",
                client,
                self.examples_key,
            )
        return none

    def _check_examples(self, metrics: MetricRecord) -> None:
        key = self.examples_key
        if key not in metrics:
            raise InvalidReply(f"its metrics lack {key!r}; the client must report it")
        value = float(metrics[key])  # type: ignore[arg-type]
        if not (math.isfinite(value) and value > 0):
            raise InvalidReply(f"{key} = {value}: expected a positive finite number")
        if value > MAX_COUNT:
            raise InvalidReply(f"{key} = {value}: expected at most 2**53")
        if value < 1 / MAX_COUNT:
            raise InvalidReply(f"{key} = {value}: expected at least 2**-53")


def _layout(arrays: Arrays) -> tuple[Any, ...]:
    """Return the names, shapes and dtypes of arrays, sorted."""
    return tuple(sorted((name, a.shape, a.dtype.str) for name, a in arrays.items()))


def _listed(dropped: Mapping[int, str]) -> str:
    """Return one line per reason, with its clients."""
    sharing: dict[str, list[int]] = {}
    for client, reason in sorted(dropped.items()):
        sharing.setdefault(_without_client(reason, client), []).append(client)
    return "".join(
        f"\n  client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}: {reason}"
        for reason, clients in sharing.items()
    )


def _without_client(reason: str, client: int) -> str:
    """Return a reason without the client's id at its beginning."""
    return reason.removeprefix(f"Client {client}: ")


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
        #: Why the model that the clients received is not known, and what to do; "" if it is known.
        self.unknown = _NOT_CONFIGURED if received is None else ""
        if received:
            self._expect(received, norm(received))

    def _expect(self, received: Arrays, usual_norm: float) -> None:
        """Expect models like ``received``; raise ``ConfigError`` if they are not real numbers."""
        if odd := [name for name, a in received.items() if a.dtype.kind not in "fiub"]:
            raise ConfigError(
                f"Array {odd[0]!r} of the model has dtype {received[odd[0]].dtype}, but strategies "
                "merge only real numbers. Send other numbers as real arrays (complex numbers as "
                "two)."
            )
        self.received, self.norm = received, usual_norm
        self.buffers = self.strategy.buffers_of(received)
        self.trained = {name: a for name, a in received.items() if name not in self.buffers}

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
        if not self.unknown:
            try:
                check_arrays(usual[0], self.received)
            except InvalidReply as difference:
                self.unknown = _OTHER_ARRAYS.format(difference)
        norms = [length for length in map(norm, usual) if math.isfinite(length)]
        self._expect(usual[0], median_low(norms or [0.0]))
        if self.strategy.exchanges:
            raise ConfigError(self._why_unknown)

    @property
    def _why_unknown(self) -> str:
        return (
            f"{type(self.strategy).__name__} (with its exchanges, if any) compares the clients' "
            f"models with the model that they received. {self.unknown}"
        )

    def parse(self, client: int, content: RecordDict, metrics: MetricRecord) -> ParsedReply:
        """Return a client's parsed reply; ``InvalidReply`` says what is wrong with it."""
        self._check_size(client, metrics)
        if "state-round" in metrics:
            check_round("state-round", metrics["state-round"])
        arrays, model_norm = measured_arrays(decode_record(self._model_in(content)), self.received)
        self._check_norm(client, "model", model_norm, self.norm, "the received model has")
        measured: dict[str, Arrays] = {}
        for name in (*self.strategy.measurements, *self.strategy.reads):
            if name in self.strategy.ARRAY_MEASUREMENTS:
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
            if self.unknown and self.unknown != _NOT_CONFIGURED:
                reply_filter.remark = self.unknown
                logger.warning("Round %d: %s", reply_filter.server_round, self.unknown)
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
        for name in set(self.strategy.SINGLE_ARRAYS) & set(self.strategy.measurements):
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
        return Cohort(
            server_round=server_round,
            client_ids=tuple(sorted(parsed)),
            num_examples=metrics[self.strategy.weighted_by_key],
            received=UnknownModel(ordered[0].arrays, self._why_unknown)
            if self.unknown
            else self.received,
            returned=tuple(reply.arrays for reply in ordered),
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
        strategy = self.strategy
        least = 0 if name in {*strategy.NON_NEGATIVE, *strategy.fractions} else -LARGEST
        most = MAX_COUNT if name in strategy.COUNTS else LARGEST
        check_metric(name, metrics[name], least, 1 if name in strategy.fractions else most)

    def _check_size(self, client: int, metrics: MetricRecord) -> None:
        key, known = self.strategy.weighted_by_key, self.sizes.get(client)
        if known is not None and metrics[key] != known:
            raise InvalidReply(
                f"{key} = {metrics[key]}, but it had {known} training examples when the run "
                "started. Restore its data, or start a new run"
            )

    def _warn_of_unread(self, content: RecordDict) -> None:
        key = self.strategy.arrayrecord_key
        unread = sorted(content.array_records.keys() - self.strategy.beside_model - {key})
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
        beside = self.strategy.beside_model
        others = [record for name, record in records.items() if name not in beside]
        if len(others) == 1:
            return others[0]
        raise InvalidReply(f"it has no ArrayRecord {key!r}, only {sorted(records)}")

    def _check_present(self, name: str, kind: str, sent: Container[str], reader: str = "") -> None:
        if name not in sent:
            remedy = (
                "must compute the measurements that the message's config lists under 'measure'"
                if name in self.strategy.measurements
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
            if name in self.strategy.SINGLE_ARRAYS:
                arrays = check_representation(arrays)
            else:
                arrays = self._checked_parameters(arrays)
            if name in self.strategy.NON_NEGATIVE:
                check_non_negative(arrays)
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
