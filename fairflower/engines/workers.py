"""The workers of a grid on Ray: started where there is room, and replaced when they die."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from fairflower.engines.cluster import Node, Nodes, nodes_alive, on, spread
from fairflower.errors import ConfigError, logger

#: Seconds that the first worker on a cluster may take to find a free CPU and to start.
_FIRST_WORKER = 120


@dataclass
class Worker:
    """An actor, where it is, and what it was given, in order: by the reference to its replies."""

    actor: Any
    node: Node
    batches: dict[Any, Any] = field(default_factory=dict)


class Workers:
    """At most so many workers, on nodes that have so many CPUs and GPUs for each.

    Each is a Ray actor, made of ``arguments``. Those ``at_hand`` have started; the others are
    ``starting``, by the references to their signs of life. Of a ``cluster``, which is None on this
    machine, the first is waited for. ``ConfigError`` if no node has room for a worker, or one of a
    cluster cannot be used.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        arguments: Collection[Any],
        most: int,
        cpus: int,
        gpus: float,
        cluster: Nodes | None,
    ) -> None:
        self._ray, self._cluster, self._most = ray, cluster, most
        self._granted = cpus, gpus
        self._actor = ray.remote(num_cpus=cpus, num_gpus=gpus)(actor)
        self._arguments = arguments
        self._nodes: dict[str, Node] = {}  # by node_id
        self.at_hand: list[Worker] = []
        self.starting: dict[Any, Worker] = {}
        self._hire(cluster.begin() if cluster else self._alive())
        wanted = f"client-cpus = {cpus}, client-gpus = {gpus:g}"
        if not self.starting:
            raise ConfigError(f"{wanted}: no node of this Ray has so many. Lower them.")
        if cluster and not ray.wait([*self.starting], timeout=_FIRST_WORKER)[0]:
            raise ConfigError(
                f"{wanted}: no node of the Ray cluster had so many free in {_FIRST_WORKER} s. "
                "`ray status` shows what is in use: end that, or lower them."
            )

    def look_for_nodes(self) -> None:
        """Start workers on nodes that have joined the cluster."""
        if self._cluster and (newcomers := self._cluster.joined()):
            self._hire(newcomers)

    def take_up(self) -> None:
        """Add those that have started to those at hand."""
        for reference in done(self._ray, self.starting):
            worker = self.starting.pop(reference)
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._forget_lost_nodes()
                if node := self._nodes.get(worker.node.node_id):
                    logger.warning("A worker cannot start on %s: %s", node.name, error)
                    self._nodes[node.node_id] = node._replace(room=node.room - 1)
                self._hire()
            else:
                self.at_hand.append(worker)

    def replace(self, dead: Worker) -> None:
        """Start another for one that has died, where there is room."""
        name = dead.node.name
        logger.warning("A worker on %s has died. What it was at is tried once more.", name)
        self.at_hand.remove(dead)
        self._forget_lost_nodes()
        self._hire()

    def _alive(self) -> list[Node]:
        return nodes_alive(self._ray, *self._granted)

    def _hire(self, newcomers: Iterable[Node] = ()) -> None:
        """Start workers where there is room, but no more of them than asked for."""
        self._nodes |= {node.node_id: node for node in newcomers}
        there = [worker.node.node_id for worker in (*self.at_hand, *self.starting.values())]
        free = [
            node._replace(room=node.room - there.count(node.node_id))
            for node in self._nodes.values()
        ]
        for node in spread(free, self._most - len(there)):
            actor = self._actor.options(**on(node)).remote(*self._arguments)
            self.starting[actor.__ray_ready__.remote()] = Worker(actor, node)

    def _forget_lost_nodes(self) -> None:
        for lost in self._nodes.keys() - {node.node_id for node in self._alive()}:
            logger.warning("Ray node %s is lost.", self._nodes.pop(lost).name)


def done(ray: Any, references: Collection[Any]) -> list[Any]:
    """Those of the references whose values are there."""
    if not references:
        return []
    ready: list[Any]
    ready, _ = ray.wait([*references], num_returns=len(references), timeout=0)
    return ready
