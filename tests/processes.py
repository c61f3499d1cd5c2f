"""Real processes for the slow tests, with nothing of them left behind."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
TIMEOUT = 300.0


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a process that keeps everything below ``home``."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PATH", "")]),
        "FAIRFLOWER_HOME": str(home / "fairflower"),
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        # What the first process compiles, the others read; of a whole environment they need little.
        "PYTHONDONTWRITEBYTECODE": "",
        "UV_COMPILE_BYTECODE": "false",
        **more,
    }


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, ended with all its descendants."""
    process = subprocess.Popen(command, start_new_session=True, text=True, **options)
    try:
        yield process
    finally:
        end(process)


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    expect: int = 0,
) -> str:
    """What a command printed; fails, showing that, if it ends otherwise than expected."""
    with (
        tempfile.TemporaryFile("w+") as output,
        started(command, env=env, cwd=cwd, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code: int | None = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        text = output.read()
    assert code == expect, f"{command} ended with {code}:\n{text}"
    return text


def family(process: subprocess.Popen[str]) -> set[psutil.Process]:
    """What runs of a started process: its session, and all descendants of that."""
    members = {m for m in psutil.process_iter() if session(m.pid) == process.pid}
    for member in list(members):
        with suppress(psutil.NoSuchProcess):
            members.update(member.children(recursive=True))
    return members


def belonging_to(home: Path) -> list[psutil.Process]:
    """What runs with a `fairflower` home at or below a folder; zombies do not count."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            place = process.environ().get("FAIRFLOWER_HOME", "")
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and place and Path(place).is_relative_to(home):
                found.append(process)
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def session(pid: int) -> int | None:
    """The session of a process, which it keeps when its parent ends before it; Windows has none."""
    try:
        return os.getsid(pid) if hasattr(os, "getsid") else None
    except (ProcessLookupError, PermissionError):
        return None


def end(process: subprocess.Popen[str]) -> None:
    """Ask a process to end, then make it, and whatever it started, do so."""
    members = family(process)
    if process.poll() is None:
        process.terminate()
    for member in outliving(members, 15):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(15)


def outliving(members: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Which of ``members`` still run after ``seconds``; zombies do not count."""
    _, alive = psutil.wait_procs(list(members), timeout=seconds)
    return [m for m in alive if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]
