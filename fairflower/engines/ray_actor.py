"""A worker process of the engine on Ray, and the format of messages to it."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fairflower.arrays import SharedArray, array_bytes
from fairflower.engines.inline import RUN_ID, SERVER_NODE, answer, set_content
from fairflower.engines.ray_cluster import prepare_ray
from fairflower.flower_compat import set_task_identity

#: Size in bytes from which records and nodes' states are stored as separate Ray objects.
LARGE = 64 * 1024


class Request(NamedTuple):
    """A message in the format in which a worker receives it."""

    message: Message  # without its large records
    names: list[str]  # names of all its records, in order
    stored: dict[str, Any]  # references to the large records
    context: Context
    state: bytes | None  # the node's state, pickled; None if it is large and sent separately


class Actor:
    """A worker process that calls the ClientApp; it gets the pickled app and its module paths.

    It works in ``folder``, unless this is empty.
    """

    def __init__(self, client_app: bytes, paths: list[str], shared: bool, folder: str) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.chdir(folder or ".")
        sys.path += [path for path in paths if path not in sys.path]
        set_task_identity(RUN_ID, SERVER_NODE)
        if shared:
            share_arrays()
        self._pickled = client_app
        self._records: dict[str, ArrayRecord] = {}  # large records of the last batch, by reference

    @functools.cached_property
    def _app(self) -> ClientApp:
        """The ClientApp; an exception during its import becomes the reply to every message."""
        app: ClientApp = prepare_ray().cloudpickle.loads(self._pickled)
        return app

    def answer(self, requests: list[Request], *held: RecordDict) -> Any:
        """Answer messages in order; ``held`` contains the large states of nodes.

        Returns a list with an entry for each message: the reply, its duration in seconds and the
        node's new state. A small state is pickled, and a state that has become large is a record.
        For nodes in ``held`` the entry is None, and their new states are returned after the list.
        """
        with suppress(Exception):  # the exception becomes the reply to every message
            _ = self._app  # the time of its import does not count as a client's time
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
    small = sum(map(num_bytes, state.array_records.values())) < LARGE
    return pickle.dumps(state) if small else state


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
