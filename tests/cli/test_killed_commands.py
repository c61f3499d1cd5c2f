"""Commands that are killed with SIGKILL and started again give the same results."""

from __future__ import annotations

import csv
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from command import BOARD, call
from processes import belonging_to, environment, started, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.posix]

SMALL = [
    *("--rounds=8", "--epochs=1", "--set=data.clients-per-domain=1"),
    *("--set=data.examples-per-client=12", "--set=data.test-examples=8"),
]
COMPARE = ["compare", "--strategies=fedavg,fedheal", "--seeds=0", *SMALL]
TUNE = ["tune", "--strategies=fedheal", "--budget=2", "--seeds=1", *SMALL]
DESIGN = """
[protocol]
results = "rows.csv"
reference = "uniform"
screened = "uniform,fedheal"
confirmed = "uniform,fedheal"
points = 2
again = 1
scrambling = 31
tuned-on = "100"
federations = "0"

[settings]
num-server-rounds = 8

[settings.data]
clients-per-domain = 1
examples-per-client = 30
test-examples = 10
validation-examples = 20

[benchmarks.plain.data]
domains = "plain,rotated"
"""


def kill_at(home: Path, command: list[str], pattern: str, program: str = "fairflower.cli") -> None:
    """Start a command, and kill it as soon as a file below ``home`` matches a pattern."""
    command = [sys.executable, "-m", program, *command]
    with started(command, env=environment(home)) as process:
        while not any(home.glob(pattern)):
            assert process.poll() is None, f"the command ended before there was a {pattern}"
            time.sleep(0.005)  # a leaderboard's run lasts less than a second
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        wait_for(lambda: not belonging_to(home), "its workers to end with it")


def tables(report: Path) -> str:
    """Return a report's tables and its summary without the start times of runs."""
    facts = re.sub(r'"started": "[^"]*"(, )?', "", (report / "summary.runs.json").read_text())
    return "".join((report / name).read_text() for name in ("tables.md", "summary.csv")) + facts


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("jobs", "pattern"),
    [
        (1, "killed/runs/fedheal-seed0/checkpoints/*.safetensors"),
        pytest.param(2, "killed/runs/*/run.json", marks=pytest.mark.nightly),
        pytest.param(2, "killed/runs/*/model.safetensors", marks=pytest.mark.nightly),
        pytest.param(1, "killed/report", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_a_killed_comparison_gives_the_same_tables_after_a_restart(
    jobs: int, pattern: str, tmp_path: Path
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    call(*COMPARE, "--engine=inline", "--jobs=1", "--output-dir", alone)
    begun = [*COMPARE, "--engine=inline", f"--jobs={jobs}", f"--output-dir={killed}"]
    kill_at(tmp_path, begun, pattern)
    call(*begun)
    assert tables(killed / "report") == tables(alone / "report")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "place",
    [
        "trials/*-trial0/run.json",
        "trials/*-trial1/checkpoints/*.safetensors",
        "trials/*-trial1/model.safetensors",
        "runs/*/checkpoints/*.safetensors",
        "runs/*/model.safetensors",
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_a_killed_study_gives_the_same_tables_after_a_restart(place: str, tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    call(*TUNE, "--jobs=1", "--output-dir", alone)
    kill_at(tmp_path, [*TUNE, "--jobs=1", f"--output-dir={killed}"], f"killed/{place}")
    call(*TUNE, "--jobs=1", "--output-dir", killed)
    assert tables(killed / "report") == tables(alone / "report")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "pattern",
    [
        "killed/at-work/**/run.json",
        "killed/at-work/**/history.csv",
        "killed/at-work/**/model.safetensors",
        "killed.csv",
    ],
)
def test_a_killed_leaderboard_gives_the_same_rows_after_a_restart(
    pattern: str, tmp_path: Path
) -> None:
    rows: dict[str, list[dict[str, str]]] = {}
    for name in ("alone", "killed"):
        file = tmp_path / f"{name}.toml"
        file.write_text(DESIGN.replace("rows.csv", f"{name}.csv"))
        command = [str(file), "--jobs=1", f"--output-dir={tmp_path / name}"]
        if name == "killed":
            kill_at(tmp_path, command, pattern, "experiments.leaderboard")
        call(*command, command=BOARD)
        with (tmp_path / f"{name}.csv").open() as lines:
            rows[name] = [{**row, "seconds": ""} for row in csv.DictReader(lines)]
    assert rows["killed"] == rows["alone"]
