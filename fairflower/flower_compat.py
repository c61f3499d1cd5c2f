"""Access to private and deprecated parts of Flower, for all supported versions.

No other module imports what is not public in Flower. A version of Flower without one of these parts
lacks only what needs it.
"""

import base64
import copy
import hashlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies

from fairflower.errors import USER_ERRORS, NotInstalled, error_text

#: Names of SecAgg+'s records and of a workflow's, which messages and contexts contain.
RECORD_KEY_CONFIGS, RECORD_KEY_STATE = "secaggplus_configs", "secaggplus_state"
MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD = "config", "parameters"
WorkflowKey = SimpleNamespace(CURRENT_ROUND="current_round")

_CLASSIC, _SECURE = "Flower's classic API", "secure aggregation"
_SITE = "`fairflower deploy site`"
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
        ("flwr.server.strategy", _CLASSIC, "FedAvg"),
        ("flwr.server.workflow", _SECURE, "SecAggPlusWorkflow"),
        ("flwr.server.workflow.secure_aggregation", _SECURE, "secaggplus_workflow"),
        ("flwr.proto.runtime_pb2", _SITE, "AcquireTaskRequest SendTaskHeartbeatRequest"),
        ("flwr.supercore.interceptors", _SITE, "RuntimeTokenHttpInterceptor"),
        ("flwr.supercore.interceptors", _SITE, "SuperExecAuthHttpInterceptor"),
        ("flwr.supercore.runtime", _SITE, "RuntimeHttpClient"),
        ("flwr.supernode.runtime.run_clientapp", _SITE, "pull_task_input"),
        ("flwr.supernode.runtime.run_clientapp", _SITE, "push_message push_task_output"),
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


class OneSentence(logging.Filter):
    """Shows an error that users can fix as its text, where Flower's log has a traceback.

    So it does with a SuperLink's certificate that has ended, or is not trusted. Flower also says
    that the exception was unhandled; this line is left out.
    """

    told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is shown, and shorten it."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        text = error_text(error) if isinstance(error, USER_ERRORS) else ""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            text = (
                f"The SuperLink's certificate is refused ({error}). Renew it, and resume the run."
            )
        if text:
            record.msg, record.args, record.exc_info, self.told = text, (), None, True
            return True
        return not (self.told and "nhandled exception" in record.getMessage())


def proxy_node_id(proxy: Any) -> int:
    """Return the node id of a classic client proxy.

    Proxies of ``start_server`` have no node id. They get a hash of the connection's name, so every
    new connection gets a new id.
    """
    if not hasattr(proxy, "node_id"):
        digest = hashlib.sha256(proxy.cid.encode()).digest()
        proxy.node_id = int.from_bytes(digest[:7], "big")
    return int(proxy.node_id)


class SiteKey(NamedTuple):
    """The name under which a SuperNode was registered, and the fingerprint of its public key."""

    name: str
    fingerprint: str

    @classmethod
    def of(cls, node: Any) -> "SiteKey | None":
        """Return what Flower says of a node; None if it was registered without a name.

        The fingerprint is that of ``ssh-keygen -lf site.key.pub``.
        """
        if not (name := getattr(node, "name", "")) or not node.public_key:
            return None
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        return cls(name, fingerprint(load_pem_public_key(node.public_key)))


def fingerprint(key: Any) -> str:
    """Return a public key's fingerprint, as ``ssh-keygen -l`` shows it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def connected_nodes(grid: Grid) -> dict[int, SiteKey | None]:
    """Return the ids of connected nodes, with name and key if they were registered with a name.

    Names need Flower 1.40 or newer, and ``flwr supernode register KEY --name NAME``.
    """
    if getattr(type(grid), "get_nodes", None) is getattr(Grid, "get_nodes", None):
        return dict.fromkeys(grid.get_node_ids())  # a grid without names
    return {node.node_id: SiteKey.of(node) for node in grid.get_nodes()}


def nodes_at(superlink: str | None) -> list[Any]:
    """Return what a SuperLink says of its SuperNodes: name, key, status and times.

    ``superlink`` is a name in the configuration of the ``flwr`` command; None means its default.
    """
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest

    client = init_http_client_from_connection(read_superlink_connection(superlink))
    try:
        with flwr_cli_exc_handler():
            return list(client.ListNodes(ListNodesRequest()).nodes_info)
    finally:
        client.close()


def set_ids(message: Message, **values: str | int) -> None:
    """Set ``message_id``, ``run_id`` or ``reply_to_message_id``, as a SuperLink does."""
    message.metadata.__dict__.update({f"_{name}": value for name, value in values.items()})


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


class Task:
    """A message that a SuperNode has received, with the node's context, until it is answered."""

    def __init__(self, address: str, token: str, kind: str) -> None:
        self.is_client_app = kind == "flwr-clientapp"
        self._client = _runtime_client(address, _part("RuntimeTokenHttpInterceptor")(token))
        # It also has the run's bundle of code, which stays what it is: bytes.
        self.message, self.context, _, _ = _part("pull_task_input")(self._client)

    def keep(self) -> None:
        """Tell the SuperNode that somebody is still at work; it waits for a minute."""
        self._client.SendTaskHeartbeat(_part("SendTaskHeartbeatRequest")())

    def answer(self, reply: Message | str, context: Context) -> None:
        """Send the reply, or the reason for an error, and the node's context after it."""
        failed, reason = isinstance(reply, str), reply if isinstance(reply, str) else ""
        if isinstance(reply, str):
            reply = Message(Error(code=_APP_RAISED, reason=reason), reply_to=self.message)
        status = "failed" if failed else "completed"
        try:
            _part("push_message")(self._client, reply, context)
        finally:  # a run that has ended takes no reply, but the node keeps its context
            _part("push_task_output")(self._client, context, status, reason)
            self._client.close()


class TaskQueue:
    """Messages for a SuperNode that was started with ``--isolation process``.

    ``address`` is that of its Runtime API on this machine, and ``secret`` the content of its
    ``--superexec-auth-secret-file``: without it, any user of the machine could fetch messages.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        method = "/flwr.proto.Runtime/AcquireTask"
        signed = _part("SuperExecAuthHttpInterceptor")(
            master_secret=secret, protected_methods={method}
        )
        self._address, self._client = address, _runtime_client(address, signed)

    def next(self) -> Task | None:
        """Return the next message, or None if there is none or the SuperNode does not answer.

        Raises an exception of Flower's or NumPy's if a message cannot be read; the SuperNode then
        answers it with an error after a minute.
        """
        from httpx import TransportError

        kinds = ["flwr-clientapp", "flwr-agentapp"]  # a SuperNode waits until its message is done
        with suppress(TransportError):
            acquired = self._client.AcquireTask(
                _part("AcquireTaskRequest")(supported_task_types=kinds)
            )
            if acquired.token:
                return Task(self._address, acquired.token, acquired.task.type)
        return None


_APP_RAISED = 2  # Flower's code of an error reply: the ClientApp raised an exception
_PATIENCE = 300.0  # seconds until a request to a SuperNode on this machine has failed


_part = __getattr__


def _runtime_client(address: str, interceptor: Any) -> Any:
    # On a busy machine a SuperNode may take minutes. Flower's own retries end the process instead.
    client = _part("RuntimeHttpClient")
    return client(f"http://{address}", interceptors=[interceptor], timeout=_PATIENCE)
