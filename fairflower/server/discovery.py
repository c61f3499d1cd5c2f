"""Asking nodes which client they are and what they have, while nodes come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fairflower.aggregation.replies import shorten_error
from fairflower.data import Federation
from fairflower.errors import ConfigError, DataError, RunInterrupted, logger
from fairflower.server.transport import send_and_receive

#: Where the clients' data are.
_ELSEWHERE = Path("at-the-clients")


#: Clients that did not come and are named; a node may claim that there are billions.
_MOST_NAMED = 100


class NodeInfo(NamedTuple):
    """A node's account of itself."""

    number: int | None  # partition-id
    size: int | None  # num-partitions
    site: Federation | None  # the data that it has to itself, as a federation of one client
    federation: Federation | None  # the data set of which it has a share


#: By node id.
NodeInfos = dict[int, NodeInfo]


class NodeDiscovery:
    """Asks every node once who it is.

    It waits ``timeout`` seconds for an answer, and for nodes that are not there yet. With
    ``settings``, a run config, clients prepare their data by it and describe them.
    """

    #: Seconds until it is said for the first time who is missing.
    PATIENCE = 5.0

    def __init__(
        self, grid: Grid, timeout: float, stop: threading.Event, settings: ConfigRecord | None
    ) -> None:
        self.grid, self.timeout, self.stop = grid, timeout, stop
        self.content = RecordDict({"config": settings or ConfigRecord()})
        self.answers: NodeInfos = {}
        self.problems: dict[int, str] = {}  # by node id
        #: Nodes that gave no answer in time, by the id of what they were asked.
        self.silent: dict[str, int] = {}
        self._begin = time.monotonic()
        self._next_notice, self._pause = self._begin + self.PATIENCE, 0.05

    def online(self) -> set[int]:
        """List the nodes that are there, and forget what others have said."""
        online = set(self.grid.get_node_ids())
        # A SuperNode that went away is asked again when it is back.
        self.answers = {node: answer for node, answer in self.answers.items() if node in online}
        self.problems = {node: why for node, why in self.problems.items() if node in online}
        self.silent = {query: node for query, node in self.silent.items() if node in online}
        return online

    def ask(self, known: Collection[int] = ()) -> bool:
        """Ask those that are new, and not ``known``; say whether there were any."""
        fresh = sorted(self.online() - {*known, *self.answers, *self.problems})
        queries = [Message(self.content, node, MessageType.QUERY) for node in fresh]
        late = self.grid.pull_messages(list(self.silent)) if self.silent else []
        replies = [reply for reply in late if reply.metadata.reply_to_message_id in self.silent]
        replies += send_and_receive(self.grid, queries, self.timeout, self.stop)
        asked = {query.metadata.message_id: query.metadata.dst_node_id for query in queries}
        asked |= self.silent
        for reply in replies:
            query_id = reply.metadata.reply_to_message_id
            node = asked.get(query_id, reply.metadata.src_node_id)
            self.silent.pop(query_id, None)
            self.problems.pop(node, None)
            try:
                self.answers[node] = _parse_reply(reply)
            except ValueError as problem:
                self.problems[node] = str(problem)
                logger.warning("Node %d cannot take part: %s", node, problem)
        quiet = set(fresh) - {*self.answers, *self.problems}
        self.problems |= dict.fromkeys(sorted(quiet), f"no answer in {self.timeout:g} s")
        self.silent |= {query_id: node for query_id, node in asked.items() if node in quiet}
        return bool(fresh)

    def wait(self, notice: str) -> bool:
        """Give others time to come; say whether there is any left."""
        now = time.monotonic()
        if now > self._begin + self.timeout:
            return False
        if now > self._next_notice:
            logger.info("Waiting for clients: %s", notice)
            self._next_notice += 30
        if self.stop.wait(self._pause):
            raise RunInterrupted
        self._pause = min(2 * self._pause, 1.0)
        return True

    def missing(self, expected: int, ids: Iterable[int] | None) -> ConfigError:
        """Make the error to raise when clients did not come."""
        here = {answer.number for answer in self.answers.values()}
        absent, node_config = "", 'domain="<domain>" data-dir="<folder>"'
        if ids is not None:
            away = [*islice((client for client in ids if client not in here), _MOST_NAMED + 1)]
            more = ", and more" if away[_MOST_NAMED:] else ""
            absent = f"; missing: {away[:_MOST_NAMED]}{more}"
            node_config = "partition-id=<client>"
        patience = ""
        if self.silent:
            patience = (
                " Whoever is there and gives no answer may still be preparing its data: "
                "raise round-timeout."
            )
        reasons = "".join(f"\n  node {node}: {why}" for node, why in self.problems.items())
        return ConfigError(
            f"{len(self.answers)} of {expected} clients answered{absent}. Start a SuperNode "
            f"for each with --node-config '{node_config}'.{patience}{reasons}"
        )


def _parse_reply(reply: Message) -> NodeInfo:
    """Read a node's account of itself, or raise ``ValueError`` with what is wrong with it."""
    if reply.has_error():
        raise ValueError(shorten_error(reply.error.reason or "no reason given"))
    said = dict(next(iter(reply.content.config_records.values()), {}))
    number, size = _whole_number(said, "partition-id"), _whole_number(said, "num-partitions")
    if "site" not in said and number is None:
        raise ValueError("it does not say which client it is (partition-id or domain)")
    site, federation = _parse_federation(said, "site"), _parse_federation(said, "federation")
    if site and len(site.domains + site.clients) != 2:
        raise ValueError("a site is one client with one domain, and it describes several")
    return NodeInfo(number, size, site, federation)


def _parse_federation(said: Mapping[str, object], key: str) -> Federation | None:
    if key not in said:
        return None
    try:
        federation = Federation.from_json(str(said[key]), _ELSEWHERE)
        federation.check()
    except DataError as error:
        raise ValueError(f"it describes data that nobody can have: {error}") from error
    except Exception as error:  # whatever another version, or anybody, may send
        raise ValueError(f"it describes its data in a way that is not known ({error!r})") from error
    return federation


def _whole_number(said: Mapping[str, object], key: str) -> int | None:
    value = said.get(key)
    if value is None:
        return None
    if isinstance(value, int) and 0 <= value < 2**31:
        return value
    # Python does not print integers of thousands of digits.
    shown = f" = {value!r}" if not isinstance(value, int) or abs(value) < 2**64 else ""
    raise ValueError(f"its {key}{shown} is no whole number from 0 to 2**31")
