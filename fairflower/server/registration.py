"""The roll: which client is at which node, before the first round and when one comes back.

A run that is resumed, and a SuperNode that is restarted, have their clients under other node ids.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fairflower.data import Federation
from fairflower.data.federation import ClientInfo
from fairflower.data.sites import fits, merge_sites, site_client_info
from fairflower.errors import ConfigError, logger
from fairflower.server.discovery import NodeDiscovery, NodeInfo, NodeInfos


class ClientRegistry(NamedTuple):
    """The clients that are there, and where."""

    nodes: dict[int, int]  # by client id, 0 ... clients - 1
    federation: Federation | None  # by the clients' own account; None if they were not asked
    sites: bool  # each has data of its own, rather than a share of what all have
    numbered: bool = True  # each gave its number (partition-id) itself

    def clients_by_site(self) -> dict[tuple[str, int | None], int]:
        """Sites that their domain and, if they have one, their number tell from the others."""
        assert self.federation is not None
        domains = [client.domain for client in self.federation.clients]
        return {
            (domain, client if self.numbered else None): client
            for client, domain in enumerate(domains)
            if self.numbered or domains.count(domain) == 1
        }

    def known_by_node(self) -> dict[str, int]:
        """Client and node of those sites that nothing but the node id tells apart."""
        known = set(self.clients_by_site().values() if self.sites else self.nodes)
        return {str(client): node for client, node in self.nodes.items() if client not in known}

    def client_of(self, answer: NodeInfo) -> int | None:
        """The client that a node is by its own account; None if that is nobody."""
        if self.sites != bool(answer.site):
            return None
        if not answer.site:
            return answer.number
        return self.clients_by_site().get((answer.site.domains[0], answer.number))


def register_clients(
    grid: Grid,
    num_clients: int | None,
    timeout: float,
    stop: threading.Event,
    settings: ConfigRecord | None = None,
    sites: int = 0,
) -> ClientRegistry:
    """Ask every node which client it is, until all clients are there.

    Flower starts a ServerApp while nodes are still being registered, and gives them random
    ids. A client is the node's ``partition-id``, the same in every run. Sites with data of
    their own may do without; they are numbered by domain, and then by node id, which a
    SuperNode with a key keeps.

    There have to be ``num_clients``, by default what the nodes' ``num-partitions`` says; of sites
    ``sites`` at least, or those that are connected now. With ``settings``, the run config, clients
    prepare their data and describe them. ``ConfigError`` if there are too few SuperNodes, clients
    are still missing after ``timeout``, two nodes say that they are the same, or those that divide
    one data set do not have the same; ``DataError`` if the sites' data do not go together.
    """
    discovery = NodeDiscovery(grid, timeout, stop, settings)
    while True:
        fresh, answers = discovery.ask(), discovery.answers
        if any(answer.site for answer in answers.values()):
            expected, ids = max(1, sites), None
            if not fresh and len(answers) >= expected:
                for node, why in sorted(discovery.problems.items()):
                    logger.warning("The run goes on without node %d: %s", node, why)
                return _of_sites(answers)
        else:
            size = _num_partitions(answers, num_clients)
            if registry := _of_shares(answers, size):
                return registry
            expected = size or num_clients or max(1, sites)
            # Of sites that are silent it is not known that they are sites.
            ids = None if sites and not answers else range(expected)
        notice = f"{len(answers)} are here, {expected} expected."
        if not fresh and not discovery.wait(notice):
            raise discovery.missing(expected, ids)


def check_num_supernodes(num_partitions: int, num_clients: int) -> None:
    """Refuse a federation of fewer SuperNodes than the data have clients."""
    if num_partitions < num_clients:
        raise ConfigError(
            f"The federation has {num_partitions} SuperNodes, but the data are divided among "
            f"{num_clients} clients. Give it enough:\n"
            f'  flwr run . --federation-config "num-supernodes={num_clients} '
            f'client-resources-num-cpus=1"'
        )


def _num_partitions(answers: NodeInfos, num_clients: int | None) -> int | None:
    """How many clients the data are divided among; None as long as nobody says."""
    for answer in answers.values():
        if answer.size is not None and num_clients is not None:
            check_num_supernodes(answer.size, num_clients)
        num_clients = answer.size if num_clients is None else num_clients
    return num_clients


def _of_shares(answers: NodeInfos, num_clients: int | None) -> ClientRegistry | None:
    """The roll of clients who share one data set; None if one is missing."""
    nodes: dict[int, int] = {}
    for node, answer in answers.items():
        client = answer.number
        assert client is not None  # or it would be a site
        if client in nodes:
            raise ConfigError(
                f"Nodes {nodes[client]} and {node} both say that they are client {client}. "
                "Give every SuperNode a partition-id of its own; after a restart wait a "
                "minute, until Flower has given up the old node."
            )
        nodes[client] = node
    if num_clients is None or any(client not in nodes for client in range(num_clients)):
        return None
    nodes = {client: nodes[client] for client in range(num_clients)}
    return ClientRegistry(nodes, _common({node: answers[node] for node in nodes.values()}), False)


def _common(answers: NodeInfos) -> Federation | None:
    """Find the data set that all nodes have; None if none of them was asked."""
    told: dict[Federation, list[int]] = defaultdict(list)
    for node, answer in sorted(answers.items()):
        if answer.federation is not None:
            # The files may lie elsewhere on every machine.
            told[replace(answer.federation, sources=())].append(node)
    most, *others = sorted(told.values(), key=len, reverse=True) or [[]]
    if others:
        odd = sorted(node for nodes in others for node in nodes)
        rest = f"the other {len(most)}" if len(most) > 1 else f"node {most[0]}"
        raise ConfigError(
            f"Node {', '.join(map(str, odd))}: other data than {rest}. All divide one data set "
            "among them: bring the same files to every node's data-dir. (Sites with data of "
            "their own say so by a domain in --node-config.)"
        )
    return answers[most[0]].federation if most else None


def _of_sites(answers: NodeInfos) -> ClientRegistry:
    """The roll of sites that have data of their own."""
    described = {node: answer.site for node, answer in answers.items() if answer.site}
    strangers = sorted(answers.keys() - described.keys())
    if strangers:
        raise ConfigError(
            f"Node {strangers[0]} has a share of a common data set (partition-id), others have "
            "data of their own (domain). Give all or none a domain in --node-config."
        )
    numbered = {node: a.number for node, a in answers.items() if a.number is not None}
    if numbered and sorted(numbered.values()) != list(range(len(answers))):
        raise ConfigError(
            f"{len(answers)} sites have the partition-ids {sorted(numbered.values())}: expected 0 "
            f"to {len(answers) - 1}, each once. Or give no site one, to have them numbered."
        )
    order = sorted(answers, key=lambda n: (numbered.get(n, 0), described[n].domains, n))
    federation = merge_sites([described[node] for node in order])
    return ClientRegistry(dict(enumerate(order)), federation, True, bool(numbered))


#: From here on, ids of nodes that are not there: Flower's own are random and have 64 bits.
FIRST_ABSENT_NODE = 2


def register_resumed_clients(
    grid: Grid,
    earlier: ClientRegistry,
    timeout: float,
    stop: threading.Event,
    settings: ConfigRecord,
) -> ClientRegistry:
    """The roll of a run of sites that goes on: the same clients, wherever they are now.

    It waits ``timeout`` seconds for all of them, and then goes on with those that are
    back; the others may come later. Sites that had no part in the run get none.
    ``earlier`` has the nodes of those clients alone that are known by nothing else.
    ``ConfigError`` if none came back, if one has other data than before, or if of several
    sites with one domain nothing tells which is which.
    """
    assert earlier.federation is not None
    clients = earlier.federation.clients
    discovery = NodeDiscovery(grid, timeout, stop, settings)
    while True:
        fresh = discovery.ask()
        back, strangers = _match_known_sites(discovery.answers, earlier)
        away = ", ".join(_named(client) for client in clients if client.client_id not in back)
        notice = (
            f"{away} not back yet. After {timeout:g} s in all the run goes on without "
            "(round-timeout, which can be given anew with resume)."
        )
        if not fresh and not (away and discovery.wait(notice)):
            break
    # A stranger may be one of these, whom nothing but the node id would tell.
    lost = {clients[client].domain for client in earlier.nodes if client not in back}
    for node in strangers:
        site = discovery.answers[node].site
        if site is not None and site.domains[0] in lost:
            raise ConfigError(
                "The run cannot go on: sites that share a domain came back as other nodes, and "
                "nothing else tells which is which. Start their SuperNodes with the keys that "
                "they had, or start another run."
            )
    if not back:
        raise discovery.missing(len(clients), None)
    for node in strangers:
        logger.warning("Node %d is left out: it had no part in the run that goes on.", node)
    for node, why in sorted(discovery.problems.items()):
        logger.warning("Node %d is left out: %s", node, why)
    nodes = {}
    for client in clients:
        k = client.client_id
        if k not in back:
            logger.warning("Client %d (%s) is not back; the run goes on.", k, client.domain)
        # A node id that nobody has, as after the death of a SuperNode.
        nodes[k] = back.get(k, earlier.nodes.get(k, FIRST_ABSENT_NODE + k))
    return earlier._replace(nodes=nodes)


class NodeTracker:
    """Looks for clients whose SuperNodes were restarted and got other ids.

    A SuperNode with a key of its own keeps its id; others come back as strangers. A
    stranger that has the ``partition-id`` of a client takes its place only if the
    client's node is gone. So does a site with the domain of a client and the data that
    it had; of several with one domain only those that number themselves can be told
    apart. Strangers are asked when a client is away, and once each as long as they stay.
    An answer that takes longer than ``timeout`` or a minute counts in the next round.
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
        self._inquiry = NodeDiscovery(
            grid, min(timeout, 60), stop, settings if registry.sites else None
        )
        self._left_out: dict[int, str] = {}

    def locate(self, nodes: Mapping[int, int]) -> dict[int, int]:
        """Where all are now, by client id, and by ``nodes`` were before."""
        found, here = dict(nodes), self._inquiry.online()
        self._left_out = {node: why for node, why in self._left_out.items() if node in here}
        gone = {client for client, node in nodes.items() if node not in here}
        if not gone:
            return found
        self._inquiry.ask(known=found.values())
        for node, why in sorted(self._inquiry.problems.items()):
            self._leave_out(node, why)
        for node, answer in sorted(self._inquiry.answers.items()):
            client = self.registry.client_of(answer)
            if client is None or client not in gone or node in nodes.values():
                continue
            whole = self.registry.federation
            if answer.site and whole and not _has_same_data(answer.site, client, whole):
                name = _named(whole.clients[client])
                self._leave_out(node, f"{name} had other data when the run began")
                continue
            gone.remove(client)
            found[client] = node
            logger.info("Client %s is back as node %d.", client, node)
        return found

    def _leave_out(self, node: int, why: str) -> None:
        if self._left_out.get(node) != why:
            logger.warning("Node %d is left out: %s", node, why)
            self._left_out[node] = why


def _match_known_sites(
    answers: NodeInfos, earlier: ClientRegistry
) -> tuple[dict[int, int], list[int]]:
    """Client ids and nodes of the sites that are back, and the nodes that are strangers."""
    assert earlier.federation is not None
    clients = {node: client for client, node in earlier.nodes.items()}
    back: dict[int, int] = {}
    changed: dict[int, int] = {}
    strangers = []
    for node, answer in sorted(answers.items()):
        client = clients.get(node, earlier.client_of(answer))
        if client is None or client in back or answer.site is None:
            strangers.append(node)
        elif _has_same_data(answer.site, client, earlier.federation):
            back[client] = node
        else:
            changed[node] = client
    for node, client in changed.items():
        if client not in back:
            raise ConfigError(
                f"{_named(earlier.federation.clients[client])} has other data than when the run "
                f"began (node {node}). Bring them back, or start another run."
            )
    return back, sorted([*strangers, *changed])


def _has_same_data(site: Federation, client: int, federation: Federation) -> bool:
    if not fits(site, federation):
        return False
    try:
        return site_client_info(client, site, federation) == federation.clients[client]
    except (ValueError, IndexError):  # classes that nobody had
        return False


def _named(client: ClientInfo) -> str:
    return f"Client {client.client_id} ({client.domain})"
