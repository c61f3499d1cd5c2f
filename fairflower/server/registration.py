"""The nodes of a run: finding out which node is which client.

Node ids change when a run is resumed or a SuperNode without a key is restarted. Client ids never
change.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fairflower.data import Federation
from fairflower.data.federation import ClientInfo
from fairflower.data.sites import fits, site_client_info
from fairflower.engines.inline import send_and_receive
from fairflower.errors import (
    ConfigError,
    DataError,
    RunFolderError,
    RunInterrupted,
    logger,
    shorten_error,
)
from fairflower.tables.sites import SiteTable, merge_sites

#: Placeholder for the data folder of a federation whose clients have the data.
_ELSEWHERE = Path("at-the-clients")

#: Largest number of missing clients that an error lists; a node may claim billions of clients.
_MAX_LISTED = 100

#: Smallest id of the invented nodes of clients that are not connected. Flower reserves 1 for the
#: SuperLink; its other ids are random 64-bit numbers.
FIRST_ABSENT_NODE = 2


# --- what nodes say of themselves ----------------------------------------------------------------


class NodeInfo(NamedTuple):
    """A node's description of itself."""

    number: int | None  # partition-id
    size: int | None  # num-partitions
    site: Federation | None  # a site's data, as a federation of a single client
    federation: Federation | None  # the data set of which the node has a share; only of client 0
    digest: str  # of this data set, without paths; empty if the node was not asked
    #: Digests of a site's rows, after one of their key and columns (`fairflower.tables.digests`).
    rows: tuple[str, frozenset[str]] = ("", frozenset())


#: Descriptions by node id.
NodeInfos = dict[int, NodeInfo]


class NodeDiscovery:
    """Asks every node, once, which client it is.

    ``timeout`` is the number of seconds to wait for an answer and for missing nodes. If
    ``settings``, a run config, is given, nodes prepare their data and describe them.
    """

    FIRST_NOTICE_SECONDS = 5.0  # seconds until missing clients are logged for the first time

    def __init__(
        self, grid: Grid, timeout: float, stop: threading.Event, settings: ConfigRecord | None
    ) -> None:
        self.grid, self.timeout, self.stop = grid, timeout, stop
        self.content = RecordDict({"config": settings or ConfigRecord()})
        self.infos: NodeInfos = {}
        self.problems: dict[int, str] = {}  # by node id
        self.silent: dict[str, int] = {}  # query id -> node id, for queries without an answer
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
        text = f"{len(self.infos)} of {expected} clients answered{absent}. Start a SuperNode for "
        text += f"each with --node-config '{node_config}'."
        if self.silent:
            text += " Connected nodes that have not answered may still be preparing their data; in "
            text += "that case, increase round-timeout."
        reasons = (f"\n  node {node}: {why}" for node, why in self.problems.items())
        return ConfigError(text + "".join(reasons))


def _parse_reply(reply: Message) -> NodeInfo:
    """Parse a node's description of itself; raise ``ValueError`` if it is invalid."""
    if reply.has_error():
        raise ValueError(shorten_error(reply.error.reason or "it failed without a message"))
    fields = dict(next(iter(reply.content.config_records.values()), {}))
    number, size = _whole_number(fields, "partition-id"), _whole_number(fields, "num-partitions")
    if "site" not in fields and number is None:
        raise ValueError("it has neither a partition-id nor a domain that identifies its client")
    described = {
        key: _read_federation(str(fields[key]), _ELSEWHERE, "its description of its data")
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
    # A node with an earlier version has no digest, but describes the data set itself.
    digest = str(fields.get("digest", fields.get("federation", "")))
    if number == 0 and digest and not federation:
        raise ValueError("it does not describe its data")
    rows = fields.get("rows")
    digests = frozenset(map(str, rows)) if isinstance(rows, list) else frozenset()
    return NodeInfo(
        number, size, site, federation, digest, (str(fields.get("rows-of", "")), digests)
    )


def _read_federation(text: str, folder: Path, name: str) -> Federation:
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


# --- which node is which client ------------------------------------------------------------------


@dataclass(frozen=True)
class ClientRegistry:
    """Which node is which client.

    Clients share a data set, each with a ``partition-id``, or they are sites with their own data,
    identified by domain and ``partition-id``.
    """

    nodes: dict[int, int]  # client id (0 ... clients - 1) -> node id
    federation: Federation | None  # as the nodes describe it; None if they were not asked
    digest: str = ""  # of the shared data set
    sites: bool = False
    numbered: bool = True  # whether sites have a partition-id

    def client_of(self, info: NodeInfo) -> int | None:
        """Return the id of the client that a node describes, or None for an unknown node."""
        if self.sites != (info.site is not None):
            return None
        if info.site is None:
            return info.number
        return self._clients_by_site().get((info.site.domains[0], info.number))

    def known_by_node(self) -> dict[str, int]:
        """Return client -> node for sites that share their domain and have no number."""
        known = set(self._clients_by_site().values()) if self.sites else self.nodes.keys()
        return {str(client): node for client, node in self.nodes.items() if client not in known}

    def has_same_data(self, client: int, info: NodeInfo) -> bool:
        """Return whether a node has the same data as the client had at registration."""
        site, federation = info.site, self.federation
        if federation is None:
            return True
        if not self.sites:
            return info.digest == self.digest
        if site is None or not fits(site, federation):
            return False
        try:
            return site_client_info(client, site, federation) == federation.clients[client]
        except (ValueError, IndexError):  # a class that no site had
            return False

    @property
    def clients(self) -> tuple[ClientInfo, ...]:
        """All clients, as the nodes describe them."""
        assert self.federation is not None
        return self.federation.clients

    def _clients_by_site(self) -> dict[tuple[str, int | None], int]:
        """Return (domain, number) -> client for sites that this pair identifies."""
        domains = [client.domain for client in self.clients]
        return {
            (domain, client if self.numbered else None): client
            for client, domain in enumerate(domains)
            if self.numbered or domains.count(domain) == 1
        }


def recorded_sites(run: Path, facts: Mapping[str, Any], key: str = "sites") -> Federation:
    """Return the federation of sites, or of a "table", that ``run.json`` describes.

    Raises ``RunFolderError`` if the description is damaged.
    """
    try:
        text = json.dumps(facts[key]["federation"])
        return _read_federation(text, run, f"{run / 'run.json'}: {key}.federation")
    except ValueError as error:
        raise RunFolderError(str(error)) from error


def register_clients(
    grid: Grid,
    num_clients: int | None,
    timeout: float,
    stop: threading.Event,
    settings: ConfigRecord | None = None,
    sites: int = 0,
) -> ClientRegistry:
    """Ask all nodes which client they are, until all clients are connected.

    Flower starts a ServerApp while nodes are still connecting, and assigns random node ids. A
    client's id is the ``partition-id`` of its node, which is the same in every run. Sites without a
    ``partition-id`` are numbered by domain, and within a domain by node id; a SuperNode with a key
    keeps its node id.

    ``num_clients`` clients share the data set, by default as many as the ``num-partitions`` of the
    nodes. The server waits up to ``timeout`` seconds for clients and for answers, or until ``stop``
    is set, which raises ``RunInterrupted``. If ``settings``, a run config, is given, nodes prepare
    their data and describe them. ``sites`` is the minimum number of sites, and 0 means those that
    are connected.

    Raises ``ConfigError`` if there are too few SuperNodes, clients are missing after ``timeout``,
    two nodes have the same ``partition-id``, or nodes that share a data set have different data,
    and ``DataError`` if the data of the sites cannot be combined.
    """
    discovery = NodeDiscovery(grid, timeout, stop, settings)
    while True:
        fresh, infos = discovery.ask(), discovery.infos
        if any(info.site for info in infos.values()):
            expected, ids = max(1, sites), None
            if not fresh and len(infos) >= expected:
                for node, why in sorted(discovery.problems.items()):
                    logger.warning("The run continues without node %d: %s", node, why)
                return _register_sites(infos)
        else:
            size = _num_partitions(infos, num_clients)
            if registry := _register_shares(infos, size):
                return registry
            expected = size or num_clients or max(1, sites)
            # If no node has answered, the nodes may be sites, which do not need a partition-id.
            ids = None if sites and not infos else range(expected)
        notice = f"{len(infos)} of {expected} are connected."
        # Nobody else comes to a grid of this process, which has all its nodes from the start.
        refused = getattr(grid, "simulated", False) and discovery.problems and not discovery.silent
        if not fresh and (refused or not discovery.wait(notice)):
            raise discovery.missing_clients_error(expected, ids)


def check_num_supernodes(num_partitions: int, num_clients: int) -> None:
    """Raise ``ConfigError`` if there are fewer SuperNodes than clients."""
    if num_partitions < num_clients:
        raise ConfigError(
            f"The federation has {num_partitions} SuperNodes, but the data are divided among "
            f"{num_clients} clients. Start as many SuperNodes as clients:\n  flwr run . "
            f'--federation-config "num-supernodes={num_clients} client-resources-num-cpus=1"'
        )


def _num_partitions(infos: NodeInfos, num_clients: int | None) -> int | None:
    """Return the number of clients that share the data; None until a node has reported it."""
    sizes = {info.size: node for node, info in infos.items() if info.size is not None}
    if len(sizes) > 1:
        (size, node), (other, second) = sorted(sizes.items())[:2]
        raise ConfigError(
            f"The SuperNodes have different numbers of clients: num-partitions is {size} at node "
            f"{node} and {other} at node {second}. Give all of them the same num-partitions."
        )
    for size in sizes:  # at most one
        if num_clients is None:
            return size
        check_num_supernodes(size, num_clients)
    return num_clients


def _register_shares(infos: NodeInfos, num_clients: int | None) -> ClientRegistry | None:
    """Register clients that share a data set; return None if a client is missing."""
    nodes: dict[int, int] = {}
    for node, info in infos.items():
        client = info.number
        assert client is not None  # `NodeDiscovery` refuses a node with neither number nor site
        if client in nodes:
            raise ConfigError(
                f"Nodes {nodes[client]} and {node} both claim to be client {client}. "
                "Give every SuperNode its own partition-id. After a restart, wait a minute for "
                "Flower to remove the old node."
            )
        nodes[client] = node
    if num_clients is None or any(client not in nodes for client in range(num_clients)):
        return None
    nodes = {client: nodes[client] for client in range(num_clients)}
    nodes_with: dict[str, list[int]] = defaultdict(list)
    for node in sorted(nodes.values()):
        nodes_with[infos[node].digest].append(node)
    most, *others = sorted(nodes_with.values(), key=len, reverse=True)
    if others:
        different = sorted(node for nodes in others for node in nodes)
        rest = f"the other {len(most)} nodes" if len(most) > 1 else f"node {most[0]}"
        raise ConfigError(
            f"Node {', '.join(map(str, different))}: the data differ from those of {rest}. These "
            "clients share a data set, so copy the same files to every node's data-dir. Other "
            "versions of packages may also read images differently. (A site with its own data "
            "needs a domain in --node-config.)"
        )
    first = infos[nodes[0]]
    return ClientRegistry(nodes, first.federation, first.digest)


def _register_sites(infos: NodeInfos) -> ClientRegistry:
    sites = {node: info.site for node, info in infos.items() if info.site}
    shares = sorted(infos.keys() - sites.keys())
    if shares:
        raise ConfigError(
            f"Node {shares[0]} has a share of a common data set (partition-id), but other nodes "
            "are sites with their own data (domain). Set a domain in --node-config for all nodes, "
            "or for none."
        )
    numbered = {node: info.number for node, info in infos.items() if info.number is not None}
    if numbered and sorted(numbered.values()) != list(range(len(infos))):
        raise ConfigError(
            f"{len(infos)} sites have the partition-ids {sorted(numbered.values())}: expected each "
            f"number from 0 to {len(infos) - 1} once. Correct them, or remove all partition-ids, "
            "so that the server numbers the sites."
        )
    order = sorted(infos, key=lambda n: (numbered.get(n, 0), sites[n].domains, n))
    merged = merge_sites([sites[n] for n in order])
    return ClientRegistry(dict(enumerate(order)), merged, sites=True, numbered=bool(numbered))


def register_resumed_clients(
    grid: Grid, earlier: ClientRegistry, timeout: float, stop: threading.Event, asked: ConfigRecord
) -> ClientRegistry:
    """Find the current nodes of the sites of a resumed run, given the run config to ask with.

    The server waits ``timeout`` seconds for all sites and then continues with the sites that are
    connected; other sites may reconnect later. Sites that were not part of the run are ignored. The
    ``nodes`` of ``earlier`` are those of clients that are identified only by their node id.

    Raises ``ConfigError`` if no site is connected, a site has different data than before, or sites
    that share a domain have new node ids.
    """
    clients = earlier.clients
    discovery = NodeDiscovery(grid, timeout, stop, asked)
    while True:
        fresh = discovery.ask()
        reconnected, unknown_nodes = _match_known_sites(discovery.infos, earlier)
        missing = [client for client in clients if client.client_id not in reconnected]
        notice = (
            f"not connected: {', '.join(map(_name_of, missing))}. After {timeout:g} s the run "
            "continues without these clients (round-timeout, which can be changed when resuming)."
        )
        if not fresh and not (missing and discovery.wait(notice)):
            break
    unidentified = {client.domain for client in missing if client.client_id in earlier.nodes}
    sites = [discovery.infos[node].site for node in unknown_nodes]
    if any(site and site.domains[0] in unidentified for site in sites):
        raise ConfigError(
            "The run cannot be resumed, because sites that share a domain have new node ids "
            "and cannot be distinguished in any other way. Start their SuperNodes with the "
            "same keys as before, or start a new run."
        )
    if not reconnected:
        raise discovery.missing_clients_error(len(clients), None)
    for node in unknown_nodes:
        logger.warning("Node %d is ignored, because it was not part of the resumed run.", node)
    for node, why in sorted(discovery.problems.items()):
        logger.warning("Node %d is ignored: %s", node, why)
    for client in missing:
        text = "%s has not reconnected; the run continues without it."
        logger.warning(text, _name_of(client))
    absent = {k: FIRST_ABSENT_NODE + k for k in range(len(clients))}
    return replace(earlier, nodes=absent | earlier.nodes | reconnected)


def _match_known_sites(
    infos: NodeInfos, earlier: ClientRegistry
) -> tuple[dict[int, int], list[int]]:
    """Return client -> node for the sites that are connected again, and the unknown nodes."""
    clients = {node: client for client, node in earlier.nodes.items()}
    reconnected: dict[int, int] = {}
    changed: dict[int, int] = {}
    unknown_nodes: list[int] = []
    for node, info in sorted(infos.items()):
        client = clients.get(node, earlier.client_of(info))
        if client is None or client in reconnected or info.site is None:
            unknown_nodes.append(node)
        elif earlier.has_same_data(client, info):
            reconnected[client] = node
        else:
            changed[node] = client
    for node, client in changed.items():
        if client not in reconnected:
            name = _name_of(earlier.clients[client])
            raise ConfigError(
                f"{name} has different data than when the run began (node {node}). Restore its "
                "data, or start a new run."
            )
    return reconnected, sorted([*unknown_nodes, *changed])


class NodeTracker:
    """Finds clients whose SuperNodes were restarted and have new node ids.

    A node with a client's ``partition-id``, or a site with the client's domain and data, replaces
    the client's old node only if the latter is no longer connected. Sites that share a domain need
    a ``partition-id``, or SuperNodes with keys, which keep their node ids. If a client is missing,
    unknown nodes are asked once. An answer that takes longer than ``timeout``, or longer than a
    minute, is used in the next round.
    """

    def __init__(
        self,
        grid: Grid,
        registry: ClientRegistry,
        timeout: float,
        stop: threading.Event,
        settings: ConfigRecord | None = None,
    ) -> None:
        self.registry = registry
        described = settings if registry.federation else None
        self._discovery = NodeDiscovery(grid, min(timeout, 60), stop, described)
        self._left_out: dict[int, str] = {}

    def locate(self, nodes: Mapping[int, int]) -> dict[int, int]:
        """Return the current client -> node, given client -> node in the last round."""
        located, online = dict(nodes), self._discovery.online()
        self._left_out = {node: why for node, why in self._left_out.items() if node in online}
        gone = {client for client, node in nodes.items() if node not in online}
        if not gone:
            return located
        self._discovery.ask(known=located.values())
        for node, why in sorted(self._discovery.problems.items()):
            self._leave_out(node, why)
        for node, info in sorted(self._discovery.infos.items()):
            client = self.registry.client_of(info)
            if client is None or client not in gone or node in nodes.values():
                continue
            if not self.registry.has_same_data(client, info):
                name = _name_of(self.registry.clients[client])
                self._leave_out(node, f"{name} had different data when the run began")
                continue
            gone.remove(client)
            located[client] = node
            logger.info("Client %s has reconnected as node %d.", client, node)
        return located

    def _leave_out(self, node: int, why: str) -> None:
        if self._left_out.get(node) != why:
            logger.warning("Node %d is ignored: %s", node, why)
            self._left_out[node] = why


def _name_of(client: ClientInfo) -> str:
    return f"Client {client.client_id} ({client.domain})"
