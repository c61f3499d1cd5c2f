"""Discovery: asking connected nodes which client they are and which data they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fairflower.data import Federation
from fairflower.errors import ConfigError, DataError, RunInterrupted, logger, shorten_error
from fairflower.server.transport import send_and_receive

#: Placeholder for the data folder of a federation whose clients have the data.
_ELSEWHERE = Path("at-the-clients")

#: Largest number of missing clients that an error lists; a node may claim billions of clients.
_MAX_LISTED = 100


class NodeInfo(NamedTuple):
    """A node's description of itself."""

    number: int | None  # partition-id
    size: int | None  # num-partitions
    site: Federation | None  # a site's data, as a federation of a single client
    federation: Federation | None  # the data set of which the node has a share


#: Descriptions by node id.
NodeInfos = dict[int, NodeInfo]


class NodeDiscovery:
    """Asks every node, once, which client it is.

    ``timeout`` is the number of seconds to wait for an answer and for missing nodes. If
    ``settings``, a run config, is given, nodes prepare their data and describe them.
    """

    #: Seconds until missing clients are logged for the first time.
    FIRST_NOTICE_SECONDS = 5.0

    def __init__(
        self, grid: Grid, timeout: float, stop: threading.Event, settings: ConfigRecord | None
    ) -> None:
        self.grid, self.timeout, self.stop = grid, timeout, stop
        self.content = RecordDict({"config": settings or ConfigRecord()})
        self.infos: NodeInfos = {}
        self.problems: dict[int, str] = {}  # by node id
        #: Query id -> node id, for queries without an answer.
        self.silent: dict[str, int] = {}
        self._begin = time.monotonic()
        self._next_notice, self._pause = self._begin + self.FIRST_NOTICE_SECONDS, 0.05

    def online(self) -> set[int]:
        """Return the ids of connected nodes, and forget the answers of all other nodes."""
        online = set(self.grid.get_node_ids())
        # A SuperNode that has disconnected is asked again when it reconnects.
        self.infos = {node: info for node, info in self.infos.items() if node in online}
        self.problems = {node: why for node, why in self.problems.items() if node in online}
        self.silent = {query: node for query, node in self.silent.items() if node in online}
        return online

    def ask(self, known: Collection[int] = ()) -> bool:
        """Ask new nodes that are not in ``known``; return whether there were new nodes."""
        fresh = sorted(self.online() - {*known, *self.infos, *self.problems})
        others: list[int] = []
        if getattr(self.grid, "have_same_data", False):
            fresh, others = fresh[:1], fresh[1:]
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
                self.infos[node] = _parse_reply(reply)
            except ValueError as problem:
                self.problems[node] = str(problem)
                logger.warning("Node %d cannot take part: %s", node, problem)
        if others and (info := self.infos.get(fresh[0])) and info.number is not None:
            first = fresh[0] - info.number
            self.infos |= {node: info._replace(number=node - first) for node in others}
        quiet = set(fresh) - {*self.infos, *self.problems}
        self.problems |= dict.fromkeys(sorted(quiet), f"no answer in {self.timeout:g} s")
        self.silent |= {query_id: node for query_id, node in asked.items() if node in quiet}
        return bool(fresh)

    def wait(self, notice: str) -> bool:
        """Wait a moment for more nodes; return False after the timeout.

        Raises ``RunInterrupted`` if ``stop`` is set.
        """
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

    def missing_clients_error(self, expected: int, ids: Iterable[int] | None) -> ConfigError:
        """Return the error about missing clients; ``ids`` are the ids of all clients."""
        present = {info.number for info in self.infos.values()}
        absent, node_config = "", 'domain="<domain>" data-dir="<folder>"'
        if ids is not None:
            away = [*islice((client for client in ids if client not in present), _MAX_LISTED + 1)]
            more = ", and more" if away[_MAX_LISTED:] else ""
            absent = f"; missing: {away[:_MAX_LISTED]}{more}"
            node_config = "partition-id=<client>"
        patience = ""
        if self.silent:
            patience = (
                " Connected nodes that have not answered may still be preparing their data; in "
                "that case, increase round-timeout."
            )
        reasons = "".join(f"\n  node {node}: {why}" for node, why in self.problems.items())
        return ConfigError(
            f"{len(self.infos)} of {expected} clients answered{absent}. Start a SuperNode "
            f"for each with --node-config '{node_config}'.{patience}{reasons}"
        )


def _parse_reply(reply: Message) -> NodeInfo:
    """Parse a node's description of itself; raise ``ValueError`` if it is invalid."""
    if reply.has_error():
        raise ValueError(shorten_error(reply.error.reason or "it failed without a message"))
    fields = dict(next(iter(reply.content.config_records.values()), {}))
    number, size = _whole_number(fields, "partition-id"), _whole_number(fields, "num-partitions")
    if "site" not in fields and number is None:
        raise ValueError("it has neither a partition-id nor a domain that identifies its client")
    site, federation = _parse_federation(fields, "site"), _parse_federation(fields, "federation")
    if site and len(site.domains + site.clients) != 2:
        raise ValueError(
            "a site must have a single client and a single domain, but the node describes several"
        )
    return NodeInfo(number, size, site, federation)


def _parse_federation(fields: Mapping[str, object], key: str) -> Federation | None:
    if key not in fields:
        return None
    try:
        return _parsed(str(fields[key]))
    except ValueError as error:
        raise ValueError(f"its description of its data {error}") from error


@lru_cache(maxsize=4)
def _parsed(text: str) -> Federation:
    """Parse a description once, although every node of a common data set sends it."""
    return read_federation(text, _ELSEWHERE)


def read_federation(text: str, folder: Path) -> Federation:
    """Return the federation that ``Federation.to_json`` wrote, and check all of its fields.

    Raises ``ValueError`` if the text is something else.
    """
    try:
        federation = Federation.from_json(text, folder)
        federation.check()
    except DataError as error:
        raise ValueError(f"is invalid: {error}") from error
    except Exception as error:  # another version, or a hostile node, may send anything
        raise ValueError(f"cannot be read ({error!r})") from error
    return federation


def _whole_number(fields: Mapping[str, object], key: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, int) and 0 <= value < 2**31:
        return value
    # Python does not print integers with thousands of digits.
    shown = f" = {value!r}" if not isinstance(value, int) or abs(value) < 2**64 else ""
    raise ValueError(f"its {key}{shown} is not an integer from 0 to 2**31 - 1")
