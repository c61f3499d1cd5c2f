"""The inline engine: a ``Grid`` that runs clients one after another in this process.

Useful for debugging, notebooks, profiling, fast tests and machines without Ray. The ServerApp, the
ClientApp and the messages are the same as on other grids.
"""

from __future__ import annotations

import copy
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fairflower.errors import GpuMemoryError
from fairflower.flower_compat import copied, set_message_id, set_task_identity
from fairflower.training.gpus import out_of_memory

CLIENT_APP_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION

RUN_ID = 1
SERVER_NODE = 1
FIRST_NODE = 1000  # node ids that cannot be confused with client ids


class _Contexts(MutableMapping[int, Context]):
    """Contexts by node id. Each is created when it is needed: of many clients most never are."""

    def __init__(self, num_supernodes: int, run_config: Mapping[str, Any]) -> None:
        self._num_supernodes, self._run_config = num_supernodes, run_config
        nodes = range(FIRST_NODE, FIRST_NODE + num_supernodes)
        self._created: dict[int, Context | None] = dict.fromkeys(nodes)

    def __getitem__(self, node: int) -> Context:
        if (context := self._created[node]) is None:
            numbers: dict[str, Any] = {"num-partitions": self._num_supernodes}
            numbers["partition-id"] = node - FIRST_NODE
            context = Context(RUN_ID, node, numbers, RecordDict(), dict(self._run_config))
            self._created[node] = context
        return context

    def __setitem__(self, node: int, context: Context) -> None:
        self._created[node] = context

    def __delitem__(self, node: int) -> None:
        del self._created[node]

    def __iter__(self) -> Iterator[int]:
        return iter(self._created)

    def __len__(self) -> int:
        return len(self._created)


class InlineGrid(Grid):
    """A Flower grid without network, threads or other processes.

    A message is handled when its reply is first requested, so the caller can stop between
    two clients. Node k has ``partition-id`` k.

    Parameters
    ----------
    client_app : ClientApp
        The ClientApp of all nodes.
    num_supernodes : int
        Number of nodes.
    run_config : mapping, optional
        ``context.run_config`` of the clients.
    raise_errors : bool, default=False
        Whether to raise a client's exception, for debugging, instead of returning an error reply.
    """

    #: Clients answer while the server asks for replies, so no reply can be late.
    computes_replies = True

    #: Whether all clients have the same data, so that asking one of them is enough
    #: (`fairflower.server.discovery`): `launch` sets it for fairflower's own ClientApp.
    have_same_data = False

    def __init__(
        self,
        client_app: ClientApp,
        num_supernodes: int,
        run_config: Mapping[str, Any] | None = None,
        *,
        raise_errors: bool = False,
    ) -> None:
        set_task_identity(RUN_ID, SERVER_NODE)
        self.client_app = client_app
        self.raise_errors = raise_errors
        self.contexts = _Contexts(num_supernodes, run_config or {})
        self._pending: OrderedDict[str, Message] = OrderedDict()
        self._count = 0

    def partition_id(self, node: int) -> int:
        """Return the ``partition-id`` of a node."""
        return node - FIRST_NODE

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
            set_message_id(message, f"message-{self._count}")
            if message.metadata.dst_node_id not in self.contexts:
                ids.append("")  # as Flower does
                continue
            self._pending[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the first queued message among ``message_ids`` and return its reply."""
        wanted = as_set(message_ids)
        for message_id in self._pending:
            if message_id in wanted:
                return [self._deliver(self._pending.pop(message_id))]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Run all messages; ``timeout`` has no effect."""
        ids = self.push_messages(messages)
        return [reply for message_id in ids for reply in self.pull_messages([message_id])]

    def _deliver(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        request = copy.copy(message)
        set_content(request, message.content)
        call = ClientApp.__call__ if self.raise_errors else answer
        reply = call(self.client_app, request, self.contexts[node])
        if reason := memory_problem(reply):
            raise gpu_memory_error(reason)
        self._count += 1
        set_message_id(reply, f"message-{self._count}")
        return reply


def as_set(message_ids: Iterable[str]) -> Set[str]:
    """Return the ids as a set; not a copy of one, because a round's ids are passed at each poll."""
    return message_ids if isinstance(message_ids, Set) else set(message_ids)


def set_content(message: Message, content: Mapping[str, Any]) -> None:
    """Set a message's content to copies of records that share the arrays' immutable bytes."""
    message.__dict__["_content"] = RecordDict({name: copied(r) for name, r in content.items()})


def answer(
    client_app: Callable[[Message, Context], Message], message: Message, context: Context
) -> Message:
    """Return the app's reply, or an error reply if the app raises an exception."""
    try:
        return client_app(message, context)
    except Exception as error:
        return error_reply(message, error)


def memory_problem(reply: Message) -> str:
    """Return why a client ran out of GPU memory, or "" if it did not."""
    return out_of_memory(str(reply.error.reason)) if reply.has_error() else ""


def gpu_memory_error(reason: str) -> GpuMemoryError:
    """Return the error for a client that ran out of GPU memory."""
    return GpuMemoryError(
        f"A client ran out of GPU memory ({reason}). Resume the run with fewer parallel clients "
        "(--workers, or a larger client-gpus) or fewer parallel runs (--jobs), or start a new "
        "run with a smaller train.batch-size or measure.memory-mb."
    )


def error_reply(message: Message, error: Exception) -> Message:
    """Return an error reply like those of Flower's engines, which end with the error's text."""
    reason = f"{''.join(traceback.format_exception(error))}\nMessage: {error}"
    return Message(Error(code=CLIENT_APP_RAISED, reason=reason), reply_to=message)
