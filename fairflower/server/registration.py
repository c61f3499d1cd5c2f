"""The nodes of a run: finding out which node is which client.

Node ids change when a run is resumed or a SuperNode without a key is restarted. Client ids never
change.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fairflower.config.site import WITHDRAWN
from fairflower.data import Federation
from fairflower.data.sites import fits, joined, site_client_info
from fairflower.errors import ConfigError, RunFolderError, logger, quoted
from fairflower.flower_compat import SiteKey
from fairflower.secure.sums import sum_integers
from fairflower.server.discovery import NodeDiscovery, NodeInfo, NodeInfos, read_federation
from fairflower.tables.columns import Column
from fairflower.tables.encoding import Sums
from fairflower.tables.integers import BITS, number_of, sums_of
from fairflower.tables.sites import merge_sites

#: Smallest id of the invented nodes of clients that are not connected. Flower reserves 1 for the
#: SuperLink; its other ids are random 64-bit numbers.
FIRST_ABSENT_NODE = 2


@dataclass
class ClientRegistry:
    """Which node is which client, now: nodes come back under other ids, and sites join or withdraw.

    Clients share a data set, each with a ``partition-id``, or they are sites with their own data,
    identified by domain and ``partition-id``.
    """

    nodes: dict[int, int]  # client id (0 ... clients - 1) -> node id
    known: Federation | None  # as the nodes describe it; None if they were not asked
    digest: str = ""  # of the shared data set
    sites: bool = False
    numbered: bool = True  # whether sites have a partition-id
    keys: dict[int, SiteKey] = field(default_factory=dict)  # client id -> name and key
    infos: dict[int, NodeInfo] = field(default_factory=dict)  # client id -> what its node said
    withdrawn: frozenset[int] = frozenset()  # clients whose sites are asked no more

    @property
    def federation(self) -> Federation:
        """The clients and their data."""
        assert self.known is not None
        return self.known

    @property
    def names(self) -> dict[int, str]:
        """Names of clients in messages: their sites', or the number and the domain of a site."""
        clients = self.federation.clients if self.sites else ()
        domains = {k.client_id: f"client {k.client_id} ({k.domain})" for k in clients}
        return domains | {client: key.name for client, key in self.keys.items()}

    def name_of(self, client: int) -> str:
        """Return the name of a client for the beginning of a sentence."""
        of = f" ({self.known.clients[client].domain})" if self.known else ""
        return re.sub("^client ", "Client ", self.names.get(client, f"client {client}{of}"))

    def about(self, client: int) -> str:
        """Describe a site for the log: domain, training examples and version of fairflower."""
        known, info = self.federation.clients[client], self.infos.get(client)
        tests = ", only tests" * (client in self.tests_only())
        version = f"fairflower {info.version}" if info and info.version else "version unknown"
        examples = f"{known.num_examples} training examples"
        return f"domain {known.domain}, {examples}, {version}{tests}"

    def tests_only(self) -> frozenset[int]:
        """Return the clients that do not train."""
        return frozenset(client for client, info in self.infos.items() if info.tests_only)

    @property
    def training(self) -> int:
        """Number of clients that train."""
        return len(self.nodes.keys() - self.tests_only() - self.withdrawn)

    def another_key(self, info: NodeInfo) -> str:
        """Return an error if a node has the name of a site, but another key; else ""."""
        for client, key in self.keys.items():
            if info.key and info.key.name == key.name and info.key != key:
                return (
                    f"{key.name} has another key than when the run began: {info.key.fingerprint}, "
                    f"and not {key.fingerprint} (client {client}). Start its SuperNode with the "
                    "key from before, or start a new run."
                )
        return ""

    def client_of(self, info: NodeInfo) -> int | None:
        """Return the id of the client that a node describes, or None for an unknown node."""
        if self.keys and info.key:
            return next((k for k, key in self.keys.items() if key == info.key), None)
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
        if not self.sites:
            return info.digest == self.digest
        site, federation = info.site, self.federation
        if site is None or not fits(site, federation):
            return False
        try:
            return site_client_info(client, site, federation) == federation.clients[client]
        except (LookupError, ValueError):  # a class that no site had
            return False

    def recognize(
        self, infos: NodeInfos, gone: Collection[int]
    ) -> tuple[dict[int, int], dict[int, str]]:
        """Return client -> node for those in ``gone`` that are back, and node -> why not others."""
        clients = {node: client for client, node in self.nodes.items()}
        back: dict[int, int] = {}
        changed: dict[int, int] = {}
        problems: dict[int, str] = {}
        for node, info in sorted(infos.items()):
            client = clients.get(node, self.client_of(info))
            if why := self.another_key(info):
                problems[node] = why
            elif client is None or client not in gone or client in back:
                continue
            elif self.has_same_data(client, info):
                back[client] = node
            elif self.sites == (info.site is not None) or self.client_of(info) in self.keys:
                changed[node] = client
        for node, client in changed.items():
            if client not in back:
                problems[node] = (
                    f"{self.name_of(client)} has different data than when the run began (node "
                    f"{node}). Restore its data, or start a new run."
                )
        return back, problems

    def add_site(self, node: int, info: NodeInfo) -> int:
        """Add a site as the last client; raise ``DataError`` if its data do not fit."""
        assert info.site
        client = len(self.federation.clients)
        self.known = joined(self.federation, info.site)
        self.nodes[client], self.infos[client] = node, info
        if info.key:
            self.keys[client] = info.key
        return client

    def _clients_by_site(self) -> dict[tuple[str, int | None], int]:
        """Return (domain, number) -> client for sites that this pair identifies."""
        domains = [client.domain for client in self.federation.clients]
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
        return read_federation(text, run, f"{run / 'run.json'}: {key}.federation")
    except ValueError as error:
        raise RunFolderError(str(error)) from error


def recorded(run: Path, facts: Mapping[str, Any]) -> ClientRegistry:
    """Return the registry of sites that ``run.json`` describes; see `recorded_sites`."""
    nodes = {int(client): node for client, node in facts["nodes"].items()}
    federation, known = recorded_sites(run, facts), facts["sites"]
    keys = {int(client): SiteKey(**key) for client, key in known.get("keys", {}).items()}
    gone = frozenset(map(int, facts.get("withdrawn", ())))
    return ClientRegistry(nodes, federation, "", True, known["numbered"], keys, withdrawn=gone)


def register_clients(
    discovery: NodeDiscovery, num_clients: int | None = None, sites: int = 0, fewest: int = 1
) -> ClientRegistry:
    """Ask all nodes which client they are, until all clients are connected.

    Flower starts a ServerApp while nodes are still connecting, and assigns random node ids. A
    client's id is the ``partition-id`` of its node, which is the same in every run. Sites without a
    ``partition-id`` are numbered by domain, and within a domain by node id; a SuperNode with a key
    keeps its node id.

    ``num_clients`` clients share the data set, by default as many as the ``num-partitions`` of the
    nodes. ``sites`` is the minimum number of sites whose names are not given, and 0 means those
    that are connected. There are at least ``fewest`` sites.

    Raises ``ConfigError`` if there are too few SuperNodes, clients are missing after the timeout,
    two nodes have the same ``partition-id`` or name, or nodes that share a data set have different
    data, and ``DataError`` if the data of the sites cannot be combined.
    """
    only = discovery.only
    least = max(fewest, sites, len(only))
    while True:
        fresh, infos = discovery.ask(), discovery.infos
        _check_names(infos)
        if any(info.site for info in infos.values()):
            expected, ids = least, None
            if not fresh and len(infos) >= expected:
                for node, why in sorted(discovery.problems.items()):
                    name = discovery.name_of(node).replace("Node ", "node ")
                    logger.warning("The run continues without %s: %s", name, why)
                return _register_sites(discovery)
        else:
            size = _num_partitions(infos, num_clients)
            if registry := _register_shares(infos, size):
                return registry
            expected = size or num_clients or least
            # If no node has answered, the nodes may be sites, which do not need a partition-id.
            ids = None if (sites or only) and not infos else range(expected)
        gone = [discovery.name_of(n) for n, why in discovery.problems.items() if why == WITHDRAWN]
        if only and gone:
            raise ConfigError(
                f"sites = {quoted(','.join(only))}: withdrawn: {', '.join(gone)}. Start the run "
                "without, or once the site has set withdraw = false."
            )
        notice = f"{len(infos)} of {expected} are connected."
        notice += f" Missing: {', '.join(discovery.missing_sites())}." if only else ""
        if not fresh and not discovery.wait(notice):
            lonely = len(infos) == 1 < fewest and any(info.site for info in infos.values())
            alone = " A site trains alone only with min-clients = 1." if lonely else ""
            raise discovery.missing_error(expected, ids, alone)


def _check_names(infos: NodeInfos) -> None:
    nodes: dict[str, int] = {}
    for node, info in infos.items():
        if info.key and (other := nodes.setdefault(info.key.name, node)) != node:
            raise ConfigError(
                f"Two sites are registered as {info.key.name!r}: nodes {other} and {node}. "
                "Unregister the wrong one (`flwr supernode unregister ID`), and register its key "
                "with another --name."
            )


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
    first, said = infos[nodes[0]], {client: infos[node] for client, node in nodes.items()}
    keys = {client: info.key for client, info in said.items() if info.key}
    return ClientRegistry(nodes, first.federation, first.digest, keys=keys, infos=said)


def _register_sites(discovery: NodeDiscovery) -> ClientRegistry:
    infos = discovery.infos
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
    said = {k: infos[n] for k, n in enumerate(order)}
    trains = {n: infos[n].title for n in order if not infos[n].tests_only}
    config = discovery.content.config_records["config"]

    def masked(columns: Sequence[Column]) -> Sums:
        count = number_of(columns)
        return sums_of(columns, sum_integers(discovery.send, config, trains, count, BITS))

    merged = merge_sites([sites[n] for n in order], masked)
    keys = {client: info.key for client, info in said.items() if info.key}
    nodes, by_number = dict(enumerate(order)), bool(numbered)
    return ClientRegistry(nodes, merged, "", True, by_number, keys, said)


def register_resumed_clients(discovery: NodeDiscovery, earlier: ClientRegistry) -> ClientRegistry:
    """Find the current nodes of the sites of a resumed run.

    The server waits until the timeout for all sites and then continues with the sites that are
    connected; other sites may reconnect later. Sites that were not part of the run are ignored. The
    ``nodes`` of ``earlier`` are those of clients that are identified only by their node id.

    Raises ``ConfigError`` if no site is connected, a site has different data or another key than
    before, or sites that share a domain have new node ids.
    """
    clients = range(len(earlier.federation.clients))
    wanted = set(clients) - earlier.withdrawn
    discovery.without = {earlier.names[client] for client in earlier.withdrawn}
    while True:
        fresh = discovery.ask()
        back, problems = earlier.recognize(discovery.infos, wanted)
        for why in problems.values():
            raise ConfigError(why)
        missing = sorted(wanted - back.keys())
        notice = (
            f"not connected: {', '.join(map(earlier.name_of, missing))}. After "
            f"{discovery.timeout:g} s the run continues without these clients (round-timeout, "
            "which can be changed when resuming)."
        )
        if not fresh and not (missing and discovery.wait(notice)):
            break
    domains = [client.domain for client in earlier.federation.clients]
    unidentified = {domains[client] for client in missing if client in earlier.nodes}
    unknown_nodes = sorted(
        node
        for node, info in discovery.infos.items()
        if node not in back.values() and earlier.client_of(info) not in earlier.withdrawn
    )
    sites = [discovery.infos[node].site for node in unknown_nodes]
    if any(site and site.domains[0] in unidentified for site in sites):
        raise ConfigError(
            "The run cannot be resumed, because sites that share a domain have new node ids "
            "and cannot be distinguished in any other way. Start their SuperNodes with the "
            "same keys as before, or start a new run."
        )
    if not back:
        raise discovery.missing_error(len(wanted))
    for node in () if discovery.only else unknown_nodes:  # a site on the list may still join
        name = discovery.name_of(node)
        logger.warning("%s is ignored, because it was not part of the resumed run.", name)
    for node, why in sorted(discovery.problems.items()):
        logger.warning("%s is ignored: %s", discovery.name_of(node), why)
    for client in missing:
        text = "%s has not reconnected; the run continues without it."
        logger.warning(text, earlier.name_of(client))
    absent = {client: FIRST_ABSENT_NODE + client for client in clients}
    said = {client: discovery.infos[node] for client, node in back.items()}
    return replace(earlier, nodes=absent | earlier.nodes | back, infos=said)


class NodeTracker:
    """Finds clients whose SuperNodes were restarted and have new node ids.

    A node replaces that of a client (`ClientRegistry.recognize`) only if the latter is no longer
    connected. Sites that share a domain need a ``partition-id``, or SuperNodes with keys, which
    keep their node ids. If a client is missing, unknown nodes are asked once. A late answer is used
    in the next round.
    """

    def __init__(self, discovery: NodeDiscovery, registry: ClientRegistry) -> None:
        self._discovery, self.registry = discovery, registry
        self._left_out: dict[int, str] = {}

    def locate(self) -> bool:
        """Put the current nodes into the registry; return whether there are others than before."""
        registry, online = self.registry, self._discovery.online()
        self._left_out = {node: why for node, why in self._left_out.items() if node in online}
        gone = {client for client, node in registry.nodes.items() if node not in online}
        gone -= registry.withdrawn
        back, problems = registry.recognize(self._described(), gone) if gone else ({}, {})
        for node, why in problems.items():
            self.leave_out(node, why)
        for client, node in back.items():
            logger.info("%s has reconnected as node %d.", registry.name_of(client), node)
        registry.nodes |= back
        return bool(back)

    def newcomers(self, late: Collection[str]) -> dict[int, NodeInfo]:
        """Return node -> description of connected sites in ``late`` that are no clients yet."""
        waited = {*late} - {key.name for key in self.registry.keys.values()}
        infos = sorted(self._described().items()) if waited else ()
        return {node: i for node, i in infos if i.site and i.key and i.key.name in waited}

    def _described(self) -> NodeInfos:
        """Ask new nodes; return those that can take part, and log why others cannot."""
        self._discovery.ask(self.registry.nodes.values())
        for node, why in sorted(self._discovery.problems.items()):
            self.leave_out(node, why)
        return self._discovery.infos

    def leave_out(self, node: int, why: str) -> None:
        """Log why a node does not take part, once."""
        if self._left_out.get(node) != why:
            logger.warning("%s is ignored: %s", self._discovery.name_of(node), why)
            self._left_out[node] = why
