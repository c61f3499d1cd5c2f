"""A scheduler's SIGTERM stops a run on Ray as Ctrl-C does, whoever it reaches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairflower.engines.cluster import keeping_sigterm


def blocked() -> set[int]:
    return set(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))


def test_who_handles_sigterm_keeps_it_and_those_who_are_started_wait() -> None:
    def ours(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with keeping_sigterm():
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


@pytest.mark.slow
def test_sigterm_to_a_run_on_ray_and_all_its_processes_stops_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fairflower.cli", "run", "--engine=ray", "--rounds=2000"]
    small = ["data.clients-per-domain=1", "data.examples-per-client=20", "train.local-epochs=1"]
    options = [f"--output-dir={tmp_path}", "--workers=1", *(f"--set={key}" for key in small)]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("*/diagnostics.jsonl")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "SIGTERM received" not in output
    (facts,) = tmp_path.glob("*/run.json")
    assert json.loads(facts.read_text())["status"] == "stopped"
