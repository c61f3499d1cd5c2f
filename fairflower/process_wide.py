"""Settings of the whole process that are changed for a while, by threads that end in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A setting of the whole process, by the functions that return and set its value."""

    get: Callable[[], Any]
    put: Callable[[Any], object]

    @classmethod
    def of(cls, thing: object, name: str) -> Setting:
        """Return the setting that is an attribute."""
        return cls(partial(getattr, thing, name), partial(setattr, thing, name))


_LOCK = threading.Lock()
#: Setting -> number of open blocks of `process_wide` that change it, and its value before them.
_CHANGED: dict[Setting, tuple[int, Any]] = {}


@contextmanager
def process_wide(changes: Mapping[Setting, Any]) -> Iterator[None]:
    """Change settings of the whole process; the last block that ends restores their values.

    Clients may be threads of a process, whose blocks end in any order. All change a setting to the
    same value.
    """
    with _LOCK:
        for setting, value in changes.items():
            count, before = _CHANGED.get(setting) or (0, setting.get())
            _CHANGED[setting] = count + 1, before
            setting.put(value)
    try:
        yield
    finally:
        with _LOCK:
            for setting in changes:
                count, before = _CHANGED.pop(setting)
                if count > 1:
                    _CHANGED[setting] = count - 1, before
                else:
                    setting.put(before)
