"""fairflower's engine on Ray: clients in worker processes, and arrays in shared memory.

Flower's simulation engine pickles and unpickles the model for every message and polls for replies
ten times a second. This engine puts a record of arrays into Ray's object store once for all
messages that contain it. Workers, and the server for replies, read the arrays in place. Only public
interfaces of Ray and Flower are used.
"""

import copy
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fairflower.arrays import SharedArray, array_bytes
from fairflower.config import RunConfig
from fairflower.engines import inline
from fairflower.engines.ray_cluster import (
    Batch,
    RayNodes,
    Task,
    TaskQueue,
    Worker,
    Workers,
    connect,
    done,
    keeping_signals,
    last_words,
    object_store_full_error,
    prepare_ray,
)
from fairflower.errors import EngineError, logger
from fairflower.flower_compat import set_task_identity
from fairflower.numerics.threads import cpus

_IN_FLIGHT = 2  # batches per worker: the current batch and the next, so that the worker never waits
_BATCH = 0.25  # longest duration of a batch of messages, in seconds

#: Longest duration of a batch behind which another is sent. Behind a longer one it gains nothing.
_SHORT = 1.0

#: Seconds after which a worker is replaced that has not answered while tasks wait behind its first.
#: Its batch was expected to be short, but a model may be slow to reach its node.
_STUCK = 30.0

#: Seconds that a worker has for a batch that nobody waits for. A new one takes as long to start.
_LATE = 5.0

_POLL_SECONDS = 0.1  # seconds for which a poll waits for the first reply
_HERE = "the server's node"  # name of the server's node in error messages


class RayGrid(inline.InlineGrid):
    """A grid whose clients run on Ray actors, several at a time.

    Clients that took longest in the previous round start first, and fast clients are sent in
    batches. If a worker dies, it is replaced if its node is alive, and the clients of its current
    batch are retried once, each alone, on any node. If a worker does not answer, it is replaced, so
    that no other client waits for the one that hangs. If a client runs out of GPU memory, all
    workers are replaced with half as many, and the client is retried once. Results do not depend on
    the assignment of clients to workers.

    Parameters are as in `fairflower.engines.launch.simulate`. Raises ``ConfigError`` if no node
    has capacity for a worker, or a node of a cluster cannot be used, and ``EngineError`` if Ray
    does not start.
    """

    computes_replies = False

    def __init__(
        self,
        client_app: ClientApp,
        num_supernodes: int,
        config: RunConfig,
        run_config: Mapping[str, Any] | None = None,
        *,
        prepare: Callable[[], Any] | None = None,
        num_gpus: int | None = None,
    ) -> None:
        super().__init__(client_app, num_supernodes, run_config)
        self._config, address, each = config, config.ray_address, config.client_cpus
        most = config.workers or (num_supernodes if address else cpus() // each)
        most = min(most, num_supernodes)
        with keeping_signals():
            ray = self._ray = connect(address, most * each, num_gpus)
        last_words.begin()
        self._queue = TaskQueue()
        self._arrived: dict[str, Message] = {}  # id of a message -> its reply
        self._states: dict[int, Any] = {}  # node -> reference to its state; None if it is empty
        #: Node -> id of its newest message. Late replies to older ones do not change its state.
        self._newest: dict[int, str] = {}
        try:
            # Ray's client (ray://) pickles all values, so memory cannot be shared.
            shared = not address.startswith("ray://")
            if shared:
                share_arrays()
            # The app's module may be only on the sys.path of this process.
            folder = "" if address else os.getcwd()
            arguments = ray.put(_pickled_app(client_app)), sys.path, shared, folder
            self._here = ray.get_runtime_context().get_node_id()
            nodes = RayNodes(ray, each, config.gpus_of_client, prepare, bool(address))
            self._workers = Workers(ray, Actor, arguments, most, nodes)
        except BaseException:
            self.close()
            raise

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to workers; queue messages for which no worker is free."""
        self._workers.look_for_nodes()
        ids = list(super().push_messages(messages))
        pushed = [self._pending.pop(i) for i in ids if i]
        stored: dict[int, Any] = {}  # id of a record -> its reference
        tasks = []
        for message in pushed:
            records = message.content.array_records
            large = {name: r for name, r in records.items() if num_bytes(r) >= LARGE}
            for record in large.values():
                if id(record) not in stored:
                    stored[id(record)] = self._put(record)
            tasks.append(Task(message, {n: stored[id(r)] for n, r in large.items()}))
        self._queue.add(tasks)
        self._hand_out()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived; wait briefly for the first.

        Raises ``EngineError`` if no worker is left, or if the object store and the disk are full.
        """
        wanted = message_ids if isinstance(message_ids, Set) else set(message_ids)
        if not any(i in wanted for i in self._arrived):
            self._collect(wanted)
        return [self._arrived.pop(i) for i in list(self._arrived) if i in wanted]

    def _collect(self, wanted: Collection[str]) -> None:
        """Wait a moment for a reply; store all replies for which somebody waits."""
        at_work = [reference for worker in self._workers.ready for reference in worker.batches]
        if not at_work and not self._queue:
            return
        if awaited := [*at_work, *self._workers.starting]:
            self._ray.wait(awaited, timeout=_POLL_SECONDS)
        arrived = set(done(self._ray, at_work))
        for worker in list(self._workers.ready):
            for reference in [r for r in worker.batches if r in arrived]:
                for reply in self._receive(worker, reference):
                    answered = reply.metadata.reply_to_message_id
                    if answered in wanted or answered not in self._queue.discarded:
                        self._arrived[answered] = reply
        self._replace_stuck_workers()
        self._hand_out()
        if not self._workers.ready and not self._workers.starting:
            cluster = self._config.ray_address
            remedy = "Restart the nodes" if cluster else "Free memory, or raise its limit"
            raise EngineError(
                "No worker is left, and no new worker can be started, because all Ray nodes are "
                f"lost (killed, or out of memory) or reject workers. {remedy}, and resume the run."
            )

    def discard(self, message_ids: Collection[str]) -> None:
        """Remove queued messages, and replace workers that hang in one of the messages."""
        self._queue.discard(message_ids)
        self._replace_stuck_workers()

    def close(self) -> None:
        """Stop the workers, and also Ray unless it is a cluster."""
        self._ray.shutdown()
        last_words.end()

    def _hand_out(self) -> None:
        """Send every worker a batch, then another while there are more tasks than workers."""
        self._workers.collect_started()
        workers = self._workers.ready
        for depth in range(1, _IN_FLIGHT + 1):
            reserved = 0 if depth == 1 else len(workers)
            for worker in workers:
                spare = len(self._queue) > reserved
                if spare and len(worker.batches) < depth and self._can_queue_behind(worker):
                    longest = _BATCH if worker.tried else 0.0  # a new worker may load data first
                    self._send(worker, self._queue.next_batch(len(workers), longest))

    def _can_queue_behind(self, worker: Worker) -> bool:
        """Return whether the next task may queue behind a worker's batches.

        No task waits for one that may take long, as another worker may be idle before. A task whose
        worker crashed is retried alone, so that a second crash identifies the task. (If the worker
        had two batches, the first may have been answered and its replies lost.)
        """
        sent = worker.tasks()
        short = worker.tried and self._queue.seconds(sent) <= _SHORT
        retried = any(task.deaths for task in (self._queue.first, *sent))
        return not sent or (short and not retried)

    def _replace_stuck_workers(self) -> None:
        """Replace workers that do not answer, and queue those of their tasks again that are wanted.

        A worker is killed, so that no task goes on in two processes. Any task of its current batch
        may be the one that hangs, so each is retried alone, after all others.
        """
        for worker in [w for w in self._workers.ready if w.batches and self._is_stuck(w)]:
            running, *queued = [batch.tasks for batch in worker.batches.values()]
            self._workers.replace(worker, stuck=True)
            self._queue.forget(running)
            self._queue.put_back(task for tasks in queued for task in tasks)
            self._queue.put_back(running, last=True)

    def _is_stuck(self, worker: Worker) -> bool:
        """Return whether a worker is too late; a single task has time until it is discarded."""
        reference, batch = next(iter(worker.batches.items()))
        unwanted = len(self._queue.wanted(batch.tasks)) < len(batch.tasks)
        most = _LATE if unwanted else _STUCK if len(worker.tasks()) > 1 else math.inf
        # The reply may have arrived while this process did something else.
        return time.monotonic() - worker.begun > most and not done(self._ray, [reference])

    def _send(self, worker: Worker, tasks: list[Task]) -> None:
        requests, states = [], []
        for task in tasks:
            content, node = task.message.content, task.message.metadata.dst_node_id
            small = copy.copy(task.message)
            inline.set_content(small, {n: r for n, r in content.items() if n not in task.stored})
            self._newest[node] = task.message.metadata.message_id
            requests.append(Request(small, list(content), task.stored, self.contexts[node]))
            states.append(self._states.get(node))
        call = worker.actor.answer.options(num_returns=1 + len(tasks))
        replies, *states = call.remote(requests, *states)
        if not worker.batches:
            worker.begun = time.monotonic()
        worker.batches[replies] = Batch(tasks, states)

    def _receive(self, worker: Worker, reference: Any) -> list[Message]:
        batch = worker.batches.get(reference)
        if batch is None:
            return []  # the worker has died, and its batches were queued again
        worker.begun, worker.tried = time.monotonic(), True  # the next batch begins
        errors = self._ray.exceptions
        try:
            replies, states = self._ray.get(reference), batch.states
            if worker.node.node_id != self._here:  # they remain valid if the worker's node is lost
                states = [state and self._put(state) for state in self._ray.get(states)]
        except errors.RayActorError as error:
            first, *queued = worker.batches.values()
            self._queue.put_back(task for other in queued for task in other.tasks)
            self._workers.replace(worker)
            return self._try_again(first, error)
        except (errors.OutOfDiskError, errors.ObjectStoreFullError) as error:
            remote = isinstance(error, errors.RayTaskError)
            raise object_store_full_error(worker.node.name if remote else _HERE) from error
        except errors.RayError as error:  # not of the client: a dying node may cause any error
            del worker.batches[reference]
            return self._try_again(batch, error)
        for task, (reply, _) in zip(batch.tasks, replies, strict=True):
            if reason := inline.memory_problem(reply):
                return self._with_fewer_workers(task, reason)  # queues this batch again, too
        del worker.batches[reference]
        for task, (_, seconds), state in zip(batch.tasks, replies, states, strict=True):
            node = task.message.metadata.dst_node_id
            self._queue.note(task, seconds)
            if self._newest[node] == task.message.metadata.message_id:
                self._states[node] = state
        return [reply for reply, _ in replies]

    def _put(self, record: object) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.put(record)
        except (errors.OutOfDiskError, errors.ObjectStoreFullError) as error:
            raise object_store_full_error(_HERE) from error

    def _with_fewer_workers(self, task: Task, reason: str) -> list[Message]:
        """Replace all workers with half as many, after a client ran out of GPU memory.

        All running tasks are queued again. Raises ``GpuMemoryError`` if the client has run out of
        memory before or was alone on its GPU.
        """
        at_work = self._workers.tasks()
        retry = self._config.gpu_memory_errors == "retry" and not task.lacked_memory
        left = self._workers.halve() if retry else 0
        if not left:
            raise inline.gpu_memory_error(reason)
        text = "A client ran out of GPU memory (%s). It is retried once, and from now on %d "
        logger.warning(text + "clients train in parallel.", reason, left)
        task.lacked_memory = True
        self._queue.put_back([task, *(other for other in at_work if other is not task)])
        return []

    def _try_again(self, batch: Batch, error: Exception) -> list[Message]:
        """Queue a failed batch's tasks again; return error replies after a second failure."""
        for task in batch.tasks:
            task.deaths += 1
        self._queue.put_back(task for task in batch.tasks if task.deaths == 1)
        return [inline.error_reply(task.message, error) for task in batch.tasks if task.deaths > 1]


def _pickled_app(client_app: ClientApp) -> bytes:
    try:
        return prepare_ray().cloudpickle.dumps(client_app)  # type: ignore[no-any-return]
    except Exception as error:  # pickling a user's app may raise anything
        raise EngineError(
            f"The ClientApp cannot be sent to Ray's workers ({type(error).__name__}: {error}). "
            "Create what cannot be pickled inside the app's functions, or choose engine = 'inline'."
        ) from error


# --- worker processes ----------------------------------------------------------------------------


#: Size in bytes from which records are stored as separate Ray objects.
LARGE = 64 * 1024


class Request(NamedTuple):
    """A message in the format in which a worker receives it."""

    message: Message  # without its large records
    names: list[str]  # names of all its records, in order
    stored: dict[str, Any]  # references to the large records
    context: Context


class Actor:
    """A worker process that calls the ClientApp; it gets the pickled app and its module paths.

    It works in ``folder``, unless this is empty.
    """

    def __init__(self, client_app: bytes, paths: list[str], shared: bool, folder: str) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.chdir(folder or ".")
        sys.path += [path for path in paths if path not in sys.path]
        set_task_identity(inline.RUN_ID, inline.SERVER_NODE)
        if shared:
            share_arrays()
        self._pickled = client_app
        self._records: dict[str, ArrayRecord] = {}  # large records of the last batch, by reference

    @functools.cached_property
    def _app(self) -> ClientApp:
        """The ClientApp; an exception during its import becomes the reply to every message."""
        return prepare_ray().cloudpickle.loads(self._pickled)  # type: ignore[no-any-return]

    def answer(self, requests: list[Request], *states: RecordDict | None) -> list[Any]:
        """Answer messages in order, given the states of their nodes, or None for empty ones.

        Returns a list of the replies with their durations in seconds, and then the new states.
        """
        with suppress(Exception):  # the exception becomes the reply to every message
            _ = self._app  # the time of its import does not count as a client's time
        replies, after = [], []
        used = {reference.hex(): reference for r in requests for reference in r.stored.values()}
        self._records = {
            key: self._records[key] if key in self._records else prepare_ray().get(reference)
            for key, reference in used.items()
        }
        for (message, names, stored, context), state in zip(requests, states, strict=True):
            begin = time.perf_counter()
            records = {n: self._records[r.hex()] for n, r in stored.items()}
            content = {**message.content, **records}
            inline.set_content(message, {name: content[name] for name in names})
            context.state = state or RecordDict()
            reply = inline.answer(lambda *request: self._app(*request), message, context)
            replies.append((reply, time.perf_counter() - begin))
            after.append(context.state or None)
        return [replies, *after]


def num_bytes(record: ArrayRecord) -> int:
    """Return the size of a record's arrays in bytes."""
    return sum(len(array_bytes(array)) for array in record.values())


def share_arrays() -> None:
    """Make Ray store the bytes of Flower's arrays out of band, to be read without copying."""
    register = prepare_ray().util.register_serializer
    for kind in (Array, SharedArray):
        register(kind, serializer=_parts, deserializer=_whole)


def _parts(array: Array) -> tuple[str, tuple[int, ...], str, NDArray[np.uint8]]:
    return array.dtype, array.shape, array.stype, np.frombuffer(array_bytes(array), np.uint8)


def _whole(parts: tuple[str, tuple[int, ...], str, NDArray[np.uint8]]) -> Array:
    return SharedArray(*parts[:3], parts[3].data)
