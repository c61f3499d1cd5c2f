"""Access to private and deprecated parts of Flower, for all supported versions.

No other module imports what is not public in Flower. A version of Flower without one of these parts
lacks only what needs it.
"""

import copy
import hashlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies

from fairflower.errors import NotInstalled

#: Names of SecAgg+'s records and of a workflow's, which messages and contexts contain.
RECORD_KEY_CONFIGS, RECORD_KEY_STATE = "secaggplus_configs", "secaggplus_state"
MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD = "config", "parameters"
WorkflowKey = SimpleNamespace(CURRENT_ROUND="current_round")

_CLASSIC, _SECURE = "Flower's classic API", "secure aggregation"
_CONSTANTS = "flwr.common.secure_aggregation.secaggplus_constants"

#: What is not public in Flower -> its module, and what does not work without it.
_PRIVATE = {
    name: (place, lost)
    for place, lost, names in (
        ("flwr.client", _CLASSIC, "NumPyClient"),
        ("flwr.client.mod", _SECURE, "secaggplus_mod"),
        ("flwr.common", _CLASSIC, "EvaluateIns EvaluateRes FitRes Scalar ndarrays_to_parameters"),
        ("flwr.common", f"{_CLASSIC} and {_SECURE}", "FitIns Parameters parameters_to_ndarrays"),
        ("flwr.common.serde", "`fairflower deploy leaves`", "recorddict_to_proto"),
        (_CONSTANTS, _SECURE, "Key Stage"),
        ("flwr.server", _SECURE, "LegacyContext"),
        ("flwr.server.client_manager", _CLASSIC, "ClientManager"),
        ("flwr.server.client_proxy", _CLASSIC, "ClientProxy"),
        ("flwr.server.strategy", _CLASSIC, "Strategy"),
        ("flwr.server.workflow", _SECURE, "SecAggPlusWorkflow"),
        ("flwr.server.workflow.secure_aggregation", _SECURE, "secaggplus_workflow"),
    )
    for name in names.split()
}


class _Missing(type):
    """Stand-in for a part that this version of Flower lacks; its use raises ``NotInstalled``."""

    error: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotInstalled(cls.error)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else NotInstalled(cls.error)


def __getattr__(name: str) -> Any:
    """Import a part of Flower that is not public when another module imports it from here."""
    if name not in _PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, lost = _PRIVATE[name]
    try:
        return getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError):
        error = (
            f"Flower {version('flwr')} has no {place}.{name}, which is not public and which {lost} "
            "needs. Install an earlier version of Flower; everything else works with this one."
        )
        return _Missing(name, (), {"error": error})


Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

#: Seconds that Flower's process waits for a run to stop; testing the model may take this long.
STOP_TIMEOUT = 60.0


def _task_identity() -> Any:
    """Return the task identity of this process, from which newer versions of Flower read a sender.

    None means an older version, in which the Grid sets the sender of a message.
    """
    with suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        return TaskIdentity
    return None


def set_task_identity(run_id: int = 1, node_id: int = 1) -> None:
    """Allow this process to construct ``Message`` objects outside a Flower run.

    Otherwise only Flower's runtimes set the identity.
    """
    if identity := _task_identity():
        identity.run_id, identity.task_id, identity.node_id = run_id, run_id, node_id


def ensure_task_identity() -> None:
    """Call `set_task_identity` unless Flower has set the identity."""
    identity = _task_identity()
    try:
        _ = identity and (identity.run_id, identity.node_id)
    except RuntimeError:  # not set
        set_task_identity()


@contextmanager
def stopping_with_flower(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` when Flower ends this process (``flwr stop``), and delay the exit.

    Flower's simulation runs the ServerApp in a thread. It does not notify this thread, and exits
    five seconds later. In a deployment Flower raises ``SystemExit`` in the ServerApp.
    """
    done = threading.Event()
    here = threading.current_thread()

    def leave() -> None:
        stop.set()
        if threading.current_thread() is not here:
            done.wait(STOP_TIMEOUT)

    for place in ("flwr.supercore.exit", "flwr.common.exit"):  # newer and older versions of Flower
        with suppress(ImportError):
            add = importlib.import_module(place).add_exit_handler
            try:
                add(leave, run_before_force_exit=True)
            except TypeError:  # older versions of Flower: all handlers together have five seconds
                add(leave)
            break
    try:
        yield
    finally:
        done.set()


def proxy_node_id(proxy: Any) -> int:
    """Return the node id of a classic client proxy.

    Proxies of ``start_server`` have no node id. They get a hash of the connection's name, so every
    new connection gets a new id.
    """
    if not hasattr(proxy, "node_id"):
        digest = hashlib.sha256(proxy.cid.encode()).digest()
        proxy.node_id = int.from_bytes(digest[:7], "big")
    return int(proxy.node_id)


def set_message_id(message: Message, message_id: str) -> None:
    """Set the id of a message, as a SuperLink does."""
    message.metadata.__dict__["_message_id"] = message_id


def set_request_id(reply: Message, message_id: str) -> None:
    """Set the id of the message that a reply answers; Flower's LocalDpMod leaves it empty."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id


def copied(record: Record, more: Mapping[str, Any] | None = None) -> Record:
    """Return a copy of a record with additional values.

    Flower's constructors would check every value again, which takes as long as training on a few
    images.
    """
    copied_record = copy.copy(record)
    copied_record.__dict__["_data"] = dict(record.__dict__["_data"])
    copied_record.update(more or {})
    return copied_record


def privacy_wrapper() -> str:
    """Return the class name of the differential-privacy wrapper that calls the strategy, or "".

    The wrapper is found on the call stack, because a wrapped strategy has no reference to it. It is
    an instance of one of Flower's wrappers, or of a class that derives from one.
    """
    classic = sys.modules.get("flwr.server.strategy")  # loaded if one of its wrappers is in use
    wrappers = tuple(
        kind
        for module in filter(None, (flower_strategies, classic))
        for name, kind in vars(module).items()
        if name.startswith(("DifferentialPrivacy", "DPFedAvg"))
    )
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = type(frame.f_locals.get("self"))
        if issubclass(kind, wrappers):
            return kind.__name__
        frame = frame.f_back
    return ""


@contextmanager
def unchanged_import_path() -> Iterator[None]:
    """Restore PYTHONPATH, to which Flower's engine adds this process's import path for Ray."""
    path = os.environ.get("PYTHONPATH")
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH", None)
        if path is not None:
            os.environ["PYTHONPATH"] = path


def is_deployed(grid: Grid) -> bool:
    """Return whether a grid may belong to a SuperLink, whose clients have their own data.

    Grids of this process are those of our engines, which say so, and of Flower's simulation.
    """
    for place in ("flwr.superlink.grid", "flwr.server.grid"):  # newer and older versions of Flower
        module = sys.modules.get(place)  # loaded if its grid is in use
        if isinstance(grid, getattr(module, "InMemoryGrid", ())):
            return False
    return not getattr(grid, "simulated", False)


def is_supernode(context: Context) -> bool:
    """Return whether a ClientApp answers for a SuperNode, and not for a client of a simulation.

    In a simulation a node config has only the two keys that Flower writes into it.
    """
    identity, own = _task_identity(), False
    with suppress(RuntimeError):  # not set
        own = bool(identity) and identity.node_id == context.node_id  # of a SuperNode's process
    return own or not context.node_config.keys() <= {"partition-id", "num-partitions"}
