"""Ray on this machine or a cluster: connecting, checking nodes, workers, and tasks for them."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fairflower
from fairflower.errors import USER_ERRORS, ConfigError, EngineError, logger, require
from fairflower.machine import HANGUP, machine, versions

if TYPE_CHECKING:  # slow to import
    from flwr.app import Message

_CONNECT_TIMEOUT = 10  # seconds to wait for an answer from a cluster's address
_INLINE = 1024 * 1024  # largest size in bytes of a result that Ray sends as a message
_WARN_EVERY = 30  # seconds between two warnings about nodes that the server waits for

#: Longest path in bytes of Ray's folder: with 68 more, a socket's path has at most 107 on Linux.
_LONGEST_FOLDER = 35

#: Bytes and open files without which Ray does not start.
_LEAST_SPACE, _LEAST_FILES = 64 * 2**20, 1024

#: Seconds within which the first worker on a cluster must get free CPUs and start.
_FIRST_WORKER = 120

_SHARE = 0.7  # largest batch as a fraction of a worker's remaining work in a round
_NODE_LOSS_TIMEOUT = 30  # seconds for which Ray may still list a killed node (measured: about 10)


def prepare_ray() -> Any:
    """Set environment variables for Ray, import Ray and return the module.

    By default Ray starts workers through the `uv run` of this process, warns about GPUs that it
    hides, and sends replies above 100 KB through the object store, which takes several times as
    much CPU time as a message. Ray is imported in this function, so that no other thread sees a
    partial import.
    """
    require("sim", "The engine on Ray", "ray")
    os.environ.setdefault("RAY_max_direct_call_object_size", str(_INLINE))
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # imported late, because it reads these variables and is slow to import

    return ray


@contextmanager
def keeping_signals() -> Iterator[None]:
    """Keep this process's SIGTERM handler, which Ray would otherwise replace.

    Ray processes that are started in this context block SIGTERM and SIGHUP, so that they do not end
    before this process when a scheduler or a closed terminal sends a signal to all processes. If
    this process has no handler, Ray installs its own.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Missing on Windows, which does not have these signals.
    block = getattr(signal, "pthread_sigmask", None)
    mask = block(signal.SIG_BLOCK, {signal.SIGTERM, *HANGUP}) if block else None
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if block:
            block(signal.SIG_SETMASK, mask)


def connect(address: str, cpus: int, gpus: int | None = None) -> Any:
    """Start Ray with ``cpus`` CPUs on this machine or, given an address, join a cluster.

    ``gpus`` is the number of GPUs on this machine; None means all GPUs that Ray detects. The
    address is "auto", "host:port" or "ray://host:port". This process's version of fairflower is
    copied to the cluster. Raises ``ConfigError`` if no cluster answers at the address, or if its
    version of Python or Ray differs.
    """
    ray = prepare_ray()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        if ray.is_initialized():
            raise EngineError(
                "Ray already runs in this process. Call ray.shutdown() first, or choose engine = "
                "'inline'."
            )
        # "local" avoids joining a cluster that runs on this machine.
        try:
            with chdir(sys.prefix):  # Ray's workers import from here before all libraries
                ray.init("local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, **quiet)
        except Exception as error:  # has no specific type, except for too little memory
            ray.shutdown()
            remedy = "Free memory" if isinstance(error, ValueError) else _start_remedy()
            raise EngineError(
                f"Ray cannot start: {' '.join(str(error).split()).rstrip('.')}. {remedy}, or "
                "choose engine = 'inline'."
            ) from error
        return ray
    key = f"ray-address = {address!r}"
    match = re.fullmatch(r"auto|(?:ray://)?(?P<host>[^:/]+|\[[^]/]+\]):(?P<port>\d+)", address)
    if not match:
        raise ConfigError(f"{key}: expected auto, host:port or ray://host:port.")
    try:
        if match["host"]:  # Ray would retry for minutes, then exit this process
            place = match["host"].strip("[]"), int(match["port"])
            socket.create_connection(place, timeout=_CONNECT_TIMEOUT).close()
        package = str(Path(fairflower.__file__).parent)
        with chdir(sys.prefix):
            ray.init(address, runtime_env={"py_modules": [package]}, **quiet)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{key}: no Ray cluster answers at this address ({error}). Start a cluster with `ray "
            "start --head`, and use the address that this command prints."
        ) from error
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error
    return ray


def _start_remedy() -> str:
    """Return what to do if Ray does not start on this machine, by looking for the cause."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        return (
            f"The path of its folder {folder} (from RAY_TMPDIR or TMPDIR) is too long for sockets. "
            f"Set RAY_TMPDIR to a folder whose path has at most {_LONGEST_FOLDER} bytes"
        )
    with suppress(OSError):
        if shutil.disk_usage(folder).free < _LEAST_SPACE or not os.access(folder, os.W_OK):
            return f"{folder} is full or not writable. Free space, or set RAY_TMPDIR to another"
    with suppress(ImportError):  # on Windows
        import resource

        if 0 <= (files := resource.getrlimit(resource.RLIMIT_NOFILE)[1]) < _LEAST_FILES:
            return f"A process may open only {files} files. Allow more (ulimit -n {_LEAST_FILES})"
    return (
        "Try again when this machine is less busy, give Ray more time (environment variable "
        "RAY_raylet_start_wait_time_s=120)"
    )


def object_store_full_error(where: str) -> EngineError:
    """Return the error for a full object store if the disk is full, too."""
    return EngineError(
        f"Ray's object store on {where} is full, and its disk is full, too. Together they must "
        "hold all models of a round. Free space on the disk of Ray's folder (RAY_TMPDIR, by "
        "default /tmp/ray), or give Ray more memory (`ray start --object-store-memory`). The run "
        "can be resumed."
    )


class RayNode(NamedTuple):
    """A machine in a Ray cluster, or this machine."""

    node_id: str
    name: str  # address, and host name if it differs
    capacity: int  # number of workers that fit
    gpu: str = ""  # type of its GPUs


def worker_capacity(resources: Mapping[str, float], cpus: int, gpus: float) -> int:
    """Return how many workers fit on a node; a fraction of a GPU must be on a single GPU.

    >>> worker_capacity({"CPU": 16, "GPU": 2}, 2, 0), worker_capacity({"CPU": 16, "GPU": 2}, 2, 0.3)
    (8, 6)
    """
    fitting = int(resources.get("CPU", 0) // cpus)
    if gpus:
        count = int(resources.get("GPU", 0))
        fitting = min(fitting, int(count // gpus) if gpus >= 1 else count * int(1 / gpus + 1e-9))
    return fitting


def share_of(clients: int) -> float:
    """Return the fraction of a GPU for each of ``clients`` clients, rounded down to 1/10000.

    >>> share_of(1), share_of(3), share_of(12)
    (1.0, 0.3333, 0.0833)
    """
    return int(10_000 / clients) / 10_000


def assign_workers(nodes: Sequence[RayNode], most: int) -> list[RayNode]:
    """Assign up to ``most`` workers to the nodes in turn; return the node of each worker.

    >>> small, large = RayNode("s", "10.0.0.1", 1), RayNode("l", "10.0.0.2", 3)
    >>> [node.node_id for node in assign_workers([small, large], 3)]
    ['s', 'l', 'l']
    """
    turns = range(max((node.capacity for node in nodes), default=0))
    return [node for turn in turns for node in nodes if turn < node.capacity][:most]


def pin_to_node(node: RayNode) -> dict[str, Any]:
    """Return Ray options that pin an actor or a task to a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}


class NodeReport(NamedTuple):
    """Report from a machine that may run clients."""

    error: str = ""  # why clients cannot run on this machine; empty if they can
    hardware: str = ""  # processor and kernels, on which exact results depend
    prepared: Any = None


def report_node(prepare: Callable[[], Any] | None, needed: Mapping[str, str]) -> NodeReport:
    """Prepare this machine and report its hardware; runs as a Ray task on other machines.

    ``prepare`` loads the clients' data. ``needed`` has the required version of each package; the
    version of fairflower is ignored.
    """
    installed = versions()
    # Builds for different devices differ only in the local version: 2.5.1+cpu, 2.5.1+cu124.
    pairs = {name: (installed[name], needed[name]) for name in needed if name != "fairflower"}
    lacking = [
        f"{name} {there} (needed: {version})"
        for name, (there, version) in pairs.items()
        if there.partition("+")[0] != version.partition("+")[0]
    ]
    if lacking:
        remedy = "Install the needed versions on this node, and restart Ray on it."
        return NodeReport(f"{', '.join(lacking)}. {remedy}")
    try:
        prepared = prepare() if prepare else None
    except USER_ERRORS as error:
        return NodeReport(f"{error} (A node uses the environment in which `ray start` was called.)")
    facts = {**machine(), "torch": f"torch {installed['torch']}"}
    kinds = ("processor", "kernels", "instructions", "torch")
    return NodeReport("", ", ".join(facts[kind] for kind in kinds), prepared)


class RayNodes:
    """The nodes of a cluster, each of which sends a `NodeReport` first; or this machine.

    ``cpus`` and ``gpus`` are the resources of a worker, for the capacity of nodes. ``prepare`` (see
    `report_node`) must return the same value on all nodes of a cluster.
    """

    def __init__(
        self,
        ray: Any,
        cpus: int,
        gpus: float,
        prepare: Callable[[], Any] | None,
        cluster: bool = True,
    ) -> None:
        self._ray, self.cpus, self.gpus, self._prepare = ray, cpus, gpus, prepare
        self.cluster, self._here = cluster, NodeReport()
        self._known: set[str] = set()
        self._asked: dict[Any, RayNode] = {}  # reference to a report -> node
        self._kinds: dict[str, list[str]] = defaultdict(list)  # hardware -> names of nodes

    def alive(self) -> list[RayNode]:
        """Return all nodes that are alive, with their capacity for workers, sorted by name."""
        nodes = []
        for node in (node for node in self._ray.nodes() if node["Alive"]):
            address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
            name = f"{address} ({host})" if host != address else address
            capacity = worker_capacity(node["Resources"], self.cpus, self.gpus)
            kinds = sorted(r for r in node["Resources"] if r.startswith("accelerator_type:"))
            nodes.append(RayNode(node["NodeID"], name, capacity, " ".join(kinds)))
        return sorted(nodes, key=lambda node: node.name)

    def begin(self) -> list[RayNode]:
        """Wait for reports from all nodes that have capacity for a worker, and return these nodes.

        Raises ``ConfigError`` with a list of nodes on which clients cannot run.
        """
        if not self.cluster:
            return self.alive()
        self._here = report_node(self._prepare, {})
        if self._here.error:
            raise ConfigError(self._here.error)
        self._ask()
        reports: dict[RayNode, NodeReport] = {}
        while self._asked:
            reports |= self._answers(_WARN_EVERY)
            if names := ", ".join(node.name for node in self._asked.values()):
                logger.warning("Waiting for Ray nodes to prepare their data: %s.", names)
        problems = {node.name: self._problem_of(report) for node, report in reports.items()}
        if listing := "".join(f"\n  {name}: {why}" for name, why in problems.items() if why):
            raise ConfigError(f"Clients cannot run on these Ray nodes:{listing}")
        self._compare(reports)
        return list(reports)

    def joined(self) -> list[RayNode]:
        """Return new nodes that are ready; log a warning about nodes that cannot be used."""
        if not self.cluster:
            return []
        self._ask()
        reports = self._answers(0)
        for node, report in list(reports.items()):
            if problem := self._problem_of(report):
                logger.warning("Ray node %s is not used: %s", node.name, problem)
                del reports[node]
            else:
                logger.warning("Ray node %s has joined.", node.name)
        self._compare(reports)
        return list(reports)

    def _problem_of(self, report: NodeReport) -> str:
        if report.error or report.prepared == self._here.prepared:
            return report.error
        return "its data differ from the data on this machine. Copy the same files to this node."

    def _ask(self) -> None:
        ask = self._ray.remote(num_cpus=0)(report_node)
        for node in self.alive():
            if node.capacity and node.node_id not in self._known:
                self._known.add(node.node_id)
                answer = ask.options(**pin_to_node(node)).remote(self._prepare, versions())
                self._asked[answer] = node

    def _answers(self, timeout: float) -> dict[RayNode, NodeReport]:
        reports: dict[RayNode, NodeReport] = {}
        errors = self._ray.exceptions
        for reference in done(self._ray, self._asked, timeout):
            node = self._asked.pop(reference)
            try:
                reports[node] = self._ray.get(reference)
            except errors.RayError as error:
                # A dying node may cause any error, for example of a worker or the network.
                lost = isinstance(error, (errors.TaskUnschedulableError, errors.NodeDiedError))
                if lost or (not isinstance(error, errors.RayTaskError) and self._is_gone(node)):
                    logger.warning("Ray node %s is lost.", node.name)
                else:
                    reports[node] = NodeReport(" ".join(str(error).split()))
        return reports

    def _is_gone(self, node: RayNode) -> bool:
        """Return whether a silent node is lost, which Ray notices after a few seconds."""
        deadline = time.monotonic() + _NODE_LOSS_TIMEOUT
        while node.node_id in {other.node_id for other in self.alive()}:
            if time.monotonic() > deadline:
                return False
            time.sleep(1)
        return True

    def _compare(self, reports: Mapping[RayNode, NodeReport]) -> None:
        """Warn if the nodes' processors or kernels differ."""
        known = len(self._kinds)
        for node, report in reports.items():
            self._kinds[f"{report.hardware} {node.gpu if self.gpus else ''}"].append(node.name)
        if len(self._kinds) > max(known, 1):
            listing = (f"\n  {', '.join(names)}: {kind}" for kind, names in self._kinds.items())
            text = "The Ray nodes have %d kinds of hardware, which may round sums differently. The "
            text += "last bits of the model therefore depend on which node trains which client.%s"
            logger.warning(text, len(self._kinds), "".join(listing))


class LastWords:
    """A sentence for a process that Ray ends from C++, because its node on this machine has died.

    Another process prints the text of `prepare` if this one ends between `begin` and `end`.
    """

    _CODE = "import sys; print(end=sys.stdin.read().rpartition('\\0')[2], file=sys.stderr)"

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def begin(self) -> None:
        """Start the process; in a session of its own, it outlives Ctrl-C."""
        command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", self._CODE]
        options: Any = {"encoding": "utf-8", "errors": "replace", "start_new_session": True}
        self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, **options))

    def prepare(self, text: str) -> None:
        """Replace the text, if the process was started."""
        for process in self._processes:
            with suppress(OSError):  # it was killed
                assert process.stdin
                process.stdin.write(f"\0{text}")
                process.stdin.flush()

    def end(self) -> None:
        """End the process without a word."""
        self.prepare("")
        while self._processes:
            self._processes.pop().communicate()


last_words = LastWords()


# --- tasks and workers ----------------------------------------------------------------------------


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
    """

    def __init__(self) -> None:
        #: Ids of messages that nobody waits for. Their tasks are not queued again.
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

    def put_back(self, tasks: Iterable[Task], *, last: bool = False) -> None:
        """Queue tasks before or behind all others, unless they are discarded."""
        wanted = self.wanted(tasks)
        self._tasks = deque([*self._tasks, *wanted] if last else [*wanted, *self._tasks])

    def discard(self, message_ids: Collection[str]) -> None:
        """Remove the tasks of these messages, and do not queue them again."""
        self.discarded |= set(message_ids)
        self._tasks = deque(self.wanted(self._tasks))

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

    def wanted(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks for which somebody waits."""
        return [t for t in tasks if t.message.metadata.message_id not in self.discarded]


def _kind(task: Task) -> tuple[int, str]:
    return task.message.metadata.dst_node_id, task.message.metadata.message_type


@dataclass
class Batch:
    """Messages that a worker answers in one call, and references to the nodes' new states."""

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

    At most ``most`` workers call ``actor(*arguments)`` on the ``nodes``. ``ready`` lists those that
    have started; ``starting`` has the others by the reference that becomes ready.
    """

    def __init__(
        self, ray: Any, actor: Any, arguments: Collection[Any], most: int, nodes: RayNodes
    ) -> None:
        self._ray, self._cluster, self._most = ray, nodes, most
        self._actor = ray.remote(num_cpus=nodes.cpus, num_gpus=nodes.gpus)(actor)
        self._arguments = arguments
        self._nodes: dict[str, RayNode] = {}  # by node_id
        self.ready: list[Worker] = []
        self.starting: dict[Any, Worker] = {}
        self._start_workers(nodes.begin())
        wanted = f"client-cpus = {nodes.cpus}, client-gpus = {nodes.gpus:g}"
        if not self.starting:
            raise ConfigError(
                f"{wanted}: no node of this Ray cluster has these resources. Decrease these "
                "settings."
            )
        if nodes.cluster and not ray.wait([*self.starting], timeout=_FIRST_WORKER)[0]:
            raise ConfigError(
                f"{wanted}: no node of the Ray cluster had these resources free within "
                f"{_FIRST_WORKER} s. Stop other jobs (`ray status` lists used resources), or "
                "decrease these settings."
            )

    def look_for_nodes(self) -> None:
        """Start workers on nodes that have joined the cluster."""
        if newcomers := self._cluster.joined():
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
            text = "A worker on %s has not answered for %d s and is replaced. Clients that a round "
            text += "still waits for are tried again."
            logger.warning(text, worker.node.name, time.monotonic() - worker.begun)
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
        cluster = self._cluster
        sharing = int(1 / cluster.gpus + 1e-9) if cluster.gpus else len(old)
        if len(old) < 2 or sharing < 2:
            return 0
        for worker in old:
            self._ray.kill(worker.actor)
            worker.batches = {}
        self.ready, self.starting = [], {}
        self._most = len(old) // 2
        cluster.gpus = share_of(sharing // 2) if cluster.gpus else 0.0
        self._start_workers(node for node in cluster.alive() if node.node_id in self._nodes)
        return len(self.starting)

    def _start_workers(self, newcomers: Iterable[RayNode] = ()) -> None:
        """Start workers on nodes with capacity, up to the maximum number."""
        self._nodes |= {node.node_id: node for node in newcomers}
        used = [worker.node.node_id for worker in (*self.ready, *self.starting.values())]
        nodes = self._nodes.values()
        free = [n._replace(capacity=n.capacity - used.count(n.node_id)) for n in nodes]
        for node in assign_workers(free, self._most - len(used)):
            options = {"num_gpus": self._cluster.gpus, **pin_to_node(node)}
            actor = self._actor.options(**options).remote(*self._arguments)
            self.starting[actor.__ray_ready__.remote()] = Worker(actor, node)

    def _forget_lost_nodes(self) -> None:
        for lost in self._nodes.keys() - {node.node_id for node in self._cluster.alive()}:
            logger.warning("Ray node %s is lost.", self._nodes.pop(lost).name)


def done(ray: Any, references: Collection[Any], timeout: float = 0) -> list[Any]:
    """Return the references whose values are available, or will be within ``timeout`` seconds."""
    wanted = {"num_returns": len(references), "timeout": timeout}
    return list(ray.wait([*references], **wanted)[0]) if references else []
