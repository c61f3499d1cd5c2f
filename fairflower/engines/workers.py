"""Workers of a Ray grid: starting workers on nodes with capacity, and replacing dead workers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from fairflower.engines.ray_cluster import (
    RayNode,
    RayNodes,
    assign_workers,
    nodes_alive,
    pin_to_node,
    share_of,
)
from fairflower.engines.tasks import Task
from fairflower.errors import ConfigError, logger

#: Seconds within which the first worker on a cluster must get free CPUs and start.
_FIRST_WORKER = 120


@dataclass
class Batch:
    """Messages that a worker answers in one call, and references to large new states of nodes."""

    tasks: list[Task]
    states: list[Any]


@dataclass
class Worker:
    """A Ray actor, its node, and its batches in order, keyed by references to their replies."""

    actor: Any
    node: RayNode
    batches: dict[Any, Batch] = field(default_factory=dict)
    begun: float = 0.0  # when its first batch began, by `time.monotonic`
    tried: bool = False  # whether it has answered a batch

    def tasks(self) -> list[Task]:
        """Return the tasks of its batches, in order."""
        return [task for batch in self.batches.values() for task in batch.tasks]


class Workers:
    """The workers on this machine or a cluster; each is a Ray actor.

    At most ``most`` workers with the resources ``cpus`` and ``gpus`` call ``actor(*arguments)`` on
    the nodes of a ``cluster``, or on this machine. ``ready`` lists those that have started;
    ``starting`` has the others by the reference that becomes ready. Raises ``ConfigError`` if no
    node has capacity for a worker, or a node of a cluster cannot be used.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        arguments: Collection[Any],
        most: int,
        cpus: int,
        gpus: float,
        cluster: RayNodes | None,
    ) -> None:
        self._ray, self._cluster, self._most = ray, cluster, most
        self._cpus, self._gpus = cpus, gpus
        self._actor = ray.remote(num_cpus=cpus, num_gpus=gpus)(actor)
        self._arguments = arguments
        self._nodes: dict[str, RayNode] = {}  # by node_id
        self.ready: list[Worker] = []
        self.starting: dict[Any, Worker] = {}
        self._start_workers(cluster.begin() if cluster else self._alive())
        wanted = f"client-cpus = {cpus}, client-gpus = {gpus:g}"
        if not self.starting:
            raise ConfigError(
                f"{wanted}: no node of this Ray cluster has these resources. Decrease these "
                "settings."
            )
        if cluster and not ray.wait([*self.starting], timeout=_FIRST_WORKER)[0]:
            raise ConfigError(
                f"{wanted}: no node of the Ray cluster had these resources free within "
                f"{_FIRST_WORKER} s. Stop other jobs (`ray status` lists used resources), or "
                "decrease these settings."
            )

    def look_for_nodes(self) -> None:
        """Start workers on nodes that have joined the cluster."""
        if self._cluster and (newcomers := self._cluster.joined()):
            self._start_workers(newcomers)

    def collect_started(self) -> None:
        """Move workers that have started to ``ready``."""
        for reference in done(self._ray, self.starting):
            worker = self.starting.pop(reference)
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._forget_lost_nodes()
                if node := self._nodes.get(worker.node.node_id):
                    logger.warning("A worker cannot start on %s: %s", node.name, error)
                    self._nodes[node.node_id] = node._replace(capacity=node.capacity - 1)
                self._start_workers()
            else:
                self.ready.append(worker)

    def replace(self, dead: Worker) -> None:
        """Replace a dead worker with a new worker on a node with capacity."""
        name = dead.node.name
        logger.warning("A worker on %s has died. Its clients are retried once.", name)
        self._renew(dead)

    def kill(self, stuck: Worker) -> None:
        """Kill a worker that does not answer, and replace it with a new worker."""
        logger.warning(
            "A worker on %s has not answered for %d s and is replaced. Clients that a round still "
            "waits for are tried again.",
            stuck.node.name,
            time.monotonic() - stuck.begun,
        )
        self._ray.kill(stuck.actor)
        self._renew(stuck)

    def _renew(self, worker: Worker) -> None:
        worker.batches = {}
        self.ready.remove(worker)
        self._forget_lost_nodes()
        self._start_workers()

    def tasks(self) -> list[Task]:
        """Return the tasks of all batches, starting with the batches that are running."""
        batches = [[*worker.batches.values()] for worker in self.ready]
        return [t for turn in zip_longest(*batches) for batch in turn if batch for t in batch.tasks]

    def halve(self) -> int:
        """Replace all workers with half as many, each with twice the fraction of a GPU.

        Returns the new number of workers. If each worker has a GPU of its own, nothing is done and
        0 is returned. The batches of the old workers are lost. New processes can use all memory
        that the old processes reserved.
        """
        old = [*self.ready, *self.starting.values()]
        sharing = int(1 / self._gpus + 1e-9) if self._gpus else len(old)
        if len(old) < 2 or sharing < 2:
            return 0
        for worker in old:
            self._ray.kill(worker.actor)
            worker.batches = {}
        self.ready, self.starting = [], {}
        self._most = len(old) // 2
        self._gpus = share_of(sharing // 2) if self._gpus else 0.0
        if self._cluster:
            self._cluster.grant(self._cpus, self._gpus)
        self._start_workers(node for node in self._alive() if node.node_id in self._nodes)
        return len(self.starting)

    def _alive(self) -> list[RayNode]:
        return nodes_alive(self._ray, self._cpus, self._gpus)

    def _start_workers(self, newcomers: Iterable[RayNode] = ()) -> None:
        """Start workers on nodes with capacity, up to the maximum number."""
        self._nodes |= {node.node_id: node for node in newcomers}
        used = [worker.node.node_id for worker in (*self.ready, *self.starting.values())]
        free = [
            node._replace(capacity=node.capacity - used.count(node.node_id))
            for node in self._nodes.values()
        ]
        for node in assign_workers(free, self._most - len(used)):
            options = {"num_gpus": self._gpus, **pin_to_node(node)}
            actor = self._actor.options(**options).remote(*self._arguments)
            self.starting[actor.__ray_ready__.remote()] = Worker(actor, node)

    def _forget_lost_nodes(self) -> None:
        for lost in self._nodes.keys() - {node.node_id for node in self._alive()}:
            logger.warning("Ray node %s is lost.", self._nodes.pop(lost).name)


def done(ray: Any, references: Collection[Any]) -> list[Any]:
    """Return the references whose values are available."""
    if not references:
        return []
    ready: list[Any]
    ready, _ = ray.wait([*references], num_returns=len(references), timeout=0)
    return ready
