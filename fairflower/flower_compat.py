"""The few places where fairflower touches Flower's less public or ageing parts.

Tested on the oldest and the newest Flower that pyproject.toml admits.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.server.client_proxy import ClientProxy

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

#: Seconds that Flower's process waits for a run that it asked to stop: a test may take that long.
PATIENCE = 60.0


def set_task_identity(run_id: int = 1, node_id: int = 1) -> None:
    """Let this process construct ``Message`` objects outside a Flower run.

    Newer Flower takes the sender of a message from the process's task identity,
    which only its own runtimes set.
    """
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # older Flower leaves the sender to the Grid
        return
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, run_id, node_id


def ensure_task_identity() -> None:
    """Call `set_task_identity` where Flower has not: ``start_server`` and ``start_simulation``."""
    try:
        from flwr.supercore.task_identity import TaskIdentity

        _ = TaskIdentity.run_id, TaskIdentity.node_id
    except ImportError:
        return
    except RuntimeError:  # not set
        set_task_identity()


@contextmanager
def stopping_with_flower(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` when Flower ends this process, as after ``flwr stop``, and have it wait.

    Flower's simulation runs a ServerApp in a thread that it tells nothing, and ends the process
    five seconds later; in a deployment ``SystemExit`` is raised where the ServerApp is.
    """
    done = threading.Event()
    here = threading.current_thread()

    def leave() -> None:
        stop.set()
        if threading.current_thread() is not here:
            done.wait(PATIENCE)

    _call_before_exit(leave)
    try:
        yield
    finally:
        done.set()


def _call_before_exit(handler: Callable[[], None]) -> None:
    for place in ("flwr.supercore.exit", "flwr.common.exit"):  # newer Flower, and older
        with suppress(ImportError):
            add = importlib.import_module(place).add_exit_handler
            try:
                add(handler, run_before_force_exit=True)
            except TypeError:  # older Flower gives all handlers together five seconds
                add(handler)
            return


def proxy_node_id(proxy: ClientProxy) -> int:
    """The node id of a classic server's client; ``start_server``'s have none, and are given one.

    It is made from the name of the connection, of which there is a new one for every connection.
    """
    if not hasattr(proxy, "node_id"):
        digest = hashlib.sha256(proxy.cid.encode()).digest()
        proxy.node_id = int.from_bytes(digest[:7], "big")
    return proxy.node_id


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id


def copied(record: Record, more: Mapping[str, Any] | None = None) -> Record:
    """A record of its own with the same values, and ``more``.

    Flower's constructors would check every value again, which takes as long as training
    on a few images.
    """
    own = copy.copy(record)
    own.__dict__["_data"] = dict(record.__dict__["_data"])
    own.update(more or {})
    return own


def privacy_wrapper() -> str:
    """Name of Flower's differential-privacy wrapper that is at work now; "" if there is none.

    A strategy is not told that it is wrapped; who is calling tells.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = type(frame.f_locals.get("self")).__name__
        if name.startswith("DifferentialPrivacy"):
            return name
        frame = frame.f_back
    return ""
