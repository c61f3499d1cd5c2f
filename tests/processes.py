"""Real processes for the slow tests, which end them with all their descendants."""

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
    """Return the environment variables of a process that writes only below ``home``."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PATH", "")]),
        "FAIRFLOWER_HOME": str(home / "fairflower"),
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        # Processes share compiled modules; compiling a whole environment would take longer.
        "PYTHONDONTWRITEBYTECODE": "",
        "UV_COMPILE_BYTECODE": "false",
        **more,
    }


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a new session, and end it with all its descendants."""
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
    """Run a command, check its exit code, and return its output."""
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


def session_processes(process: subprocess.Popen[str]) -> set[psutil.Process]:
    """Return the running processes of a started process's session, with all descendants."""
    members = {m for m in psutil.process_iter() if session(m.pid) == process.pid}
    for member in list(members):
        with suppress(psutil.NoSuchProcess):
            members.update(member.children(recursive=True))
    return members


def belonging_to(home: Path) -> list[psutil.Process]:
    """Return the processes with FAIRFLOWER_HOME at or below a folder, except zombies."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            place = process.environ().get("FAIRFLOWER_HOME", "")
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and place and Path(place).is_relative_to(home):
                processes.append(process)
    return processes


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def session(pid: int) -> int | None:
    """Return the session of a process, which outlives its parent; None on Windows."""
    try:
        return os.getsid(pid) if hasattr(os, "getsid") else None
    except (ProcessLookupError, PermissionError):
        return None


def end(process: subprocess.Popen[str]) -> None:
    """Terminate a process; after 15 seconds, kill what is left of it and its descendants."""
    members = session_processes(process)
    if process.poll() is None:
        process.terminate()
    for member in still_running(members, 15):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(15)


def still_running(members: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the ``members`` that still run after ``seconds``, except zombies."""
    _, alive = psutil.wait_procs(list(members), timeout=seconds)
    return [m for m in alive if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]
