"""A round's replies: which are usable, and why the clients of the others are dropped."""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median_low, mode
from typing import Any, NamedTuple, Self

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fairflower.aggregation.cohort import Arrays, Cohort, UnknownModel
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.hooks import StrategyHooks
from fairflower.aggregation.messages import EnrolledClients, RoundRequest
from fairflower.aggregation.records import (
    InvalidReply,
    NotFinite,
    check_arrays,
    check_finite,
    check_group_counts,
    check_mergeable,
    check_metric,
    check_representation,
    check_values,
    client_id,
    decode_record,
    measured_arrays,
    norm,
    others_medians,
    scalar_metrics,
    stack_common_metrics,
    usual_layout,
    with_zeros,
)
from fairflower.errors import ConfigError, Diverged, RoundFailed, escaped, logger, shorten_error
from fairflower.registry.measurements import MAX_COUNT, MEASUREMENTS

#: Matches error messages of fairflower, PyTorch and NumPy that are caused by NaN or infinity.
_NOT_FINITE = re.compile(r"\b(nan|infs?|infinity|infinite|non-finite)\b", re.IGNORECASE)

#: Largest number of characters in a reason; a hostile client may send a text of any length.
_LONGEST_REASON = 500

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
    return tuple(sorted((name, a.shape, a.dtype.str) for name, a in arrays.items()))


@dataclass
class Replies:
    """A round's replies: what is usable of each, and why the other clients are dropped.

    fairflower's app judges all clients that it asked. In other apps, where subclasses and wrappers
    choose messages and replies, the replies that arrive are judged.
    """

    request: RoundRequest
    enrolled: EnrolledClients  # gets the ids that new clients report
    examples_key: str  # name of the metric with the number of examples
    min_clients: int | None  # smallest number of usable replies; None: half, rounded up
    usable: dict[int, Any] = field(default_factory=dict)  # client -> what its check returned
    dropped: dict[int, str] = field(default_factory=dict)  # client -> reason
    diverged: set[int] = field(default_factory=set)  # dropped clients with NaN or infinite values
    judged: int = 0  # number of clients, of which those in `empty` have no examples
    empty: dict[int, str] = field(default_factory=dict)
    remark: str = ""  # how the clients' arrays differ from the model that was sent

    def read(
        self, messages: Iterable[Message], check: Callable[[int, RecordDict, MetricRecord], Any]
    ) -> Self:
        """Fill ``usable`` by ``check`` and ``dropped``; error replies are dropped, too."""
        requested = self.request.messages
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in requested}
        asked.pop("", None)  # messages that a grid has not sent have the id ""
        waiting, replied = {m.metadata.dst_node_id for m in requested}, set[int]()
        everyone = self.enrolled.nodes is not None
        for reply in sorted(messages, key=lambda m: m.metadata.src_node_id):
            # An error reply for a dead node comes from the SuperLink, not from the node.
            request_id = reply.metadata.reply_to_message_id
            node = asked.get(request_id, reply.metadata.src_node_id)
            client = self.enrolled.clients.get(node, node)
            strange = (asked and request_id not in asked) or node not in waiting
            twice = node in replied and not reply.has_error()  # errors may come from the SuperLink
            if twice or (everyone and strange):
                logger.warning(
                    "Round %d ignores a reply from %s, because it is late or the client has "
                    "already replied.",
                    self.request.server_round,
                    self.enrolled.name_of(client),
                )
                continue
            waiting.discard(node)
            replied.add(node)
            self.judged += 1
            try:
                client, metrics = self._read_claim(reply, node, client)
                self.enrolled.clients[node] = client
                if not everyone and metrics.get(self.examples_key) == 0:
                    self.empty[client] = f"it has no examples ({self.examples_key} = 0)"
                    if client not in self.enrolled.empty:  # the log says so once
                        self.enrolled.empty.add(client)
                        text = "Client %d takes no part: %s."
                        logger.warning(text, client, self.empty[client])
                    continue
                self._check_examples(metrics)
                self.usable[client] = check(client, reply.content, metrics)
            except InvalidReply as problem:
                self._note(client, problem)
        if everyone:
            self.judged = len(requested)
        self._drop_silent(waiting, set(asked.values()))
        for client in sorted(self.dropped):
            self._log(client)
        return self

    def drop(self, client: int, problem: str | InvalidReply) -> None:
        """Drop a client, although its reply may be usable on its own, and log the reason."""
        self._note(client, problem)
        self.usable.pop(client, None)
        self._log(client)

    def _log(self, client: int) -> None:
        self.dropped[client] = reason = escaped(self.dropped[client][:_LONGEST_REASON])
        said = self.request.server_round, _without_client(reason, client)
        if self.enrolled.logged.get(client) != said:  # a site may miss training and the test
            self.enrolled.logged[client] = said
            named = said[0], self.enrolled.name_of(client), said[1]
            logger.warning("Round %d continues without %s: %s", *named)

    def _note(self, client: int, problem: str | InvalidReply) -> None:
        self.dropped[client] = str(problem)
        if isinstance(problem, NotFinite):
            self.diverged.add(client)

    def check_enough(self) -> None:
        """Raise ``RoundFailed`` with all reasons if too few replies are usable.

        The error is ``Diverged`` if NaN and infinite values are the only reasons.
        """
        half = math.ceil(self.judged / 2)
        # Two sites: one alone would train a federation of one, which nobody asked for.
        both = self.min_clients is None and self.judged == 2 and self.request.population > 0
        both = both and bool(self.enrolled.names)
        needed = 2 if both else max(1, half if self.min_clients is None else self.min_clients)
        usable = len(self.usable)
        if usable + len(self.empty) < needed or not usable:
            diverged = self.dropped and self.dropped.keys() <= self.diverged
            error = Diverged if diverged else RoundFailed
            hint = "\nA site trains alone only with min-clients = 1." if both else ""
            if diverged and (large := self.enrolled.large_norms):
                hint += "\nUpdates with large norms, which clip-update-median would clip:"
                hint += "".join(f"\n  {text}" for text in large)
            raise error(
                f"Round {self.request.server_round}: {usable} of "
                f"{self.judged or len(self.request.messages)} clients sent a usable reply, fewer "
                f"than the {needed} that min-clients requires."
                f"{self._reasons()}{hint}"
            )

    def check_cap(self, max_weight: float) -> None:
        """Raise ``RoundFailed`` if the capped weights of the usable clients cannot sum to 1."""
        if max_weight * len(self.usable) < 1 - 1e-9:
            raise RoundFailed(
                f"Round {self.request.server_round}: the weights of {len(self.usable)} usable "
                f"replies cannot sum to 1 if each is at most {max_weight} (max_client_weight)."
                f"{self._reasons()}"
            )

    def _reasons(self) -> str:
        """Return one line per reason, with the clients that were dropped for it."""
        sharing: dict[str, list[int]] = {}
        for client, reason in sorted({**self.dropped, **self.empty}.items()):
            sharing.setdefault(_without_client(reason, client), []).append(client)
        lines = [f"{self.enrolled.name_of(*k)}: {reason}" for reason, k in sharing.items()]
        return "".join(f"\n  {line}" for line in (*lines, self.remark) if line)

    def _read_claim(self, reply: Message, node: int, client: int) -> tuple[int, MetricRecord]:
        """Return the client id that a reply claims, and its metrics; check the id."""
        if reply.has_error():
            reason = shorten_error(reply.error.reason or "it failed without a message")
            raise (NotFinite if _NOT_FINITE.search(reason) else InvalidReply)(reason)
        metrics = scalar_metrics(reply.content)
        claimed = client_id(metrics, default=client)
        if claimed != client and node in (self.enrolled.nodes or {}).values():
            raise InvalidReply(f"it claims to be client {claimed}")
        if claimed in self.usable:
            raise InvalidReply(f"client id {claimed} has already replied in this round")
        return claimed, metrics

    def _drop_silent(self, waiting: Iterable[int], sent_to: set[int]) -> None:
        """Drop the clients of nodes without a reply; ``sent_to`` are nodes that got a message."""
        why = ["no reply before the timeout", "its SuperNode is not connected"]
        if self.enrolled.nodes is None:
            why = ["no reply was passed on", "no message was sent to it"]
        for node in waiting:
            unsent = bool(sent_to or self.enrolled.nodes) and node not in sent_to
            self.dropped[self.enrolled.clients.get(node, node)] = why[unsent]

    def _check_examples(self, metrics: MetricRecord) -> None:
        key = self.examples_key
        if key not in metrics:
            raise InvalidReply(f"its metrics lack {key!r}; the client must report it")
        value = float(metrics[key])  # type: ignore[arg-type]
        if not 1 / MAX_COUNT <= value <= MAX_COUNT:
            raise InvalidReply(f"{key} = {value}: expected at least 2**-53 and at most 2**53")


def _without_client(reason: str, client: int) -> str:
    return reason.removeprefix(f"Client {client}: ")


class Reply(NamedTuple):
    """A usable reply to a train message, with its decoded arrays."""

    content: RecordDict
    metrics: MetricRecord
    arrays: Arrays
    measured: dict[str, Arrays]


class ReplyCheck:
    """What a strategy's replies to a round's train messages must contain; parses them.

    ``model`` is the global model that the clients received, None if it is not known, and ``sizes``
    has the number of training examples by client id, where known.
    """

    def __init__(
        self, strategy: StrategyHooks, model: ArrayRecord | None, sizes: Mapping[int, int]
    ) -> None:
        received = {} if model is None else decode_record(model)
        self.strategy, self.sizes = strategy, sizes
        self.large_norms: list[tuple[int, str]] = []  # clients with very long vectors, as text
        #: Why the model that the clients received is not known, and what to do; "" if it is known.
        self.unknown = _NOT_CONFIGURED if model is None else ""
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

    def parse(self, client: int, content: RecordDict, metrics: MetricRecord) -> Reply:
        """Return a client's parsed reply; ``InvalidReply`` says what is wrong with it."""
        arrays, model_norm = measured_arrays(decode_record(self._model_in(content)), self.received)
        self._check_norm(client, "model", model_norm, self.norm, "the received model has")
        vectors = self.strategy._array_measurements
        wanted = (*self.strategy._measurements, *self.strategy.reported_metrics)
        self.check_numbers(client, metrics, [name for name in wanted if name not in vectors])
        self.check_policy(metrics)
        if "train_loss" in metrics:
            check_finite("train_loss", metrics["train_loss"])
        if not ((state := float(metrics.get("state-round", 0))) >= 0 and state.is_integer()):  # type: ignore[arg-type]
            raise InvalidReply(f"state-round = {state}: expected a round, an integer >= 0")
        examples = float(metrics[self.strategy.weighted_by_key])  # type: ignore[arg-type]
        measured = {name: self._vectors(name, content, examples) for name in vectors}
        returned = (exchange for exchange in self.strategy.exchanges if exchange.returned)
        measured |= {e.name: self._returned(e, content, examples) for e in returned}
        return Reply(content, metrics, arrays, measured)

    def read(self, replies: Replies, messages: Iterable[Message]) -> Replies:
        """Return the parsed usable replies; raise ``RoundFailed`` if there are too few."""
        if replies.enrolled.nodes is None:
            messages = list(messages)
            self._expect_theirs(messages)
            if self.unknown and self.strategy.exchanges:
                raise ConfigError(self._unknown_model({}).text)
            if self.unknown and replies.request.messages:
                replies.remark = f"{self.unknown}."
                logger.warning("Round %d: %s", replies.request.server_round, replies.remark)
        replies.read(messages, self.parse).check_enough()
        self._drop_odd_shapes(replies)
        self._drop_large_norms(replies)
        return replies

    def _drop_odd_shapes(self, replies: Replies) -> None:
        """Drop clients whose arrays differ in shape from those of most clients."""
        wanted = self.strategy._array_measurements
        vectors = [name for name in wanted if MEASUREMENTS[name].shape == "vector"]
        shapes_of: dict[str, Callable[[Arrays], tuple[int, ...]]]
        shapes_of = dict.fromkeys(vectors, lambda arrays: arrays["h"].shape)
        shapes_of |= {e.name: e.shape_of for e in self.strategy.exchanges if e.returned}
        for name, shape_of in sorted(shapes_of.items()):
            shapes = {k: shape_of(reply.measured[name]) for k, reply in replies.usable.items()}
            usual = mode(sorted(shapes.values()))  # the smallest of equally frequent shapes
            for client, shape in shapes.items():
                if shape != usual:
                    text = f"its {name!r} has shape {shape}; most clients sent {usual}"
                    replies.drop(client, text)
            replies.check_enough()

    def _drop_large_norms(self, replies: Replies) -> None:
        """Drop clients whose additional arrays are so long that others would be lost in a sum."""
        for name in sorted(next(iter(replies.usable.values())).measured):
            norms = {client: norm(m.measured[name]) for client, m in replies.usable.items()}
            for client, usual in sorted(others_medians(norms).items()):
                own = norms[client]
                try:
                    self._check_norm(client, repr(name), own, usual, "the others' median is")
                except NotFinite as problem:
                    replies.drop(client, problem)
            replies.check_enough()

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
            self.large_norms.append((client, text))

    def gather(self, replies: Replies, max_weight: float) -> Cohort:
        """Return the usable replies as a cohort, in the order of client ids."""
        ordered: list[Reply] = [replies.usable[client] for client in sorted(replies.usable)]
        request = replies.request
        if self.large_norms:
            before, name_of = f"round {request.server_round}: ", replies.enrolled.name_of
            replies.enrolled.large_norms[:] = [
                f"{before}{name_of(client)}'s {text}" for client, text in self.large_norms
            ]
        if request.server_round == 1:
            self._warn_of_unread(ordered[0].content)
        metrics = stack_common_metrics([reply.metrics for reply in ordered])
        models = [self.received, *(reply.arrays for reply in ordered)]
        (received, *returned), self.unset = with_zeros(models, self.infinite)
        if self.unknown:
            received = self._unknown_model(returned[0])
        return Cohort(
            server_round=request.server_round,
            client_ids=tuple(sorted(replies.usable)),
            num_examples=metrics[self.strategy.weighted_by_key],
            received=received,
            returned=tuple(returned),
            metrics=metrics,
            buffers=self.buffers,
            measured={
                name: tuple(reply.measured[name] for reply in ordered)
                for name in ordered[0].measured
            },
            population=request.population,
            max_weight=max_weight,
        )

    def check_numbers(self, client: int, metrics: MetricRecord, names: Iterable[str]) -> None:
        """Raise ``InvalidReply`` if a client's metrics ``names`` are missing or impossible."""
        self._check_size(client, metrics)
        for name in names:
            self._check_number(name, metrics)

    def check_policy(self, metrics: Container[str]) -> None:
        """Raise ``InvalidReply`` if metrics are missing that the participation policy reads."""
        for name in (policy := self.strategy._participation).reported_metrics:
            self._check_present(name, "metric", metrics, type(policy).__name__)

    def _check_number(self, name: str, metrics: MetricRecord) -> None:
        self._check_present(name, "metric", metrics)
        usual = MEASUREMENTS.assumed(name)
        within = self.strategy.ranges.get(name, (usual.low, usual.high))
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
        if name in sent:
            return
        remedy = "The client must report it"
        if name in self.strategy._measurements:
            remedy = "The client must compute the measurements that the message's config lists "
            remedy += "under 'measure'"
        elif kind == "ArrayRecord":
            remedy = "Choose a client.name that returns it"
        reader = reader or type(self.strategy).__name__
        raise InvalidReply(f"it sent no {kind} {name!r}, which {reader} needs. {remedy}")

    def _vectors(self, name: str, content: RecordDict, examples: float) -> Arrays:
        self._check_present(name, "ArrayRecord", content.array_records)
        kind = MEASUREMENTS[name]
        with _naming_record(name):
            arrays = decode_record(content.array_records[name])
            vector = kind.shape == "vector"
            arrays = check_representation(arrays) if vector else self._checked_parameters(arrays)
            check_values(arrays, kind.low, kind.high)
        if name == "received_group_counts":
            check_group_counts(arrays["h"], None, examples)
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

    def _returned(self, exchange: Exchange, content: RecordDict, examples: float) -> Arrays:
        reader = f"the exchange {type(exchange).__name__}"
        self._check_present(exchange.name, "ArrayRecord", content.array_records, reader)
        with _naming_record(exchange.name):
            arrays = decode_record(content.array_records[exchange.name])
            return exchange.check(arrays, self.trained, examples)


@contextmanager
def _naming_record(name: str) -> Iterator[None]:
    """Put the record's name before the message of an `InvalidReply`."""
    try:
        yield
    except InvalidReply as problem:
        problem.args = (f"its {name!r}: {problem}",)  # keeps the class NotFinite
        raise
