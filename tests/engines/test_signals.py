"""SIGTERM and a closed terminal stop runs as Ctrl-C does, whichever process gets the signal."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import started

from fairflower.engines.ray_cluster import keeping_signals
from fairflower.machine import HANGUP

fcntl = pytest.importorskip("fcntl", reason="Windows has neither terminals of this kind nor SIGHUP")
pty = pytest.importorskip("pty")
termios = pytest.importorskip("termios")


def blocked() -> set[int]:
    return set(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))


def test_keeping_signals_restores_the_handler_and_blocks_sigterm_in_children() -> None:
    def ours(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with keeping_signals():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as ray.init does
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert signal.getsignal(signal.SIGTERM) is ours
        assert signal.SIGTERM not in blocked()
        child.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child.kill()
        child.communicate()
    finally:
        signal.signal(signal.SIGTERM, before)


SMALL = ["data.clients-per-domain=1", "data.examples-per-client=20", "train.local-epochs=1"]


def command(name: str, *options: str) -> list[str]:
    begin = [sys.executable, "-m", "fairflower.cli", name, "--rounds=2000", *options]
    return [*begin, *(f"--set={key}" for key in SMALL)]


def statuses(home: Path) -> set[str]:
    return {json.loads(path.read_text())["status"] for path in home.rglob("run.json")}


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, *HANGUP])
def test_a_signal_to_all_processes_of_a_run_on_ray_stops_the_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        command("run", "--engine=ray", f"--output-dir={tmp_path}", "--workers=1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("*/diagnostics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "SIGTERM received" not in output
    assert statuses(tmp_path) == {"stopped"}


@contextmanager
def in_terminal(call: list[str], home: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a new terminal, and close the terminal when ``count`` runs train."""
    ours, theirs = pty.openpty()

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored if pytest runs under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    output = b""
    with started(call, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=begin) as process:
        os.close(theirs)
        while len(list(home.rglob("checkpoints/round-*1.safetensors"))) < count:
            assert process.poll() is None, output
            if select.select([ours], [], [], 0.1)[0]:
                output += os.read(ours, 65536)
        os.close(ours)  # the kernel sends SIGHUP, and writing to the terminal fails
        yield process


ONE_STRATEGY = ["--strategies=fedavg", "--seeds=0"]
STUDY = ["--strategies=fedheal", "--budget=3", "--seeds=1"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("run", ["--engine=inline"], 1),
        pytest.param("compare", [*ONE_STRATEGY, "--jobs=2"], 2, marks=pytest.mark.nightly),
        pytest.param("tune", [*STUDY, "--jobs=2"], 2, marks=pytest.mark.nightly),
    ],
    ids=["run", "compare", "tune"],
)
def test_closing_the_terminal_stops_the_command(
    name: str, options: list[str], count: int, tmp_path: Path
) -> None:
    call = command(name, *options, f"--output-dir={tmp_path}")
    with in_terminal(call, tmp_path, count) as process:
        assert process.wait(120) == 130
    assert statuses(tmp_path) == {"stopped"}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_under_nohup_ignores_sighup(tmp_path: Path) -> None:
    call = command("run", "--engine=inline", f"--output-dir={tmp_path}", "--set=run-name=run")
    with (tmp_path / "nohup.out").open("w") as output:
        process = subprocess.Popen(["nohup", *call], stdout=output, stderr=subprocess.STDOUT)
    history = tmp_path / "run" / "history.csv"
    sent = 0
    while sent < 3:
        assert process.poll() is None
        time.sleep(0.1)
        if history.exists() and history.read_text().count("\n") > 40 * (sent + 1):
            process.send_signal(signal.SIGHUP)
            sent += 1
    process.terminate()
    assert process.wait(120) == 130
    assert statuses(tmp_path) == {"stopped"}
