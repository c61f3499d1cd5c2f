"""Our engine on Ray: clients on worker processes, arrays in shared memory.

Flower's own simulation engine pickles the whole model into and out of every message and
looks for replies ten times a second. Here a record of arrays is put into Ray's object store
once, however many messages carry it, and workers read it in place; the server reads what
they send back in place, too. Only Ray's public interface and Flower's apps and messages are
used. Where Ray runs, and what of, is said in `fairflower.engines.cluster`.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fairflower.arrays import SharedArray, array_bytes
from fairflower.engines.cluster import (
    Nodes,
    connect,
    keeping_signals,
    no_room_left,
    prepare_ray,
)
from fairflower.engines.inline import RUN_ID, SERVER_NODE, InlineGrid, answer, failed, set_content
from fairflower.engines.workers import Worker, Workers, done
from fairflower.errors import EngineError
from fairflower.flower_compat import set_task_identity

#: Bytes from which a record of arrays, or what a node keeps, is an object of its own to Ray.
_LARGE = 64 * 1024

#: Batches that a worker has at a time: one at work, and one so that it need not wait.
_IN_FLIGHT = 2

#: Seconds that a batch of messages may take: who waits for a reply sees one so often.
_BATCH = 0.25

#: Of what is left for a worker to do in a round, the part that it gets at most in one batch.
_SHARE = 0.7

#: Seconds that one look for replies waits, if none are there.
_PATIENCE = 0.1

#: Of the server's own node, in messages.
_HERE = "the server's node"


@dataclass
class _Task:
    """A message on its way."""

    message: Message
    #: Records of its content that lie in the object store.
    stored: dict[str, Any]
    #: Workers that have died with it.
    deaths: int = 0


@dataclass
class _Batch:
    """Messages that a worker answers in one call, and references to the large states it leaves."""

    tasks: list[_Task]
    states: list[Any]


class _Request(NamedTuple):
    """What a worker gets of a message."""

    message: Message  # without its large records
    names: list[str]  # of all its records, in order
    stored: dict[str, Any]  # references to the large ones
    context: Context
    state: bytes | None  # what the node keeps, pickled; None if it is large, and comes apart


class RayGrid(InlineGrid):
    """The inline grid with its clients on Ray actors, several at a time.

    The clients that took longest in the round before are begun first; those that took
    little are sent together. A worker that dies is replaced while its node is there, and the
    clients that it was at work on are tried once more, each by itself, wherever there is room.
    Results do not depend on who works on what, nor where or when.

    There are ``workers`` processes; on a cluster, whose ``address`` is as of `connect`, at the
    most so many, with 0 as many as its nodes have room for. Each is granted ``client_cpus`` and
    ``client_gpus``, of which a part is possible. ``prepare`` is called once on every node of a
    cluster before clients run there, and has to return what it returns here. ``ConfigError`` if
    no node has room for a worker, or one of a cluster cannot be used.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_supernodes: int,
        run_config: Mapping[str, Any] | None = None,
        *,
        workers: int,
        client_cpus: int = 1,
        client_gpus: float = 0.0,
        address: str = "",
        prepare: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(client_app, num_supernodes, run_config)
        with keeping_signals():
            ray = self._ray = connect(address, workers * client_cpus)
        # Ray's client pickles what comes and goes.
        shared = not address.startswith("ray://")
        if shared:
            share_arrays()
        # The app may come from a module that only this process knows how to find.
        arguments = ray.put(ray.cloudpickle.dumps(client_app)), sys.path, shared
        self._here = ray.get_runtime_context().get_node_id()
        self._tasks: deque[_Task] = deque()  # to be handed out
        # What nodes keep, pickled; references to it where it is large.
        self._states: dict[int, Any] = dict.fromkeys(self.contexts, pickle.dumps(RecordDict()))
        self._seconds: dict[tuple[int, str], float] = {}  # node, type -> of its last message
        granted = client_cpus, client_gpus
        most = min(workers or num_supernodes, num_supernodes)
        try:
            cluster = Nodes(ray, *granted, prepare) if address else None
            self._workers = Workers(ray, Actor, arguments, most, *granted, cluster)
        except BaseException:
            self.close()
            raise

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand out messages, and queue those for which no worker is free."""
        self._workers.look_for_nodes()
        ids = list(super().push_messages(messages))
        pushed = [self._pending.pop(i) for i in ids if i]
        stored: dict[int, Any] = {}  # id of a record -> its reference
        for message in pushed:
            large = {
                name: record
                for name, record in message.content.array_records.items()
                if _num_bytes(record) >= _LARGE
            }
            for record in large.values():
                if id(record) not in stored:
                    stored[id(record)] = self._put(record)
            self._tasks.append(_Task(message, {n: stored[id(r)] for n, r in large.items()}))
        self._tasks = deque(sorted(self._tasks, key=self._expected, reverse=True))
        self._hand_out()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return all replies that have come in; wait a moment for the first.

        ``EngineError`` if no worker is left, or the object store and the disk are full.
        """
        at_work = [reference for worker in self._workers.at_hand for reference in worker.batches]
        if not at_work and not self._tasks:
            return []
        if awaited := [*at_work, *self._workers.starting]:
            self._ray.wait(awaited, timeout=_PATIENCE)
        arrived = set(done(self._ray, at_work))
        replies = []
        for worker in list(self._workers.at_hand):
            for reference in [r for r in worker.batches if r in arrived]:
                replies += self._receive(worker, reference)
        self._hand_out()
        if not self._workers.at_hand and not self._workers.starting:
            raise EngineError(
                "No worker is left, and none can be started: all Ray nodes are lost, or refuse. "
                "Start the nodes again, and resume the run."
            )
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and wait for their replies, at most ``timeout`` seconds.

        Replies come in the order of the messages: a strategy that adds them up one by one
        gets the same sum whoever was first.
        """
        ids = [i for i in self.push_messages(messages) if i]
        replies: dict[str, Message] = {}
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not replies.keys() >= set(ids) and time.monotonic() < deadline:
            for reply in self.pull_messages(ids):
                replies[reply.metadata.reply_to_message_id] = reply
        return [replies[i] for i in ids if i in replies]

    def close(self) -> None:
        """End the workers, and Ray itself unless it is a cluster's."""
        self._ray.shutdown()

    def _expected(self, task: _Task) -> float:
        """Seconds that the node's last message of this type took; long, if there was none."""
        metadata = task.message.metadata
        return self._seconds.get((metadata.dst_node_id, metadata.message_type), math.inf)

    def _hand_out(self) -> None:
        """Give every worker a batch, and another as long as that leaves one for everybody."""
        self._workers.take_up()
        workers = self._workers.at_hand
        for depth in range(1, _IN_FLIGHT + 1):
            for worker in workers:
                spare = len(self._tasks) > (0 if depth == 1 else len(workers))
                if spare and len(worker.batches) < depth and self._may_follow(worker):
                    self._send(worker, self._next_batch())

    def _may_follow(self, worker: Worker) -> bool:
        """Whether the next task may wait behind what a worker has.

        Who has died once is alone on a worker: if that dies, it is known with whom. (Of two
        batches, the first may have been answered, and its replies died with the worker.)
        """
        there = [task for batch in worker.batches.values() for task in batch.tasks]
        return not there or not any(task.deaths for task in (self._tasks[0], *there))

    def _next_batch(self) -> list[_Task]:
        """The first of the tasks, and as many others as are done in little time.

        Batches get smaller towards the end of a round, so that the workers end together.
        """
        left = sum(map(self._expected, self._tasks))
        most = min(_BATCH, _SHARE * left / len(self._workers.at_hand))
        batch = [self._tasks.popleft()]
        seconds = self._expected(batch[0])
        while self._tasks and not batch[0].deaths and not self._tasks[0].deaths:
            seconds += self._expected(self._tasks[0])
            if seconds > most:
                break
            batch.append(self._tasks.popleft())
        return batch

    def _send(self, worker: Worker, tasks: list[_Task]) -> None:
        requests = []
        held = []
        for task in tasks:
            content, node = task.message.content, task.message.metadata.dst_node_id
            small = copy.copy(task.message)
            set_content(small, {n: r for n, r in content.items() if n not in task.stored})
            state = self._states[node]
            if not isinstance(state, bytes):
                held.append(state)
                state = None
            context = self.contexts[node]
            requests.append(_Request(small, list(content), task.stored, context, state))
        answer = worker.actor.answer.options(num_returns=1 + len(held))
        returned = answer.remote(requests, *held)
        replies, *states = returned if held else [returned]
        worker.batches[replies] = _Batch(tasks, states)

    def _receive(self, worker: Worker, reference: Any) -> list[Message]:
        if reference not in worker.batches:
            return []  # the worker has died, and all that it had was taken from it
        errors = self._ray.exceptions
        try:
            replies = self._ray.get(reference)
            large = iter(self._kept(worker, worker.batches[reference].states))
        except errors.RayActorError as error:
            return self._bury(worker, error)
        except errors.ObjectLostError as error:  # with its node
            return self._try_again(worker.batches.pop(reference), error)
        except (errors.OutOfDiskError, errors.ObjectStoreFullError) as error:
            there = isinstance(error, errors.RayTaskError)
            raise no_room_left(worker.node.name if there else _HERE) from error
        except errors.RayError as error:
            return [failed(task.message, error) for task in worker.batches.pop(reference).tasks]
        tasks = worker.batches.pop(reference).tasks
        for task, (_, seconds, state) in zip(tasks, replies, strict=True):
            node = task.message.metadata.dst_node_id
            self._seconds[node, task.message.metadata.message_type] = seconds
            if state is None:
                state = next(large)
            elif not isinstance(state, bytes):  # it has become large
                state = self._put(state)
            self._states[node] = state
        return [reply for reply, _, _ in replies]

    def _kept(self, worker: Worker, states: list[Any]) -> list[Any]:
        """References to large states that survive the worker's node."""
        if worker.node.node_id == self._here:
            return states
        return [self._put(self._ray.get(state)) for state in states]

    def _put(self, record: object) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.put(record)
        except (errors.OutOfDiskError, errors.ObjectStoreFullError) as error:
            raise no_room_left(_HERE) from error

    def _bury(self, worker: Worker, error: Exception) -> list[Message]:
        """Replace a dead worker."""
        at_work, *queued = worker.batches.values()
        self._tasks.extendleft(task for batch in reversed(queued) for task in reversed(batch.tasks))
        worker.batches = {}
        self._workers.replace(worker)
        return self._try_again(at_work, error)

    def _try_again(self, batch: _Batch, error: Exception) -> list[Message]:
        """What died with a worker or a node is tried once more, then given up."""
        for task in batch.tasks:
            task.deaths += 1
        self._tasks.extendleft(task for task in reversed(batch.tasks) if task.deaths == 1)
        return [failed(task.message, error) for task in batch.tasks if task.deaths > 1]


class Actor:
    """A worker: calls the ClientApp, which it gets pickled, and the paths to its modules."""

    def __init__(self, client_app: bytes, paths: list[str], shared: bool) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.path += [path for path in paths if path not in sys.path]
        set_task_identity(RUN_ID, SERVER_NODE)
        if shared:
            share_arrays()
        self._pickled = client_app
        self._records: dict[str, ArrayRecord] = {}  # large ones of the last batch, by reference

    @functools.cached_property
    def _app(self) -> ClientApp:
        """The app; what it raises as it is imported is the reply to a message."""
        app: ClientApp = prepare_ray().cloudpickle.loads(self._pickled)
        return app

    def answer(self, requests: list[_Request], *held: RecordDict) -> Any:
        """Answer one message after another; ``held`` are the large states of nodes that have one.

        The replies come back each with the seconds that it took and the state that it leaves,
        pickled or, if it has become large, as it is; behind them the large states of the same
        nodes as before.
        """
        with suppress(Exception):  # which is then the reply to every message
            _ = self._app  # its import is no client's time
        replies: list[tuple[Message, float, bytes | RecordDict | None]] = []
        large = iter(held)
        left = []
        used = {reference.hex(): reference for r in requests for reference in r.stored.values()}
        self._records = {
            key: self._records[key] if key in self._records else prepare_ray().get(reference)
            for key, reference in used.items()
        }
        for message, names, stored, context, state in requests:
            begin = time.perf_counter()
            records = {n: self._records[r.hex()] for n, r in stored.items()}
            content = {**message.content, **records}
            set_content(message, {name: content[name] for name in names})
            context.state = next(large) if state is None else pickle.loads(state)
            reply = answer(lambda *request: self._app(*request), message, context)
            seconds = time.perf_counter() - begin
            if state is None:
                left.append(context.state)
                replies.append((reply, seconds, None))
            else:
                replies.append((reply, seconds, _pickled_if_small(context.state)))
        return [replies, *left] if left else replies


def _pickled_if_small(state: RecordDict) -> bytes | RecordDict:
    small = sum(map(_num_bytes, state.array_records.values())) < _LARGE
    return pickle.dumps(state) if small else state


def _num_bytes(record: ArrayRecord) -> int:
    return sum(len(array_bytes(array)) for array in record.values())


def share_arrays() -> None:
    """Let Ray move the bytes of Flower's arrays apart from the rest, to be read in place."""
    register = prepare_ray().util.register_serializer
    for kind in (Array, SharedArray):
        register(kind, serializer=_parts, deserializer=_whole)


def _parts(array: Array) -> tuple[str, tuple[int, ...], str, NDArray[np.uint8]]:
    return array.dtype, array.shape, array.stype, np.frombuffer(array_bytes(array), np.uint8)


def _whole(parts: tuple[str, tuple[int, ...], str, NDArray[np.uint8]]) -> Array:
    return SharedArray(*parts[:3], parts[3].data)
