"""Tasks of a Ray grid that wait for a worker: their order, and batches of short tasks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

#: Largest batch as a fraction of a worker's remaining work in a round.
_SHARE = 0.7


@dataclass
class Task:
    """A message that has not been answered yet."""

    message: Message
    stored: dict[str, Any]  # records of the message that are in the object store
    deaths: int = 0  # of workers that processed the message
    lacked_memory: bool = False  # whether the client has run out of GPU memory


class TaskQueue:
    """A queue of tasks that no worker has, and the durations of the clients' last messages.

    A task of unknown duration is in a batch of its own.

    Attributes
    ----------
    discarded : set of str
        Ids of messages that nobody waits for. Their tasks are not queued again.
    """

    def __init__(self) -> None:
        self.discarded: set[str] = set()
        self._tasks: deque[Task] = deque()
        # Node and type -> duration of its last message.
        self._seconds: dict[tuple[int, str], float] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def first(self) -> Task:
        """The task that is sent next."""
        return self._tasks[0]

    def add(self, tasks: Iterable[Task]) -> None:
        """Queue new tasks; the longest are sent first."""
        self._tasks = deque(sorted([*self._tasks, *tasks], key=self._expected, reverse=True))

    def put_first(self, tasks: Iterable[Task]) -> None:
        """Queue tasks before all others, unless they are discarded."""
        self._tasks.extendleft(reversed(self._wanted(tasks)))

    def put_last(self, tasks: Iterable[Task]) -> None:
        """Queue tasks behind all others, unless they are discarded."""
        self._tasks.extend(self._wanted(tasks))

    def discard(self, message_ids: Collection[str]) -> None:
        """Remove the tasks of these messages, and do not queue them again."""
        self.discarded |= set(message_ids)
        self._tasks = deque(self._wanted(self._tasks))

    def next_batch(self, workers: int, longest: float) -> list[Task]:
        """Remove and return the first task, and more tasks up to ``longest`` seconds in total.

        Batches become smaller towards the end of a round, so that all workers finish together.
        """
        left = 0.0
        for task in self._tasks:  # as many as decide: the first is the longest
            if (left := left + self._expected(task)) * _SHARE / workers >= longest:
                break
        most = min(longest, _SHARE * left / workers)
        batch = [self._tasks.popleft()]
        seconds = self._expected(batch[0])
        while self._tasks and not batch[0].deaths and not self._tasks[0].deaths:
            seconds += self._expected(self._tasks[0])
            if seconds > most:
                break
            batch.append(self._tasks.popleft())
        return batch

    def seconds(self, tasks: Iterable[Task]) -> float:
        """Return the total duration that is expected of tasks; infinity if one is unknown."""
        return sum(map(self._expected, tasks))

    def note(self, task: Task, seconds: float) -> None:
        """Store how long a task took."""
        self._seconds[_kind(task)] = seconds

    def forget(self, tasks: Iterable[Task]) -> None:
        """Count the durations of tasks as unknown, so that each is sent alone."""
        for task in tasks:
            self._seconds.pop(_kind(task), None)

    def _expected(self, task: Task) -> float:
        return self._seconds.get(_kind(task), math.inf)

    def is_unwanted(self, tasks: Iterable[Task]) -> bool:
        """Return whether nobody waits for one of these tasks."""
        return any(task.message.metadata.message_id in self.discarded for task in tasks)

    def _wanted(self, tasks: Iterable[Task]) -> list[Task]:
        return [t for t in tasks if t.message.metadata.message_id not in self.discarded]


def _kind(task: Task) -> tuple[int, str]:
    return task.message.metadata.dst_node_id, task.message.metadata.message_type
