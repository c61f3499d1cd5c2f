"""Workers of a Ray grid, which are replaced when they die, and tasks that wait for a worker."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from flwr.app import Message

from fairflower.engines.ray_cluster import (
    RayNode,
    RayNodes,
    assign_workers,
    nodes_alive,
    pin_to_node,
    share_of,
)
from fairflower.errors import ConfigError, logger

#: Seconds within which the first worker on a cluster must get free CPUs and start.
_FIRST_WORKER = 120


#: Largest batch as a fraction of a worker's remaining work in a round.
_SHARE = 0.7


@dataclass
class Task:
    """A message that has not been answered yet."""

    message: Message
    stored: dict[str, Any]  # records of the message that are in the object store
    deaths: int = 0  # of workers that processed the message
    lacked_memory: bool = False  # whether the client has run out of GPU memory


class TaskQueue:
    """A queue of tasks that no worker has, and the durations of the clients' last messages.

    A task of unknown duration is in a batch of its own.

    Attributes
    ----------
    discarded : set of str
        Ids of messages that nobody waits for. Their tasks are not queued again.
    """

    def __init__(self) -> None:
        self.discarded: set[str] = set()
        self._tasks: deque[Task] = deque()
        # Node and type -> duration of its last message.
        self._seconds: dict[tuple[int, str], float] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def first(self) -> Task:
        """The task that is sent next."""
        return self._tasks[0]

    def add(self, tasks: Iterable[Task]) -> None:
        """Queue new tasks; the longest are sent first."""
        self._tasks = deque(sorted([*self._tasks, *tasks], key=self._expected, reverse=True))

    def put_first(self, tasks: Iterable[Task]) -> None:
        """Queue tasks before all others, unless they are discarded."""
        self._tasks.extendleft(reversed(self._wanted(tasks)))

    def put_last(self, tasks: Iterable[Task]) -> None:
        """Queue tasks behind all others, unless they are discarded."""
        self._tasks.extend(self._wanted(tasks))

    def discard(self, message_ids: Collection[str]) -> None:
        """Remove the tasks of these messages, and do not queue them again."""
        self.discarded |= set(message_ids)
        self._tasks = deque(self._wanted(self._tasks))

    def next_batch(self, workers: int, longest: float) -> list[Task]:
        """Remove and return the first task, and more tasks up to ``longest`` seconds in total.

        Batches become smaller towards the end of a round, so that all workers finish together.
        """
        left = 0.0
        for task in self._tasks:  # as many as decide: the first is the longest
            if (left := left + self._expected(task)) * _SHARE / workers >= longest:
                break
        most = min(longest, _SHARE * left / workers)
        batch = [self._tasks.popleft()]
        seconds = self._expected(batch[0])
        while self._tasks and not batch[0].deaths and not self._tasks[0].deaths:
            seconds += self._expected(self._tasks[0])
            if seconds > most:
                break
            batch.append(self._tasks.popleft())
        return batch

    def seconds(self, tasks: Iterable[Task]) -> float:
        """Return the total duration that is expected of tasks; infinity if one is unknown."""
        return sum(map(self._expected, tasks))

    def note(self, task: Task, seconds: float) -> None:
        """Store how long a task took."""
        self._seconds[_kind(task)] = seconds

    def forget(self, tasks: Iterable[Task]) -> None:
        """Count the durations of tasks as unknown, so that each is sent alone."""
        for task in tasks:
            self._seconds.pop(_kind(task), None)

    def _expected(self, task: Task) -> float:
        return self._seconds.get(_kind(task), math.inf)

    def is_unwanted(self, tasks: Iterable[Task]) -> bool:
        """Return whether nobody waits for one of these tasks."""
        return any(task.message.metadata.message_id in self.discarded for task in tasks)

    def _wanted(self, tasks: Iterable[Task]) -> list[Task]:
        return [t for t in tasks if t.message.metadata.message_id not in self.discarded]


def _kind(task: Task) -> tuple[int, str]:
    return task.message.metadata.dst_node_id, task.message.metadata.message_type


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

    def replace(self, worker: Worker, stuck: bool = False) -> None:
        """Replace a worker that has died, or, if it is stuck, kill it first."""
        if stuck:
            logger.warning(
                "A worker on %s has not answered for %d s and is replaced. Clients that a round "
                "still waits for are tried again.",
                worker.node.name,
                time.monotonic() - worker.begun,
            )
            self._ray.kill(worker.actor)
        else:
            text = "A worker on %s has died. Its clients are retried once."
            logger.warning(text, worker.node.name)
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
            self._cluster.gpus = self._gpus
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
