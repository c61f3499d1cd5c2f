"""Ray on this machine or a cluster: connecting, and checking nodes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import fairflower
from fairflower.errors import USER_ERRORS, ConfigError, EngineError, logger, require
from fairflower.machine import HANGUP, machine, versions

#: Seconds to wait for an answer from a cluster's address.
_CONNECT_TIMEOUT = 10

#: Largest size in bytes of a result that Ray sends as a message.
_INLINE = 1024 * 1024

#: Seconds between two warnings about nodes that the server waits for.
_WARN_EVERY = 30

#: Longest path in bytes of Ray's folder: with 68 more, a socket's path has at most 107 on Linux.
_LONGEST_FOLDER = 35

#: Bytes and open files without which Ray does not start.
_LEAST_SPACE, _LEAST_FILES = 64 * 2**20, 1024

#: Seconds for which Ray may still list a killed node (measured: about 10).
_NODE_LOSS_TIMEOUT = 30


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
        except ValueError as error:  # too little memory
            raise EngineError(
                f"Ray cannot start ({error}). Free memory, or choose engine = 'inline'."
            ) from error
        except Exception as error:  # has no specific type
            ray.shutdown()
            raise EngineError(
                f"Ray cannot start: {' '.join(str(error).split()).rstrip('.')}. {_start_remedy()}, "
                "or choose engine = 'inline'."
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


def nodes_alive(ray: Any, cpus: int, gpus: float) -> list[RayNode]:
    """Return all nodes that are alive, with their capacity for workers, sorted by name."""
    nodes = [
        RayNode(
            node["NodeID"],
            _name(node),
            worker_capacity(node["Resources"], cpus, gpus),
            " ".join(sorted(r for r in node["Resources"] if r.startswith("accelerator_type:"))),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.name)


def _name(node: Mapping[str, Any]) -> str:
    address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
    return f"{address} ({host})" if host != address else address


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
    lacking = [
        f"{package} {installed[package]} (needed: {version})"
        for package, version in needed.items()
        if package != "fairflower" and _public(installed[package]) != _public(version)
    ]
    if lacking:
        return NodeReport(
            f"{', '.join(lacking)}. Install the needed versions on this node, and restart Ray on "
            "it."
        )
    try:
        prepared = prepare() if prepare else None
    except USER_ERRORS as error:
        return NodeReport(f"{error} (A node uses the environment in which `ray start` was called.)")
    facts = machine()
    torch = f"torch {installed['torch']}"
    hardware = (facts["processor"], facts["kernels"], facts["instructions"], torch)
    return NodeReport("", ", ".join(hardware), prepared)


def _public(version: str) -> str:
    return version.partition("+")[0]


class RayNodes:
    """Nodes of a cluster. Each node sends a `NodeReport` before it gets workers.

    ``cpus`` and ``gpus`` are the resources of a worker, for the capacity of nodes. ``prepare`` (see
    `report_node`) must return the same value on all nodes.
    """

    def __init__(self, ray: Any, cpus: int, gpus: float, prepare: Callable[[], Any] | None) -> None:
        self._ray, self._cpus, self.gpus, self._prepare = ray, cpus, gpus, prepare
        self._versions, self._here = versions(), report_node(prepare, {})
        self._known: set[str] = set()
        self._asked: dict[Any, RayNode] = {}  # reference to a report -> node
        self._kinds: dict[str, list[str]] = defaultdict(list)  # hardware -> names of nodes

    def begin(self) -> list[RayNode]:
        """Wait for reports from all nodes that have capacity for a worker, and return these nodes.

        Raises ``ConfigError`` with a list of nodes on which clients cannot run.
        """
        if self._here.error:
            raise ConfigError(self._here.error)
        self._ask()
        reports: dict[RayNode, NodeReport] = {}
        while self._asked:
            reports |= self._answers(_WARN_EVERY)
            if names := ", ".join(node.name for node in self._asked.values()):
                logger.warning("Waiting for Ray nodes to prepare their data: %s.", names)
        problems = [(node.name, self._problem_of(report)) for node, report in reports.items()]
        if listing := "".join(f"\n  {name}: {why}" for name, why in problems if why):
            raise ConfigError(f"Clients cannot run on these Ray nodes:{listing}")
        self._compare(reports)
        return list(reports)

    def joined(self) -> list[RayNode]:
        """Return new nodes that are ready; log a warning about nodes that cannot be used."""
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
        if not report.error and report.prepared != self._here.prepared:
            return (
                "its data differ from the data on this machine. Copy the same files to this node."
            )
        return report.error

    def _ask(self) -> None:
        ask = self._ray.remote(num_cpus=0)(report_node)
        for node in nodes_alive(self._ray, self._cpus, self.gpus):
            if node.capacity and node.node_id not in self._known:
                self._known.add(node.node_id)
                answer = ask.options(**pin_to_node(node)).remote(self._prepare, self._versions)
                self._asked[answer] = node

    def _answers(self, timeout: float) -> dict[RayNode, NodeReport]:
        reports: dict[RayNode, NodeReport] = {}
        if not self._asked:
            return reports
        errors = self._ray.exceptions
        done, _ = self._ray.wait([*self._asked], num_returns=len(self._asked), timeout=timeout)
        for reference in done:
            node = self._asked.pop(reference)
            try:
                reports[node] = self._ray.get(reference)
            except (errors.TaskUnschedulableError, errors.NodeDiedError):
                logger.warning("Ray node %s is lost.", node.name)
            except errors.RayError as error:
                # A dying node may cause any error, for example of a worker or the network.
                if not isinstance(error, errors.RayTaskError) and self._is_gone(node):
                    logger.warning("Ray node %s is lost.", node.name)
                else:
                    reports[node] = NodeReport(" ".join(str(error).split()))
        return reports

    def _is_gone(self, node: RayNode) -> bool:
        """Return whether a silent node is lost, which Ray notices after a few seconds."""
        deadline = time.monotonic() + _NODE_LOSS_TIMEOUT
        while node.node_id in {n.node_id for n in nodes_alive(self._ray, self._cpus, self.gpus)}:
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
            logger.warning(
                "The Ray nodes have %d kinds of hardware, which may round sums differently. The "
                "last bits of the model therefore depend on which node trains which client.%s",
                len(self._kinds),
                "".join(listing),
            )


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
