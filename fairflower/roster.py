"""Who is in the federation: client ids to node ids, known before the first round."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fairflower.config import ConfigError
from fairflower.data import Federation
from fairflower.data.sites import unite
from fairflower.strategies.base import short

logger = logging.getLogger("flwr").getChild("fairflower")


class Stopped(Exception):
    """The run was asked to stop."""


def send_and_receive(
    grid: Grid, messages: Iterable[Message], timeout: float, stop: threading.Event
) -> list[Message]:
    """Push messages and poll for their replies, until all are there or time is up.

    Flower's own method polls ten times a second and cannot be interrupted.

    Raises
    ------
    Stopped
        As soon as ``stop`` is set.
    """
    # Flower gives no id to a message that it refuses, as to a node that has signed off.
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    deadline = time.monotonic() + timeout
    replies: list[Message] = []
    pause = 0.005
    while waiting:
        if stop.is_set():
            raise Stopped
        pulled = grid.pull_messages(waiting)
        # A grid may also hand out what comes late, to messages that nobody waits for.
        arrived = [m for m in pulled if m.metadata.reply_to_message_id in waiting]
        replies += arrived
        waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
        if arrived:
            pause = 0.005
        elif time.monotonic() > deadline:
            break
        else:
            stop.wait(pause)
            pause = min(2 * pause, 0.1)
    return replies


class Roster(NamedTuple):
    """Who is there.

    Attributes
    ----------
    nodes : dict of int -> int
        Client id (0 ... clients - 1) -> node id.
    federation : Federation, optional
        What the clients have, by their own account; None if they were not asked.
    sites : bool
        Whether each has data of its own, rather than a share of what all have.
    numbered : bool
        Whether each gave its number (``partition-id``) itself.
    """

    nodes: dict[int, int]
    federation: Federation | None
    sites: bool
    numbered: bool = True

    @property
    def places(self) -> Places | None:
        """What tells each site from the others wherever its SuperNode runs; None for shares."""
        if not self.sites:
            return None
        assert self.federation is not None
        domains = [client.domain for client in self.federation.clients]
        if self.numbered:
            return {(domain, client): client for client, domain in enumerate(domains)}
        return {
            (domain, None): client
            for client, domain in enumerate(domains)
            if domains.count(domain) == 1
        }

    def anonymous(self) -> dict[str, int]:
        """Client and node of those sites that nothing but the node id tells apart."""
        known = set(self.nodes if self.places is None else self.places.values())
        return {str(client): node for client, node in self.nodes.items() if client not in known}


#: A site's domain and, where sites number themselves, its number -> its client id.
Places = dict[tuple[str, int | None], int]


#: What a node says of itself, by node id.
Answers = dict[int, dict[str, Any]]


def call_the_roll(
    grid: Grid,
    num_clients: int | None,
    timeout: float,
    stop: threading.Event,
    settings: ConfigRecord | None = None,
    sites: int = 0,
) -> Roster:
    """Ask every node which client it is, until all clients are there.

    Flower starts a ServerApp while nodes are still being registered, and gives
    nodes random ids; the roster makes the federation complete and its clients'
    names stable from run to run. A client is the node's ``partition-id``. Sites with
    data of their own may do without; they are numbered by domain, and then by node
    id, which a SuperNode with a key keeps.

    Parameters
    ----------
    num_clients : int, optional
        How many clients there have to be; None: what the nodes' ``num-partitions`` says.
    settings : ConfigRecord, optional
        The run config, for clients to prepare their data by and describe them.
    sites : int
        How many sites with data of their own there have to be, at least; 0: those that
        are connected now.

    Raises
    ------
    ConfigError
        If the federation has fewer SuperNodes than clients, with the command
        that gives it enough, if clients are still missing after ``timeout``, or if two
        nodes say that they are the same.
    DataError
        If the sites' data do not go together.
    """
    answers: Answers = {}
    problems: dict[int, str] = {}
    content = RecordDict({"config": settings or ConfigRecord()})
    begin = time.monotonic()
    next_notice, pause = begin + 5, 0.05
    while True:
        online = set(grid.get_node_ids())
        # A SuperNode that went away after a problem is asked again when it is back.
        problems = {node: why for node, why in problems.items() if node in online}
        fresh = sorted(online - {*answers, *problems})
        queries = [Message(content, node, MessageType.QUERY) for node in fresh]
        replies = send_and_receive(grid, queries, timeout, stop)
        asked = {query.metadata.message_id: query.metadata.dst_node_id for query in queries}
        for reply in replies:
            node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            try:
                answers[node] = _read(reply)
            except ValueError as problem:
                problems[node] = str(problem)
        for node in set(fresh) - {*answers, *problems}:
            problems[node] = f"no answer in {timeout:g} s"
        if any("site" in answer for answer in answers.values()):
            expected, ids = max(1, sites), None
            if not fresh and len(answers) >= expected:
                for node, why in sorted(problems.items()):
                    logger.warning("The run goes on without node %d: %s", node, why)
                return _of_sites(answers)
        else:
            size = _num_partitions(answers, num_clients)
            if roster := _of_shares(answers, size):
                return roster
            expected = size or num_clients or max(1, sites)
            ids = range(expected)
        if fresh:
            continue
        if time.monotonic() > begin + timeout:
            raise ConfigError(_missing(answers, expected, ids, problems))
        if time.monotonic() > next_notice:
            logger.info("Waiting for clients: %d are here, %d expected.", len(answers), expected)
            next_notice += 30
        if stop.wait(pause):
            raise Stopped
        pause = min(2 * pause, 1.0)


def _read(reply: Message) -> dict[str, Any]:
    """What a node says of itself, or ``ValueError`` saying what is wrong with it."""
    if reply.has_error():
        raise ValueError(short(reply.error.reason or "no reason given"))
    answer = dict(next(iter(reply.content.config_records.values()), {}))
    number = answer.get("partition-id")
    if not ("site" in answer or isinstance(number, int)):
        raise ValueError("it does not say which client it is (partition-id or domain)")
    for key in {"site", "federation"} & answer.keys():
        try:
            Federation.from_json(str(answer[key]), _ELSEWHERE)
        except Exception as error:  # whatever another version, or anybody, may send
            raise ValueError(
                f"it describes its data in a way that is not known ({error!r})"
            ) from error
    return answer


def _num_partitions(answers: Answers, num_clients: int | None) -> int | None:
    """How many clients the data are divided among; None as long as nobody says."""
    for answer in answers.values():
        size = answer.get("num-partitions")
        if size is not None and num_clients is not None:
            check_size(size, num_clients)
        num_clients = size if num_clients is None else num_clients
    return num_clients


def _of_shares(answers: Answers, num_clients: int | None) -> Roster | None:
    """The roster of clients who share one data set; None if one is missing."""
    nodes: dict[int, int] = {}
    for node, answer in answers.items():
        client = int(answer["partition-id"])
        if client in nodes:
            raise ConfigError(
                f"Nodes {nodes[client]} and {node} both say that they are client {client}. "
                "Give every SuperNode a partition-id of its own; after a restart wait a "
                "minute, until Flower has given up the old node."
            )
        nodes[client] = node
    if num_clients is None or any(client not in nodes for client in range(num_clients)):
        return None
    described = next((a["federation"] for a in answers.values() if "federation" in a), None)
    federation = Federation.from_json(described, _ELSEWHERE) if described else None
    return Roster({client: nodes[client] for client in range(num_clients)}, federation, False)


def _of_sites(answers: Answers) -> Roster:
    """The roster of sites that have data of their own."""
    strangers = [node for node, answer in answers.items() if "site" not in answer]
    if strangers:
        raise ConfigError(
            f"Node {strangers[0]} has a share of a common data set (partition-id), others have "
            "data of their own (domain). Give all or none a domain in --node-config."
        )
    described = {n: Federation.from_json(a["site"], _ELSEWHERE) for n, a in answers.items()}
    numbered = {n: int(a["partition-id"]) for n, a in answers.items() if "partition-id" in a}
    if numbered and sorted(numbered.values()) != list(range(len(answers))):
        raise ConfigError(
            f"{len(answers)} sites have the partition-ids {sorted(numbered.values())}: expected 0 "
            f"to {len(answers) - 1}, each once. Or give no site one, to have them numbered."
        )
    order = sorted(answers, key=lambda n: (numbered.get(n, 0), described[n].domains, n))
    federation = unite([described[node] for node in order])
    return Roster(dict(enumerate(order)), federation, True, bool(numbered))


#: Where the clients' data are.
_ELSEWHERE = Path("at-the-clients")


def look_again(
    grid: Grid,
    nodes: Mapping[int, int],
    timeout: float,
    stop: threading.Event,
    places: Places | None = None,
    settings: ConfigRecord | None = None,
) -> dict[int, int]:
    """The roster, with clients whose SuperNodes were restarted and got other ids.

    A SuperNode with a key of its own keeps its id; others come back as strangers. A
    stranger that has the ``partition-id`` of a client takes its place only if the
    client's node is gone. So does a site with the domain of a client; of several with
    one domain only those that number themselves can be told apart.

    Parameters
    ----------
    nodes : mapping of int -> int
        Client id -> node id, as known so far.
    timeout : float
        Seconds to wait for strangers' answers, at most a minute.
    places : mapping, optional
        ``Roster.places``, of sites with data of their own.
    settings : ConfigRecord, optional
        The run config, for sites to describe their data by.
    """
    found, here = dict(nodes), set(grid.get_node_ids())
    gone = {client for client, node in nodes.items() if node not in here}
    strangers = sorted(here - set(nodes.values()))
    if not (gone and strangers):
        return found
    config = ConfigRecord() if places is None or settings is None else settings
    content = RecordDict({"config": config})
    queries = [Message(content, node, MessageType.QUERY) for node in strangers]
    replies = send_and_receive(grid, queries, min(timeout, 60), stop)
    for reply in sorted(replies, key=lambda m: m.metadata.src_node_id):
        try:
            client = _client(_read(reply), places)
        except ValueError as problem:
            logger.warning("Node %d is left out: %s", reply.metadata.src_node_id, problem)
            continue
        if client in gone:
            gone.remove(client)
            found[client] = reply.metadata.src_node_id
            logger.info("Client %s is back as node %d.", client, found[client])
    return found


def _client(answer: Mapping[str, Any], places: Places | None) -> int | None:
    """The client that a node is by its own account; None if that is nobody."""
    number: int | None = answer.get("partition-id")
    if places is None:
        return None if "site" in answer else number
    if "site" not in answer:
        return None
    (domain,) = Federation.from_json(answer["site"], _ELSEWHERE).domains
    return places.get((domain, number))


def check_size(num_partitions: int, num_clients: int) -> None:
    """Refuse a federation of fewer SuperNodes than the data have clients."""
    if num_partitions < num_clients:
        raise ConfigError(
            f"The federation has {num_partitions} SuperNodes, but the data are divided among "
            f"{num_clients} clients. Give it enough:\n"
            f'  flwr run . --federation-config "num-supernodes={num_clients} '
            f'client-resources-num-cpus=1"'
        )


def _missing(
    answers: Answers, expected: int, ids: Iterable[int] | None, problems: dict[int, str]
) -> str:
    here = {answer.get("partition-id") for answer in answers.values()}
    absent = "" if ids is None else f"; missing: {[client for client in ids if client not in here]}"
    node_config = (
        'domain="<domain>" data-dir="<folder>"' if ids is None else "partition-id=<client>"
    )
    reasons = "".join(f"\n  node {node}: {why}" for node, why in problems.items())
    return (
        f"{len(answers)} of {expected} clients answered{absent}. Start a SuperNode "
        f"for each with --node-config '{node_config}'.{reasons}"
    )
