"""Who is in the federation: client ids to node ids, known before the first round."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fairflower.config import ConfigError

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
    waiting = set(grid.push_messages(messages))
    deadline = time.monotonic() + timeout
    replies: list[Message] = []
    pause = 0.005
    while waiting:
        if stop.is_set():
            raise Stopped
        arrived = list(grid.pull_messages(waiting))
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


def call_the_roll(
    grid: Grid, num_clients: int, timeout: float, stop: threading.Event
) -> dict[int, int]:
    """Ask every node for its ``partition-id`` until all clients are there.

    Flower starts a ServerApp while nodes are still being registered, and gives
    nodes random ids; the roster makes the federation complete and its clients'
    names stable from run to run.

    Returns
    -------
    dict of int -> int
        Client id (0 ... num_clients - 1) -> node id.

    Raises
    ------
    ConfigError
        If the federation has fewer SuperNodes than clients, with the command
        that gives it enough, or if clients are still missing after ``timeout``.
    """
    nodes: dict[int, int] = {}
    answered: set[int] = set()
    problems: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    next_notice = time.monotonic() + 5
    while any(client not in nodes for client in range(num_clients)):
        fresh = [node for node in grid.get_node_ids() if node not in answered]
        queries = [
            Message(RecordDict({"config": ConfigRecord()}), node, MessageType.QUERY)
            for node in fresh
        ]
        for reply in send_and_receive(grid, queries, timeout, stop):
            node = reply.metadata.src_node_id
            answered.add(node)
            if reply.has_error():
                problems[node] = reply.error.reason or "no reason given"
                continue
            answer = next(iter(reply.content.config_records.values()))
            _check_size(int(answer.get("num-partitions", num_clients)), num_clients)  # type: ignore[arg-type]
            nodes[int(answer["partition-id"])] = node  # type: ignore[arg-type]
        if fresh:
            continue
        if time.monotonic() > deadline:
            raise ConfigError(_missing(nodes, num_clients, problems))
        if time.monotonic() > next_notice:
            logger.info("Waiting for clients: %d of %d are here.", len(nodes), num_clients)
            next_notice += 30
        if stop.wait(0.05):
            raise Stopped
    return {client: nodes[client] for client in range(num_clients)}


def _check_size(num_partitions: int, num_clients: int) -> None:
    if num_partitions < num_clients:
        raise ConfigError(
            f"The federation has {num_partitions} SuperNodes, but the data are divided among "
            f"{num_clients} clients. Give it enough:\n"
            f'  flwr run . --federation-config "num-supernodes={num_clients} '
            f'client-resources-num-cpus=1"'
        )


def _missing(nodes: dict[int, int], num_clients: int, problems: dict[int, str]) -> str:
    absent = [client for client in range(num_clients) if client not in nodes]
    reasons = "".join(f"\n  node {node}: {why}" for node, why in problems.items())
    return (
        f"{len(nodes)} of {num_clients} clients answered; missing: {absent}. Start a SuperNode "
        f'for each with --node-config "partition-id=<client>".{reasons}'
    )
