"""Registration: assigning clients to nodes, before the first round and after restarts.

Node ids change when a run is resumed or a SuperNode without a key is restarted. Client ids never
change.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fairflower.data import Federation
from fairflower.data.federation import ClientInfo
from fairflower.data.sites import fits, merge_sites, site_client_info
from fairflower.errors import ConfigError, RunFolderError, logger
from fairflower.server.discovery import NodeDiscovery, NodeInfo, NodeInfos, read_federation


@dataclass(frozen=True)
class ClientRegistry:
    """Nodes of clients that share a data set, each with a ``partition-id``."""

    nodes: dict[int, int]  # client id (0 ... clients - 1) -> node id
    federation: Federation | None  # as the nodes describe it; None if they were not asked

    def client_of(self, info: NodeInfo) -> int | None:
        """Return the id of the client that a node describes, or None for an unknown node."""
        return None if info.site else info.number

    def known_by_node(self) -> dict[str, int]:
        """Return client -> node for clients that are identified only by their node id."""
        return {}

    def has_same_data(self, client: int, info: NodeInfo) -> bool:
        """Return whether a node has the same data as the client had at registration."""
        if self.federation is None or info.federation is None:
            return self.federation is None
        return _without_paths(info.federation) == _without_paths(self.federation)


@dataclass(frozen=True)
class SiteRegistry(ClientRegistry):
    """Nodes of sites with their own data, identified by domain and ``partition-id``."""

    federation: Federation
    numbered: bool  # whether the sites have a partition-id

    def client_of(self, info: NodeInfo) -> int | None:
        """Return the id of the client that a node describes, or None for an unknown node."""
        if info.site is None:
            return None
        return self._clients_by_site().get((info.site.domains[0], info.number))

    def known_by_node(self) -> dict[str, int]:
        """Return client -> node for clients that share their domain and have no number."""
        known = set(self._clients_by_site().values())
        return {str(client): node for client, node in self.nodes.items() if client not in known}

    def has_same_data(self, client: int, info: NodeInfo) -> bool:
        """Return whether a node has the same data as the client had at registration."""
        site, federation = info.site, self.federation
        if site is None or not fits(site, federation):
            return False
        try:
            return site_client_info(client, site, federation) == federation.clients[client]
        except (ValueError, IndexError):  # a class that no site had
            return False

    def _clients_by_site(self) -> dict[tuple[str, int | None], int]:
        """Return (domain, number) -> client for sites that this pair identifies."""
        domains = [client.domain for client in self.federation.clients]
        return {
            (domain, client if self.numbered else None): client
            for client, domain in enumerate(domains)
            if self.numbered or domains.count(domain) == 1
        }


def recorded_sites(run: Path, facts: Mapping[str, Any]) -> Federation:
    """Return the federation of sites that ``run.json`` describes.

    Raises ``RunFolderError`` if the description is damaged.
    """
    try:
        return read_federation(json.dumps(facts["sites"]["federation"]), run)
    except (KeyError, ValueError) as error:
        raise RunFolderError(f"{run / 'run.json'}: sites.federation {error}") from error


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

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    num_clients : int or None
        Number of clients that share the data set. None means the ``num-partitions`` of the nodes.
    timeout : float
        Seconds to wait for clients and for answers.
    stop : threading.Event
        Event that ends the wait with ``RunInterrupted``.
    settings : ConfigRecord, optional
        Run config. If it is given, nodes prepare their data and describe them.
    sites : int, default=0
        Minimum number of sites. 0 means the sites that are connected.

    Raises
    ------
    ConfigError
        If there are too few SuperNodes, clients are missing after ``timeout``, two nodes have the
        same ``partition-id``, or nodes that share a data set have different data.
    DataError
        If the data of the sites cannot be combined.
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
        if not fresh and not discovery.wait(notice):
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
    return ClientRegistry(nodes, _common_data({node: infos[node] for node in nodes.values()}))


def _without_paths(federation: Federation) -> Federation:
    """Return the federation without its files' paths, which may differ between machines."""
    return replace(federation, sources=())


def _common_data(infos: NodeInfos) -> Federation | None:
    """Return the data set that all nodes share; None if nodes were not asked to describe it."""
    nodes_with: dict[Federation, list[int]] = defaultdict(list)
    for node, info in sorted(infos.items()):
        if info.federation is not None:
            nodes_with[_without_paths(info.federation)].append(node)
    if not nodes_with:
        return None
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
    return infos[most[0]].federation


def _register_sites(infos: NodeInfos) -> SiteRegistry:
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
    return SiteRegistry(
        dict(enumerate(order)), merge_sites([sites[n] for n in order]), bool(numbered)
    )


#: Smallest id of the invented nodes of clients that are not connected. Flower reserves 1 for the
#: SuperLink; its other ids are random 64-bit numbers.
FIRST_ABSENT_NODE = 2


def register_resumed_clients(
    grid: Grid, earlier: SiteRegistry, timeout: float, stop: threading.Event, settings: ConfigRecord
) -> SiteRegistry:
    """Find the current nodes of the sites of a resumed run.

    The server waits ``timeout`` seconds for all sites and then continues with the sites that are
    connected; other sites may reconnect later. Sites that were not part of the run are ignored.

    Parameters
    ----------
    grid, timeout, stop, settings
        See `register_clients`.
    earlier : SiteRegistry
        The sites of the run. Its ``nodes`` are the nodes of clients that are identified only
        by their node id.

    Raises
    ------
    ConfigError
        If no site is connected, a site has different data than before, or sites that share a domain
        have new node ids.
    """
    clients = earlier.federation.clients
    discovery = NodeDiscovery(grid, timeout, stop, settings)
    reconnected, unknown_nodes = _await_known_sites(discovery, earlier, timeout)
    missing = {clients[client].domain for client in earlier.nodes if client not in reconnected}
    _check_unknown_nodes({node: discovery.infos[node] for node in unknown_nodes}, missing)
    if not reconnected:
        raise discovery.missing_clients_error(len(clients), None)
    for node in unknown_nodes:
        logger.warning("Node %d is ignored, because it was not part of the resumed run.", node)
    for node, why in sorted(discovery.problems.items()):
        logger.warning("Node %d is ignored: %s", node, why)
    nodes = {}
    for client in clients:
        k = client.client_id
        if k not in reconnected:
            logger.warning(
                "Client %d (%s) has not reconnected; the run continues without it.",
                k,
                client.domain,
            )
        nodes[k] = reconnected.get(k, earlier.nodes.get(k, FIRST_ABSENT_NODE + k))
    return replace(earlier, nodes=nodes)


def _await_known_sites(
    discovery: NodeDiscovery, earlier: SiteRegistry, timeout: float
) -> tuple[dict[int, int], list[int]]:
    """Ask nodes until all sites are connected again, or for ``timeout`` seconds.

    Returns what `_match_known_sites` returns.
    """
    while True:
        fresh = discovery.ask()
        reconnected, unknown_nodes = _match_known_sites(discovery.infos, earlier)
        missing = ", ".join(
            _name_of(client)
            for client in earlier.federation.clients
            if client.client_id not in reconnected
        )
        notice = (
            f"not connected: {missing}. After {timeout:g} s the run continues without "
            "these clients (round-timeout, which can be changed when resuming)."
        )
        if not fresh and not (missing and discovery.wait(notice)):
            return reconnected, unknown_nodes


def _match_known_sites(infos: NodeInfos, earlier: SiteRegistry) -> tuple[dict[int, int], list[int]]:
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
            raise ConfigError(
                f"{_name_of(earlier.federation.clients[client])} has different data than when the "
                f"run began (node {node}). Restore its data, or start a new run."
            )
    return reconnected, sorted([*unknown_nodes, *changed])


def _check_unknown_nodes(infos: NodeInfos, domains: Collection[str]) -> None:
    """Raise ``ConfigError`` if an unknown node has one of ``domains``, so that it may be a client.

    ``domains`` are those of missing clients that only their node ids identify.
    """
    for info in infos.values():
        if info.site is not None and info.site.domains[0] in domains:
            raise ConfigError(
                "The run cannot be resumed, because sites that share a domain have new node ids "
                "and cannot be distinguished in any other way. Start their SuperNodes with the "
                "same keys as before, or start a new run."
            )


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
                assert self.registry.federation is not None
                name = _name_of(self.registry.federation.clients[client])
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
