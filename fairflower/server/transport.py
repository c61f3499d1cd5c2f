"""Messages to nodes and their replies, while a person may stop the run."""

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
    """Push messages and poll for their replies, until all are there or time is up.

    Flower's own method polls ten times a second and cannot be interrupted: this one raises
    ``RunInterrupted`` as soon as ``stop`` is set. A grid that waits for replies itself
    (`fairflower.engines.ray`) is asked again at once.
    """
    messages = list(messages)
    waiting = set()
    for message, message_id in zip(messages, grid.push_messages(messages), strict=True):
        # Flower gives none to a message that it refuses, as to a node that has signed off.
        set_message_id(message, message_id or "")
        waiting |= {message_id} - {"", None}
    deadline = time.monotonic() + timeout
    replies: list[Message] = []
    pause = 0.005
    while waiting:
        if stop.is_set():
            raise RunInterrupted
        asked = time.monotonic()
        pulled = grid.pull_messages(waiting)
        # A grid may also hand out what comes late, to messages that nobody waits for.
        arrived = [m for m in pulled if m.metadata.reply_to_message_id in waiting]
        replies += arrived
        waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
        if arrived:
            pause = 0.005
        elif time.monotonic() > deadline:
            break
        else:
            stop.wait(pause - (time.monotonic() - asked))
            pause = min(2 * pause, 0.1)
    return replies
