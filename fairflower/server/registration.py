"""Registration: which client is at which node, before the first round and after a restart.

Node ids change when a run is resumed or a SuperNode without a key is restarted; client ids do not.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fairflower.data import Federation
from fairflower.data.federation import ClientInfo
from fairflower.data.sites import fits, merge_sites, site_client_info
from fairflower.errors import ConfigError, logger
from fairflower.server.discovery import NodeDiscovery, NodeInfo, NodeInfos


@dataclass(frozen=True)
class ClientRegistry:
    """Nodes of clients that divide a data set, each with a ``partition-id``."""

    nodes: dict[int, int]  # client id (0 ... clients - 1) -> node id
    federation: Federation | None  # as the nodes describe it; None if they were not asked

    def client_of(self, info: NodeInfo) -> int | None:
        """Return the id of the client that a node says it is; None for a stranger."""
        return None if info.site else info.number

    def known_by_node(self) -> dict[str, int]:
        """Return client -> node for clients that only their node id identifies."""
        return {}

    def has_same_data(self, client: int, info: NodeInfo) -> bool:
        """Return whether a node has the data that the client had at registration."""
        return True


@dataclass(frozen=True)
class SiteRegistry(ClientRegistry):
    """Nodes of sites, each with other data, known by domain and ``partition-id``."""

    federation: Federation
    numbered: bool  # whether the sites have a partition-id

    def client_of(self, info: NodeInfo) -> int | None:
        """Return the id of the client that a node says it is; None for a stranger."""
        if info.site is None:
            return None
        return self._clients_by_site().get((info.site.domains[0], info.number))

    def known_by_node(self) -> dict[str, int]:
        """Return client -> node for clients that share their domain and have no number."""
        known = set(self._clients_by_site().values())
        return {str(client): node for client, node in self.nodes.items() if client not in known}

    def has_same_data(self, client: int, info: NodeInfo) -> bool:
        """Return whether a node has the data that the client had at registration."""
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


def register_clients(
    grid: Grid,
    num_clients: int | None,
    timeout: float,
    stop: threading.Event,
    settings: ConfigRecord | None = None,
    sites: int = 0,
) -> ClientRegistry:
    """Ask every node which client it is, until all clients are connected.

    Flower starts a ServerApp while nodes are still connecting, and gives them random ids. A
    client's id is its node's ``partition-id``, the same in every run. Sites without a
    ``partition-id`` are numbered by domain, then by node id, which a SuperNode with a key keeps.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    num_clients : int or None
        Clients that divide the data set. None takes the nodes' ``num-partitions``.
    timeout : float
        Seconds to wait for clients, and for an answer.
    stop : threading.Event
        Ends the wait with ``RunInterrupted``.
    settings : ConfigRecord, optional
        Run config. With it nodes prepare their data and describe them.
    sites : int, default=0
        Fewest sites to begin with. 0 takes the sites that are connected.

    Raises
    ------
    ConfigError
        If there are too few SuperNodes, clients are missing after ``timeout``, two nodes claim
        a ``partition-id``, or nodes that divide a data set have different data.
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
                    logger.warning("The run goes on without node %d: %s", node, why)
                return _register_sites(infos)
        else:
            size = _num_partitions(infos, num_clients)
            if registry := _register_shares(infos, size):
                return registry
            expected = size or num_clients or max(1, sites)
            # Without any answer the nodes may be sites, which need no partition-id.
            ids = None if sites and not infos else range(expected)
        notice = f"{len(infos)} are connected, {expected} expected."
        if not fresh and not discovery.wait(notice):
            raise discovery.missing(expected, ids)


def check_num_supernodes(num_partitions: int, num_clients: int) -> None:
    """Raise ``ConfigError`` if there are fewer SuperNodes than clients."""
    if num_partitions < num_clients:
        raise ConfigError(
            f"The federation has {num_partitions} SuperNodes, but the data are divided among "
            f"{num_clients} clients. Start as many SuperNodes as clients:\n"
            f'  flwr run . --federation-config "num-supernodes={num_clients} '
            f'client-resources-num-cpus=1"'
        )


def _num_partitions(infos: NodeInfos, num_clients: int | None) -> int | None:
    """Return the number of clients that divide the data; None until a node has reported it."""
    for info in infos.values():
        if info.size is not None and num_clients is not None:
            check_num_supernodes(info.size, num_clients)
        num_clients = info.size if num_clients is None else num_clients
    return num_clients


def _register_shares(infos: NodeInfos, num_clients: int | None) -> ClientRegistry | None:
    """Register clients that divide a data set; None if a client is missing."""
    nodes: dict[int, int] = {}
    for node, info in infos.items():
        client = info.number
        assert client is not None  # `NodeDiscovery` refuses a node with neither number nor site
        if client in nodes:
            raise ConfigError(
                f"Nodes {nodes[client]} and {node} both say that they are client {client}. "
                "Give every SuperNode its own partition-id. After a restart, wait a minute until "
                "Flower has removed the old node."
            )
        nodes[client] = node
    if num_clients is None or any(client not in nodes for client in range(num_clients)):
        return None
    nodes = {client: nodes[client] for client in range(num_clients)}
    return ClientRegistry(nodes, _common_data({node: infos[node] for node in nodes.values()}))


def _common_data(infos: NodeInfos) -> Federation | None:
    """Return the data set that all nodes divide; None if they were not asked for it."""
    nodes_with: dict[Federation, list[int]] = defaultdict(list)
    for node, info in sorted(infos.items()):
        if info.federation is not None:
            # The path of the files may differ between machines.
            nodes_with[replace(info.federation, sources=())].append(node)
    most, *others = sorted(nodes_with.values(), key=len, reverse=True) or [[]]
    if others:
        different = sorted(node for nodes in others for node in nodes)
        rest = f"the other {len(most)}" if len(most) > 1 else f"node {most[0]}"
        raise ConfigError(
            f"Node {', '.join(map(str, different))}: other data than {rest}. These clients divide "
            "one data set: copy the same files to every node's data-dir. (A site with its own "
            "data has a domain in --node-config.)"
        )
    return infos[most[0]].federation if most else None


def _register_sites(infos: NodeInfos) -> SiteRegistry:
    sites = {node: info.site for node, info in infos.items() if info.site}
    shares = sorted(infos.keys() - sites.keys())
    if shares:
        raise ConfigError(
            f"Node {shares[0]} has a share of a common data set (partition-id), other nodes are "
            "sites (domain). Give all nodes a domain in --node-config, or none."
        )
    numbered = {node: info.number for node, info in infos.items() if info.number is not None}
    if numbered and sorted(numbered.values()) != list(range(len(infos))):
        raise ConfigError(
            f"{len(infos)} sites have the partition-ids {sorted(numbered.values())}: expected 0 "
            f"to {len(infos) - 1}, each once. Or remove all partition-ids: the server then "
            "numbers the sites."
        )
    order = sorted(infos, key=lambda n: (numbered.get(n, 0), sites[n].domains, n))
    return SiteRegistry(
        dict(enumerate(order)), merge_sites([sites[n] for n in order]), bool(numbered)
    )


#: First id of a node that does not exist: Flower's ids are random numbers of 64 bits.
FIRST_ABSENT_NODE = 2


def register_resumed_clients(
    grid: Grid, earlier: SiteRegistry, timeout: float, stop: threading.Event, settings: ConfigRecord
) -> SiteRegistry:
    """Find the sites of a resumed run at the nodes where they are now.

    The server waits ``timeout`` seconds for all sites, then goes on with those that are back;
    others may come back later. Sites that were not in the run are left out.

    Parameters
    ----------
    earlier : SiteRegistry
        The run's sites; its ``nodes`` are of those clients that only their node id identifies.

    Raises
    ------
    ConfigError
        If no site came back, a site has other data than before, or sites that share a domain
        came back under other node ids.
    """
    clients = earlier.federation.clients
    discovery = NodeDiscovery(grid, timeout, stop, settings)
    while True:
        fresh = discovery.ask()
        back, strangers = _match_known_sites(discovery.infos, earlier)
        away = ", ".join(_name_of(client) for client in clients if client.client_id not in back)
        notice = (
            f"{away} not back yet. After {timeout:g} s the run goes on without them "
            "(round-timeout, which can be changed when resuming)."
        )
        if not fresh and not (away and discovery.wait(notice)):
            break
    # A stranger with the domain of a lost client may be that client.
    lost = {clients[client].domain for client in earlier.nodes if client not in back}
    for node in strangers:
        site = discovery.infos[node].site
        if site is not None and site.domains[0] in lost:
            raise ConfigError(
                "The run cannot be resumed: sites that share a domain came back as other nodes, "
                "and nothing else tells which is which. Start their SuperNodes with the same "
                "keys as before, or start a new run."
            )
    if not back:
        raise discovery.missing(len(clients), None)
    for node in strangers:
        logger.warning("Node %d is left out: it had no part in the resumed run.", node)
    for node, why in sorted(discovery.problems.items()):
        logger.warning("Node %d is left out: %s", node, why)
    nodes = {}
    for client in clients:
        k = client.client_id
        if k not in back:
            logger.warning("Client %d (%s) is not back; the run goes on.", k, client.domain)
        nodes[k] = back.get(k, earlier.nodes.get(k, FIRST_ABSENT_NODE + k))
    return replace(earlier, nodes=nodes)


class NodeTracker:
    """Finds clients whose SuperNodes were restarted under other ids.

    A node with the ``partition-id`` of a client, or a site with its domain and data, takes the
    client's place only if the client's node is gone. Sites that share a domain need a
    ``partition-id`` for that, or SuperNodes with keys, which keep their ids. Unknown nodes are
    asked once, when a client is away; an answer that takes longer than ``timeout`` or a minute
    counts in the next round.
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
        site_settings = settings if isinstance(registry, SiteRegistry) else None
        self._discovery = NodeDiscovery(grid, min(timeout, 60), stop, site_settings)
        self._left_out: dict[int, str] = {}

    def locate(self, nodes: Mapping[int, int]) -> dict[int, int]:
        """Return client -> node now, from client -> node in the last round."""
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
                self._leave_out(node, f"{name} had other data when the run began")
                continue
            gone.remove(client)
            located[client] = node
            logger.info("Client %s is back as node %d.", client, node)
        return located

    def _leave_out(self, node: int, why: str) -> None:
        if self._left_out.get(node) != why:
            logger.warning("Node %d is left out: %s", node, why)
            self._left_out[node] = why


def _match_known_sites(infos: NodeInfos, earlier: SiteRegistry) -> tuple[dict[int, int], list[int]]:
    """Return client -> node of the sites that are back, and the nodes of strangers."""
    clients = {node: client for client, node in earlier.nodes.items()}
    back: dict[int, int] = {}
    changed: dict[int, int] = {}
    strangers = []
    for node, info in sorted(infos.items()):
        client = clients.get(node, earlier.client_of(info))
        if client is None or client in back or info.site is None:
            strangers.append(node)
        elif earlier.has_same_data(client, info):
            back[client] = node
        else:
            changed[node] = client
    for node, client in changed.items():
        if client not in back:
            raise ConfigError(
                f"{_name_of(earlier.federation.clients[client])} has other data than when the run "
                f"began (node {node}). Restore its data, or start a new run."
            )
    return back, sorted([*strangers, *changed])


def _name_of(client: ClientInfo) -> str:
    return f"Client {client.client_id} ({client.domain})"
