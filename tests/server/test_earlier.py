"""Run folders of earlier versions are read, compared and resumed.

``earlier/`` was made by version 0.1.0 of November 2026: FedAvg over four rounds, and FedISM
stopped after two of them, on embedded data.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fairflower.cli import app
from fairflower.report import read_run
from fairflower.report.methods import group_runs

EARLIER = Path(__file__).parent / "earlier"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EARLIER, tmp_path / "runs"))


def test_earlier_run_folders_are_read_and_compared(runs: Path) -> None:
    runs_read = [read_run(runs / name) for name in ("completed", "stopped")]
    assert [run.status for run in runs_read] == ["completed", "stopped"]
    assert [run.last_round for run in runs_read] == [4, 2]
    (comparison,) = group_runs(runs_read)
    assert [method.name for method in comparison.methods] == ["fedavg", "fedism"]


@pytest.mark.slow
def test_a_stopped_run_of_an_earlier_version_is_resumed(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = read_run(runs / "stopped").accuracy
    assert not app(["run", "--resume", str(runs / "stopped")], standalone_mode=False)
    assert caplog.text.count("so changes to config.toml since the start of the run") == 1
    after = read_run(runs / "stopped")
    assert after.status == "completed"
    assert after.last_round == 4
    assert (after.accuracy[: len(before)] == before).all()
    (comparison,) = group_runs([after, read_run(runs / "completed")])
    fedavg, fedism = comparison.methods
    assert comparison.baseline(fedism, "fedavg") is fedavg
