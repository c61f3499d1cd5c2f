"""Sending messages to nodes and waiting for replies; the wait can be interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from fairflower.errors import RunInterrupted
from fairflower.flower_compat import set_message_id


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
        set_message_id(message, message_id or "")
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
