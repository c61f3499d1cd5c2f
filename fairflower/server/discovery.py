"""What the nodes of a run say of themselves."""

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fairflower import __version__
from fairflower.data import Federation
from fairflower.engines.inline import send_and_receive
from fairflower.errors import (
    ConfigError,
    DataError,
    RunInterrupted,
    escaped,
    logger,
    quoted,
    shorten_error,
)
from fairflower.flower_compat import SiteKey, connected_nodes
from fairflower.tables.sites import SiteTable

#: Placeholder for the data folder of a federation whose clients have the data.
_ELSEWHERE = Path("at-the-clients")

#: Largest number of missing clients that an error lists; a node may claim billions of clients.
_MAX_LISTED = 100


class NodeInfo(NamedTuple):
    """A node's description of itself."""

    number: int | None  # partition-id
    size: int | None  # num-partitions
    site: Federation | None  # a site's data, as a federation of a single client
    federation: Federation | None  # the data set of which the node has a share; only of client 0
    digest: str  # of this data set, without paths; empty if the node was not asked
    version: str = ""  # of fairflower
    tests_only: bool = False  # whether the site does not train
    key: SiteKey | None = None  # as Flower knows the node, and not as it describes itself
    #: Digests of a site's rows, after one of their key and columns (`fairflower.tables.digests`).
    rows: tuple[str, frozenset[str]] = ("", frozenset())

    @property
    def title(self) -> str:
        """The name of the site, or else its domain or its client's number."""
        if self.key:
            return self.key.name
        return f"the site of {self.site.domains[0]!r}" if self.site else f"client {self.number}"


#: Descriptions by node id.
NodeInfos = dict[int, NodeInfo]


class NodeDiscovery:
    """Asks every node, once, which client it is.

    ``timeout`` is the number of seconds to wait for an answer and for missing nodes. If
    ``settings``, a run config, is given, nodes prepare their data and describe them. With ``only``,
    names of sites, no other node gets a message, and none of the sites in ``without`` does. Setting
    ``stop`` ends all waiting with ``RunInterrupted``.
    """

    FIRST_NOTICE_SECONDS = 5.0  # seconds until missing clients are logged for the first time

    def __init__(
        self,
        grid: Grid,
        timeout: float,
        stop: threading.Event,
        settings: ConfigRecord | None = None,
        only: Collection[str] = (),
    ) -> None:
        self.grid, self.timeout, self.stop, self.only = grid, timeout, stop, only
        self.without: Collection[str] = ()
        self.keys: dict[int, SiteKey] = {}  # by node id, of all nodes that have been connected
        self.content = RecordDict({"config": settings or ConfigRecord()})
        self.infos: NodeInfos = {}
        self.problems: dict[int, str] = {}  # by node id
        self.silent: dict[str, int] = {}  # query id -> node id, for queries without an answer
        self._begin = time.monotonic()
        self._next_notice, self._pause = self._begin + self.FIRST_NOTICE_SECONDS, 0.05

    def online(self) -> set[int]:
        """Return the ids of connected nodes, and forget the answers of all other nodes."""
        connected = connected_nodes(self.grid)
        self.keys |= {node: key for node, key in connected.items() if key}
        names = {node: key.name if key else "" for node, key in connected.items()}
        online = {
            node
            for node, name in names.items()
            if (not self.only or name in self.only) and name not in self.without
        }
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
        replies += self.send(queries)
        asked = {query.metadata.message_id: query.metadata.dst_node_id for query in queries}
        asked |= self.silent
        for reply in replies:
            query_id = reply.metadata.reply_to_message_id
            node = asked.get(query_id, reply.metadata.src_node_id)
            self.silent.pop(query_id, None)
            self.problems.pop(node, None)
            try:
                self.infos[node] = _parse_reply(reply)._replace(key=self.keys.get(node))
            except ValueError as problem:
                self.problems[node] = str(problem)
                logger.warning("%s cannot take part: %s", self.name_of(node), problem)
        if others and (info := self.infos.get(fresh[0])) and info.number is not None:
            first = fresh[0] - info.number
            self.infos |= {node: info._replace(number=node - first) for node in others}
        quiet = set(fresh) - {*self.infos, *self.problems}
        self.problems |= dict.fromkeys(sorted(quiet), f"no answer in {self.timeout:g} s")
        self.silent |= {query_id: node for query_id, node in asked.items() if node in quiet}
        return bool(fresh)

    def send(self, messages: list[Message]) -> list[Message]:
        """Send messages; return the replies that arrive before the timeout."""
        return send_and_receive(self.grid, messages, self.timeout, self.stop)

    def name_of(self, node: int) -> str:
        """Return the name of a node's site, or its id."""
        return self.keys[node].name if node in self.keys else f"Node {node}"

    def wait(self, notice: str) -> bool:
        """Wait a moment for more nodes; return False after the timeout, or if none can come.

        Raises ``RunInterrupted`` if ``stop`` is set.
        """
        now = time.monotonic()
        # A grid of this process has all its nodes from the start.
        complete = getattr(self.grid, "simulated", False) and not self.silent
        if complete or now > self._begin + self.timeout:
            return False
        if now > self._next_notice:
            logger.info("Waiting for clients: %s", notice)
            self._next_notice += 30
        if self.stop.wait(self._pause):
            raise RunInterrupted
        self._pause = min(2 * self._pause, 1.0)
        return True

    def missing_sites(self) -> list[str]:
        """Return the names in ``only`` whose sites have not described their data."""
        return [name for name in self.only if name not in {i.title for i in self.infos.values()}]

    def _reasons(self) -> str:
        """Return why connected nodes do not take part, a line for each."""
        lines = (f"\n  {self.name_of(n)}: {why}" for n, why in sorted(self.problems.items()))
        return "".join(line.replace("  Node", "  node", 1) for line in lines)

    def missing_error(
        self, expected: int, ids: Iterable[int] | None = None, more: str = ""
    ) -> ConfigError:
        """Return the error about sites in ``only``, or clients, that have not described their data.

        ``ids`` are the ids of all clients.
        """
        if self.only:
            gone = ", ".join(self.missing_sites())
            return ConfigError(
                f"sites = {quoted(','.join(self.only))}: not connected after {self.timeout:g} s "
                f"(round-timeout): {gone}. A site has its name from `flwr supernode register KEY "
                "--name NAME`; `fairflower deploy sites` lists the names. Start the SuperNodes of "
                f"these sites, or remove them from the setting.{self._reasons()}"
            )
        present = {info.number for info in self.infos.values()}
        absent, node_config = "", 'domain="<domain>" data-dir="<folder>"'
        if ids is not None:
            away = [*islice((client for client in ids if client not in present), _MAX_LISTED + 1)]
            others = ", and more" if away[_MAX_LISTED:] else ""
            absent = f"; missing: {away[:_MAX_LISTED]}{others}"
            node_config = "partition-id=<client>"
        text = f"{len(self.infos)} of {expected} clients answered{absent}. Start a SuperNode for "
        text += f"each with --node-config '{node_config}'.{more}"
        if self.silent:
            text += " Connected nodes that have not answered may still be preparing their data; in "
            text += "that case, increase round-timeout."
        return ConfigError(text + self._reasons())


def _parse_reply(reply: Message) -> NodeInfo:
    """Parse a node's description of itself; raise ``ValueError`` if it is invalid."""
    if reply.has_error():
        raise ValueError(shorten_error(reply.error.reason or "it failed without a message"))
    fields = dict(next(iter(reply.content.config_records.values()), {}))
    number, size = _whole_number(fields, "partition-id"), _whole_number(fields, "num-partitions")
    if "site" not in fields and number is None:
        raise ValueError("it has neither a partition-id nor a domain that identifies its client")
    described = {
        key: read_federation(str(fields[key]), _ELSEWHERE, "its description of its data")
        for key in ("site", "federation")
        if key in fields
    }
    site, federation = described.get("site"), described.get("federation")
    if site and len(site.domains + site.clients) != 2:
        raise ValueError(
            "a site must have a single client and a single domain, but the node describes several"
        )
    if site and site.encoding:
        SiteTable.from_json(site.encoding)  # raises ValueError
    digest = str(fields.get("digest", ""))
    if number == 0 and digest and not federation:
        raise ValueError("it does not describe its data")
    version = str(fields.get("version", ""))
    if why := incompatible(version):
        raise ValueError(why)
    rows = fields.get("rows")
    digests = frozenset(map(str, rows)) if isinstance(rows, list) else frozenset()
    return NodeInfo(
        *(number, size, site, federation, digest, version, bool(fields.get("tests-only"))),
        rows=(str(fields.get("rows-of", "")), digests),
    )


def incompatible(version: str, here: str = __version__) -> str:
    """Return why a site with another version of fairflower cannot take part, or "".

    Versions work together if they differ at most in their last number; "" is not known.
    """
    unsaid = {"", "unknown"} & {version, here}  # unknown: not installed, in an app's bundle only
    if unsaid or version.split(".")[:2] == here.split(".")[:2]:
        return ""
    return (
        f"it runs fairflower {escaped(version[:40])}, but the server runs {here}. Install the same "
        "version on both"
    )


def read_federation(text: str, folder: Path, name: str) -> Federation:
    """Return what ``Federation.to_json`` wrote; raise ``ValueError``, with the ``name``, if not."""
    try:
        federation = Federation.from_json(text, folder)
        federation.check()
    except DataError as error:
        raise ValueError(f"{name} is invalid: {error}") from error
    except Exception as error:  # another version, or a hostile node, may send anything
        raise ValueError(f"{name} cannot be read ({error!r})") from error
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
