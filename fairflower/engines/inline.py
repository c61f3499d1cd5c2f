"""The inline engine: a ``Grid`` that runs clients one after another in this process.

Useful for debugging, notebooks, profiling, fast tests and machines without Ray. The ServerApp, the
ClientApp and the messages are the same as on other grids.
"""

import copy
import math
import threading
import time
import traceback
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fairflower import flower_compat
from fairflower.errors import GpuMemoryError, RunInterrupted
from fairflower.training.device import out_of_memory

CLIENT_APP_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION

RUN_ID = 1
SERVER_NODE = 1
FIRST_NODE = 1000  # node ids that cannot be confused with client ids


class _Contexts(UserDict[int, Context]):
    """Contexts by node id. Each is created when it is needed: of many clients most never are."""

    def __init__(self, num_supernodes: int, run_config: Mapping[str, Any]) -> None:
        self._shared = {"num-partitions": num_supernodes}, run_config
        self.data: dict[int, Any] = dict.fromkeys(range(FIRST_NODE, FIRST_NODE + num_supernodes))

    def __getitem__(self, node: int) -> Context:
        if self.data[node] is None:
            size, run_config = self._shared
            numbers: dict[str, Any] = {"partition-id": node - FIRST_NODE, **size}
            self.data[node] = Context(RUN_ID, node, numbers, RecordDict(), dict(run_config))
        return self.data[node]  # type: ignore[no-any-return]


class InlineGrid(Grid):
    """A Flower grid without network, threads or other processes.

    A message is handled when its reply is first requested, so the caller can stop between
    two clients. Node k has ``partition-id`` k.

    ``client_app`` is the ClientApp of all nodes, and ``run_config`` their ``context.run_config``.
    With ``raise_errors``, a client's exception is raised, for debugging, instead of an error reply.
    """

    #: Clients answer while the server asks for replies, so no reply can be late.
    computes_replies = True

    simulated = True  # no client is elsewhere, with data that the server cannot read

    #: Whether asking one client is enough (`fairflower.server.registration`), as with fairflower's
    #: ClientApp: all have the same data, and node ids follow each other as the ``partition-id`` do.
    have_same_data = False

    def __init__(
        self,
        client_app: ClientApp,
        num_supernodes: int,
        run_config: Mapping[str, Any] | None = None,
        *,
        raise_errors: bool = False,
    ) -> None:
        flower_compat.ensure_task_identity()
        self.client_app = client_app
        self.raise_errors = raise_errors
        self.contexts = _Contexts(num_supernodes, run_config or {})
        self._pending: OrderedDict[str, Message] = OrderedDict()
        self._count = 0

    def set_run(self, run: object) -> None:
        """Do nothing, because there is only one run."""

    @property
    def run(self) -> object:  # type: ignore[override]
        """Raise ``NotImplementedError``, because the inline engine does not store a Flower run."""
        raise NotImplementedError("The inline engine does not store a Flower run.")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; deprecated in Flower."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, which are always connected."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages for ``pull_messages``, which runs them; return their ids."""
        ids = []
        for message in messages:
            self._count += 1
            flower_compat.set_ids(message, message_id=f"message-{self._count}")
            if message.metadata.dst_node_id not in self.contexts:
                ids.append("")  # as Flower does
                continue
            self._pending[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the first queued message among ``message_ids`` and return its reply."""
        # At each poll, all ids of a round are passed: copying them would take quadratic time.
        wanted = message_ids if isinstance(message_ids, Set) else set(message_ids)
        for message_id in self._pending:
            if message_id in wanted:
                return [self._deliver(self._pending.pop(message_id))]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages, and return the replies that arrive within ``timeout`` seconds.

        Replies are in the order of the messages, so that a strategy's sums are reproducible. If
        this process computes the replies, ``timeout`` has no effect.
        """
        messages = list(messages)
        limit = math.inf if timeout is None or self.computes_replies else timeout
        arrived = send_and_receive(self, messages, limit, threading.Event())
        replies = {reply.metadata.reply_to_message_id: reply for reply in arrived}
        ids = [message.metadata.message_id for message in messages]
        return [replies[i] for i in ids if i in replies]

    def close(self) -> None:
        """Do nothing, because there are no other processes."""

    def _deliver(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        request = copy.copy(message)
        set_content(request, message.content)
        reply = answer(self.client_app, request, self.contexts[node], self.raise_errors)
        if reason := memory_problem(reply):
            raise gpu_memory_error(reason)
        self._count += 1
        flower_compat.set_ids(reply, message_id=f"message-{self._count}")
        return reply


def send_and_receive(
    grid: Grid, messages: Iterable[Message], timeout: float, stop: threading.Event
) -> list[Message]:
    """Push messages, and return the replies that arrive within ``timeout`` seconds.

    Flower's method polls ten times a second. Unlike it, this function raises ``RunInterrupted`` as
    soon as ``stop`` is set, and then pushes nothing. It immediately polls again if a grid itself
    waits for replies (`fairflower.engines.ray`). After the timeout, a grid with a method
    ``discard`` drops messages that no worker has received, so that they do not delay the next
    round. A grid that computes replies while it is asked for them (``computes_replies``, the inline
    engine) has no timeout as long as it replies.
    """
    if stop.is_set():
        raise RunInterrupted
    messages = list(messages)
    waiting = set()
    for message, message_id in zip(messages, grid.push_messages(messages), strict=True):
        # A message that Flower rejects has no id, for example if the node is disconnected.
        flower_compat.set_ids(message, message_id=message_id or "")
        waiting |= {message_id} - {"", None}
    deadline = time.monotonic() + timeout
    patient = getattr(grid, "computes_replies", False)
    replies: list[Message] = []
    pause = 0.005
    while waiting:
        if stop.is_set():
            raise RunInterrupted
        asked = time.monotonic()
        pulled = grid.pull_messages(waiting)
        # A grid may also return late replies to earlier messages.
        every = {m.metadata.reply_to_message_id: m for m in pulled}  # a node may reply twice
        arrived = {message_id: m for message_id, m in every.items() if message_id in waiting}
        replies += arrived.values()
        waiting.difference_update(arrived)  # `-=` would copy the set at every poll
        if waiting and time.monotonic() > deadline and not (patient and arrived):
            if discard := getattr(grid, "discard", None):
                discard(waiting)
            break
        if arrived:
            pause = 0.005
        else:
            stop.wait(pause - (time.monotonic() - asked))
            pause = min(2 * pause, 0.1)
    return replies


def set_content(message: Message, content: Mapping[str, Any]) -> None:
    """Set a message's content to copies of records that share the arrays' immutable bytes."""
    message.__dict__["_content"] = RecordDict(
        {name: flower_compat.copied(r) for name, r in content.items()}
    )


def answer(
    client_app: Callable[[Message, Context], Message],
    message: Message,
    context: Context,
    raise_errors: bool = False,
) -> Message:
    """Return the app's reply, or an error reply if the app raises an exception."""
    try:
        reply = client_app(message, context)
    except Exception as error:
        if raise_errors:
            raise
        reply = error_reply(message, error)
    # A mod's reply may name no message, such as that of Flower's LocalDpMod.
    flower_compat.set_ids(reply, reply_to_message_id=message.metadata.message_id)
    return reply


def memory_problem(reply: Message) -> str:
    """Return why a client ran out of GPU memory, or "" if it did not."""
    return out_of_memory(str(reply.error.reason)) if reply.has_error() else ""


def gpu_memory_error(
    reason: str, who: str = "A client", large: str = "train.batch-size or measure.memory-mb"
) -> GpuMemoryError:
    """Return the error for a client or the server's test that ran out of GPU memory."""
    return GpuMemoryError(
        f"{who} ran out of GPU memory ({reason}). Resume the run with fewer parallel clients "
        "(--workers, or a larger client-gpus) or fewer parallel runs (--jobs), or start a new "
        f"run with a smaller {large}."
    )


def error_reply(message: Message, error: Exception) -> Message:
    """Return an error reply like those of Flower's engines, which end with the error's text."""
    reason = f"{''.join(traceback.format_exception(error))}\nMessage: {error}"
    return Message(Error(code=CLIENT_APP_RAISED, reason=reason), reply_to=message)
