"""A sentence for a process that Ray ends from C++, because its node on this machine has died."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

_CODE = "import sys; print(end=sys.stdin.read().rpartition('\\0')[2], file=sys.stderr)"

_processes: list[subprocess.Popen[str]] = []


def begin() -> None:
    """Start a process that prints the last text of `prepare` if this process ends before `end`."""
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _CODE]
    # In a session of its own, it outlives Ctrl-C.
    _processes.append(
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    )


def prepare(text: str) -> None:
    """Replace the text, if `begin` was called."""
    for process in _processes:
        with suppress(OSError):  # it was killed
            assert process.stdin
            process.stdin.write(f"\0{text}")
            process.stdin.flush()


def end() -> None:
    """End the process without a word."""
    prepare("")
    while _processes:
        _processes.pop().communicate()
