"""The filter that separates a round's usable replies from the others, and counts them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import Message, MetricRecord, RecordDict

from fairflower.aggregation.messages import EnrolledClients
from fairflower.aggregation.records import (
    InvalidReply,
    NotFinite,
    client_id,
    scalar_metrics,
)
from fairflower.errors import Diverged, RoundFailed, escaped, logger, shorten_error
from fairflower.registry.measurements import MAX_COUNT

#: Matches error messages of fairflower, PyTorch and NumPy that are caused by NaN or infinity.
_NOT_FINITE = re.compile(r"\b(nan|infs?|infinity|infinite|non-finite)\b", re.IGNORECASE)

#: Largest number of characters in a reason; a hostile client may send a text of any length.
_LONGEST_REASON = 500

#: Result of the caller's check of a reply.
Answer = TypeVar("Answer")


@dataclass
class ReplyFilter:
    """Filter that separates a round's usable replies from the others.

    fairflower's app judges all clients that it asked. In other apps, where subclasses and wrappers
    choose messages and replies, the filter judges the replies that it gets.
    """

    server_round: int
    asked: Sequence[Message]  # empty if not known
    enrolled: EnrolledClients  # gets the ids that new clients report
    examples_key: str  # name of the metric with the number of examples
    min_clients: int | None  # smallest number of usable replies; None: half, rounded up
    dropped: dict[int, str] = field(default_factory=dict)  # client -> reason
    diverged: set[int] = field(default_factory=set)  # dropped clients with NaN or infinite values
    large_norms: Sequence[str] = ()  # very long vectors of earlier rounds, as text
    judged: int = 0  # number of clients, of which those in `empty` have no examples
    empty: dict[int, str] = field(default_factory=dict)
    remark: str = ""  # how the clients' arrays differ from the model that was sent

    def usable(
        self,
        replies: Iterable[Message],
        check: Callable[[int, RecordDict, MetricRecord], Answer],
    ) -> dict[int, Answer]:
        """Return ``check``'s results by client; drop error replies and invalid replies."""
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in self.asked}
        asked.pop("", None)  # messages that a grid has not sent have the id ""
        waiting, replied = {m.metadata.dst_node_id for m in self.asked}, set[int]()
        everyone = self.enrolled.nodes is not None
        answers: dict[int, Answer] = {}
        for reply in sorted(replies, key=lambda m: m.metadata.src_node_id):
            # An error reply for a dead node comes from the SuperLink, not from the node.
            request_id = reply.metadata.reply_to_message_id
            node = asked.get(request_id, reply.metadata.src_node_id)
            client = self.enrolled.clients.get(node, node)
            strange = (asked and request_id not in asked) or node not in waiting
            twice = node in replied and not reply.has_error()  # errors may come from the SuperLink
            if twice or (everyone and strange):
                logger.warning(
                    "Round %d ignores a reply from client %d, because it is late or the client has "
                    "already replied.",
                    self.server_round,
                    client,
                )
                continue
            waiting.discard(node)
            replied.add(node)
            self.judged += 1
            try:
                client, metrics = self._read_claim(reply, node, client, answers)
                self.enrolled.clients[node] = client
                if not everyone and metrics.get(self.examples_key) == 0:
                    self._note_empty(client)
                    continue
                self._check_examples(metrics)
                answers[client] = check(client, reply.content, metrics)
            except InvalidReply as problem:
                self.dropped[client] = str(problem)
                if isinstance(problem, NotFinite):
                    self.diverged.add(client)
        if everyone:
            self.judged = len(self.asked)
        self._drop_silent(waiting, set(asked.values()))
        for client, reason in sorted(self.dropped.items()):
            self.drop(client, reason)  # logs the reasons in the order of ids
        return answers

    def drop(self, client: int, reason: str) -> None:
        """Drop a client, and log the reason, shortened and without unprintable characters."""
        self.dropped[client] = reason = escaped(reason[:_LONGEST_REASON])
        text = "Round %d continues without client %d: %s"
        logger.warning(text, self.server_round, client, _without_client(reason, client))

    def check_enough(self, usable: int) -> None:
        """Raise ``RoundFailed`` with all reasons if too few replies are usable.

        The error is ``Diverged`` if NaN and infinite values are the only reasons.
        """
        half = math.ceil(self.judged / 2)
        needed = max(1, half if self.min_clients is None else self.min_clients)
        if usable + len(self.empty) < needed or not usable:
            diverged = self.dropped and self.dropped.keys() <= self.diverged
            error = Diverged if diverged else RoundFailed
            hint = ""
            if diverged and self.large_norms:
                hint = "\nUpdates with large norms, which clip-update-median would clip:"
                hint += "".join(f"\n  {text}" for text in self.large_norms)
            raise error(
                f"Round {self.server_round}: {usable} of {self.judged or len(self.asked)} clients "
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
        sharing: dict[str, list[int]] = {}
        for client, reason in sorted({**self.dropped, **self.empty}.items()):
            sharing.setdefault(_without_client(reason, client), []).append(client)
        lines = [
            f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}: {reason}"
            for reason, clients in sharing.items()
        ]
        return "".join(f"\n  {line}" for line in (*lines, self.remark) if line)

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

    def _drop_silent(self, waiting: Iterable[int], sent_to: set[int]) -> None:
        """Drop the clients of nodes without a reply; ``sent_to`` are nodes that got a message."""
        why = ["no reply before the timeout", "its SuperNode is not connected"]
        if self.enrolled.nodes is None:
            why = ["no reply was passed on", "no message was sent to it"]
        for node in waiting:
            unsent = (sent_to or self.enrolled.nodes) and node not in sent_to
            self.dropped[self.enrolled.clients.get(node, node)] = why[bool(unsent)]

    def _note_empty(self, client: int) -> None:
        """Note that a client has no examples; the log says so once."""
        self.empty[client] = f"it has no examples ({self.examples_key} = 0)"
        if client not in self.enrolled.empty:
            self.enrolled.empty.add(client)
            logger.warning("Client %d takes no part: %s.", client, self.empty[client])

    def _check_examples(self, metrics: MetricRecord) -> None:
        key = self.examples_key
        if key not in metrics:
            raise InvalidReply(f"its metrics lack {key!r}; the client must report it")
        value = float(metrics[key])  # type: ignore[arg-type]
        if not 1 / MAX_COUNT <= value <= MAX_COUNT:
            raise InvalidReply(f"{key} = {value}: expected at least 2**-53 and at most 2**53")


def _without_client(reason: str, client: int) -> str:
    """Return a reason without the client's id at its beginning."""
    return reason.removeprefix(f"Client {client}: ")
