"""The Ray that clients run on, this machine's own or a cluster: its nodes, and what they lack."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fairflower
from fairflower.errors import USER_ERRORS, ConfigError, EngineError, logger
from fairflower.machine import machine, versions

#: Seconds that a cluster's address has to answer in.
_ANSWERS_IN = 10

#: Bytes of a result up to which Ray sends it as a message.
_INLINE = 1024 * 1024

#: Seconds of waiting for a node after which it is said that it is waited for.
_LONG = 30

#: Seconds that Ray may take to see that a node is gone: it lists one that was killed for some ten.
_NOTICED_IN = 30


def prepare_ray() -> Any:
    """Set what has to be set before Ray is imported, and import it.

    Ray would otherwise start its workers through the `uv run` that started us, and
    warn about GPUs that it hides; clients look at what Ray granted, not at that. It would send
    replies from 100 KB through the object store, which takes the processors several times
    longer than a message up to some MB. It is imported here, so that no other thread meets it
    half-imported.
    """
    os.environ.setdefault("RAY_max_direct_call_object_size", str(_INLINE))
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # late: it reads these variables, and is slow

    return ray


@contextmanager
def keeping_signals() -> Iterator[None]:
    """Give SIGTERM back to who handles it: Ray takes it, for a dump of its stack and an abort.

    Ray's own processes, which are started meanwhile, wait for us when a scheduler sends it to
    all, or a closed terminal SIGHUP. (They wait at the end, too, a second each.) Where nobody
    handles SIGTERM, Ray may have it.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def connect(address: str, cpus: int) -> Any:
    """Start a Ray of ``cpus`` CPUs on this machine or, given an address, join a cluster.

    A cluster, at "auto", "host:port" or "ray://host:port", gets fairflower's own code, as it is
    here, from this process. ``ConfigError`` if none answers at the address, or it has another
    version of Python or Ray.
    """
    ray = prepare_ray()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        # A cluster that happens to run on this machine is left alone.
        try:
            ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        except ValueError as error:  # too little memory
            raise EngineError(
                f"Ray cannot start ({error}). Or choose engine = 'inline'."
            ) from error
        except Exception as error:  # Ray's own, without a type: its processes did not start in time
            ray.shutdown()
            raise EngineError(
                f"Ray cannot start: {' '.join(str(error).split())} Try again when this machine is "
                "less busy, give Ray more time (the environment variable "
                "RAY_raylet_start_wait_time_s=120), or choose engine = 'inline'."
            ) from error
        return ray
    key = f"ray-address = {address!r}"
    match = re.fullmatch(r"auto|(?:ray://)?(?P<host>[^:/]+|\[[^]/]+\]):(?P<port>\d+)", address)
    if not match:
        raise ConfigError(f"{key}: expected auto, host:port or ray://host:port.")
    try:
        if match["host"]:  # Ray itself would try for minutes, and end this process
            place = match["host"].strip("[]"), int(match["port"])
            socket.create_connection(place, timeout=_ANSWERS_IN).close()
        package = str(Path(fairflower.__file__).parent)
        ray.init(address, runtime_env={"py_modules": [package]}, **quiet)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{key}: no Ray cluster answers there ({error}). Start one with `ray start --head`, "
            "and give the address that it prints."
        ) from error
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error
    return ray


def no_room_left(where: str) -> EngineError:
    """What to do about an object store that is full where the disk is as well."""
    return EngineError(
        f"Ray's object store on {where} is full, and so is the disk that it goes on to. They have "
        "to hold the models of a round. Make room on the disk of Ray's folder (RAY_TMPDIR, by "
        "default /tmp/ray), or give Ray more memory (`ray start --object-store-memory`). The run "
        "can be resumed."
    )


class Node(NamedTuple):
    """One of a cluster's machines, or this one."""

    node_id: str
    name: str  # its address and, where another, its host's name
    room: int  # for so many workers at a time
    gpu: str = ""  # kind of its GPUs


def nodes_alive(ray: Any, cpus: int, gpus: float) -> list[Node]:
    """Nodes that are there now, with room for workers of so many CPUs and GPUs."""
    found = [
        Node(
            node["NodeID"],
            _name(node),
            room(node["Resources"], cpus, gpus),
            " ".join(sorted(r for r in node["Resources"] if r.startswith("accelerator_type:"))),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.name)


def _name(node: Mapping[str, Any]) -> str:
    address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
    return f"{address} ({host})" if host != address else address


def room(resources: Mapping[str, float], cpus: int, gpus: float) -> int:
    """How many workers a node's CPUs and GPUs have room for; a share of a GPU is of one GPU.

    >>> room({"CPU": 16, "GPU": 2}, 2, 0), room({"CPU": 16, "GPU": 2}, 2, 0.3)
    (8, 6)
    """
    fitting = int(resources.get("CPU", 0) // cpus)
    if gpus:
        whole = int(resources.get("GPU", 0))
        fitting = min(fitting, int(whole // gpus) if gpus >= 1 else whole * int(1 / gpus + 1e-9))
    return fitting


def spread(nodes: Sequence[Node], most: int) -> list[Node]:
    """The node of each worker: ``most`` of them at the most, dealt to the nodes in turn.

    >>> small, large = Node("s", "10.0.0.1", 1), Node("l", "10.0.0.2", 3)
    >>> [node.node_id for node in spread([small, large], 3)]
    ['s', 'l', 'l']
    """
    turns = range(max((node.room for node in nodes), default=0))
    return [node for turn in turns for node in nodes if turn < node.room][:most]


def on(node: Node) -> dict[str, Any]:
    """Ray's options for what has to run on this node and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}


class Account(NamedTuple):
    """What a machine says of itself."""

    trouble: str = ""  # why clients cannot work there
    kind: str = ""  # of its processor and kernels, which decide the bits
    prepared: Any = None


def account(prepare: Callable[[], Any] | None, needed: Mapping[str, str]) -> Account:
    """Prepare this machine, and say what it is; of another one as a Ray task.

    ``prepare`` fetches what clients need to find on the machine; ``needed`` are versions that it
    has to have, but for fairflower's own.
    """
    found = versions()
    # Of builds for several devices the local part differs: 2.5.1+cpu, 2.5.1+cu124.
    lacking = [
        f"{package} {found[package]} (needed: {version})"
        for package, version in needed.items()
        if package != "fairflower" and _public(found[package]) != _public(version)
    ]
    if lacking:
        return Account(f"{', '.join(lacking)}. Install that there, and start its Ray anew.")
    try:
        prepared = prepare() if prepare else None
    except USER_ERRORS as error:
        return Account(f"{error} (A node looks where the environment of its `ray start` says.)")
    facts = machine()
    kind = (facts["processor"], facts["kernels"], facts["instructions"], f"torch {found['torch']}")
    return Account("", ", ".join(kind), prepared)


def _public(version: str) -> str:
    return version.partition("+")[0]


class Nodes:
    """Nodes of a cluster, each of which is asked for its account before it gets workers.

    A worker is granted ``cpus`` and ``gpus``; ``prepare`` (see `account`) has to return the same
    everywhere.
    """

    def __init__(self, ray: Any, cpus: int, gpus: float, prepare: Callable[[], Any] | None) -> None:
        self._ray, self._cpus, self._gpus, self._prepare = ray, cpus, gpus, prepare
        self._versions, self._here = versions(), account(prepare, {})
        self._known: set[str] = set()
        self._asked: dict[Any, Node] = {}  # reference to an account -> whose
        self._kinds: dict[str, list[str]] = defaultdict(list)  # -> names of nodes

    def begin(self) -> list[Node]:
        """Wait for the accounts of all nodes with room for a worker, and return these.

        ``ConfigError`` names those on which clients cannot work.
        """
        if self._here.trouble:
            raise ConfigError(self._here.trouble)
        self._ask()
        accounts: dict[Node, Account] = {}
        while self._asked:
            accounts |= self._answers(_LONG)
            if names := ", ".join(node.name for node in self._asked.values()):
                logger.warning("Waiting for Ray nodes to prepare their data: %s.", names)
        troubles = [(node.name, self._trouble(found)) for node, found in accounts.items()]
        if listing := "".join(f"\n  {name}: {why}" for name, why in troubles if why):
            raise ConfigError(f"Clients cannot work on these Ray nodes:{listing}")
        self._compare(accounts)
        return list(accounts)

    def joined(self) -> list[Node]:
        """Nodes that came since then, and are prepared; those that cannot be used are named."""
        self._ask()
        accounts = self._answers(0)
        for node, found in list(accounts.items()):
            if trouble := self._trouble(found):
                logger.warning("Ray node %s is left out: %s", node.name, trouble)
                del accounts[node]
            else:
                logger.warning("Ray node %s has joined.", node.name)
        self._compare(accounts)
        return list(accounts)

    def _trouble(self, found: Account) -> str:
        if not found.trouble and found.prepared != self._here.prepared:
            return "its data are others than here. Bring the same files there."
        return found.trouble

    def _ask(self) -> None:
        ask = self._ray.remote(num_cpus=0)(account)
        for node in nodes_alive(self._ray, self._cpus, self._gpus):
            if node.room and node.node_id not in self._known:
                self._known.add(node.node_id)
                answer = ask.options(**on(node)).remote(self._prepare, self._versions)
                self._asked[answer] = node

    def _answers(self, timeout: float) -> dict[Node, Account]:
        found: dict[Node, Account] = {}
        if not self._asked:
            return found
        errors = self._ray.exceptions
        done, _ = self._ray.wait([*self._asked], num_returns=len(self._asked), timeout=timeout)
        for reference in done:
            node = self._asked.pop(reference)
            try:
                found[node] = self._ray.get(reference)
            except (errors.TaskUnschedulableError, errors.NodeDiedError):
                logger.warning("Ray node %s is lost.", node.name)
            except errors.RayError as error:
                # Of a node that dies meanwhile the error may be any: a worker's, the network's.
                if not isinstance(error, errors.RayTaskError) and self._is_gone(node):
                    logger.warning("Ray node %s is lost.", node.name)
                else:
                    found[node] = Account(" ".join(str(error).split()))
        return found

    def _is_gone(self, node: Node) -> bool:
        """Whether a node that failed to answer is lost, as Ray sees some seconds later."""
        deadline = time.monotonic() + _NOTICED_IN
        while node.node_id in {n.node_id for n in nodes_alive(self._ray, self._cpus, self._gpus)}:
            if time.monotonic() > deadline:
                return False
            time.sleep(1)
        return True

    def _compare(self, accounts: Mapping[Node, Account]) -> None:
        """Say so where processors or kernels are not all of one kind."""
        known = len(self._kinds)
        for node, found in accounts.items():
            self._kinds[f"{found.kind} {node.gpu if self._gpus else ''}"].append(node.name)
        if len(self._kinds) > max(known, 1):
            listing = (f"\n  {', '.join(names)}: {kind}" for kind, names in self._kinds.items())
            logger.warning(
                "The Ray nodes are of %d kinds, which may round sums differently: the last bits of "
                "the model depend on who trains where, and will be others in the next run.%s",
                len(self._kinds),
                "".join(listing),
            )
