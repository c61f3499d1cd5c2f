"""Machines that lack something, a Ray that is killed, and folders with names of libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from command import call, invoke
from processes import TIMEOUT, environment, run, started, wait_for

from fairflower.paths import home
from fairflower.report import read_run

pytestmark = [pytest.mark.slow, pytest.mark.linux]

FAIRFLOWER = [sys.executable, "-P", "-m", "fairflower.cli"]
QUICK = [
    f"--set={pair}"
    for pair in (
        "data.clients-per-domain=1",
        "data.examples-per-client=20",
        "data.test-examples=20",
        "train.local-epochs=1",
    )
]


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A working directory with modules named like Python's and NumPy's, and with a strategy."""
    folder = tmp_path / "crowded"
    folder.mkdir()
    for name in ("types", "numpy", "random", "typing", "logging"):
        (folder / f"{name}.py").write_text("raise RuntimeError('from the working directory')")
    (folder / "mine.py").write_text(
        "from fairflower.strategies import FedAvg\n\nclass Rule(FedAvg):\n    'A mean.'\n"
    )
    return folder


@pytest.mark.nightly
def test_runs_side_by_side_do_not_import_libraries_from_the_working_directory(crowded) -> None:
    command = [*FAIRFLOWER, "compare", "--jobs=2", "--strategies=fedavg,mine:Rule", "--rounds=1"]
    command += [*QUICK, "--federations=0", "--output-dir=out"]
    said = run(command, env=environment(crowded), cwd=crowded)
    assert "working directory" not in said
    assert "Traceback" not in said
    models = [path.read_bytes() for path in crowded.glob("out/runs/*/model.safetensors")]
    assert len(models) == 3  # also of uniform weights
    assert len(set(models)) == 1


def test_a_killed_ray_ends_with_the_resume_command_in_a_crowded_folder(crowded: Path) -> None:
    (crowded / "where.py").write_text(
        "import os\nfrom fairflower.clients import SGD\n\nclass Here(SGD):\n    'Trains.'\n"
        "    def begin(self, server_round):\n        super().begin(server_round)\n"
        "        open('trained-here', 'w').close()\n"
    )
    options = ["--engine=ray", "--rounds=500", "--output-dir=out", "--strategy=mine:Rule"]
    options += ["--workers=1"]
    command = [*FAIRFLOWER, "run", *options, "--client=where:Here", *QUICK]
    said = crowded / "said.txt"
    with (
        said.open("w") as output,
        started(
            command, env=environment(crowded), cwd=crowded, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        wait_for(lambda: "round   2/500" in said.read_text(), "two rounds")
        (raylet,) = (
            child for child in psutil.Process(process.pid).children() if child.name() == "raylet"
        )
        raylet.kill()
        assert process.wait(TIMEOUT) != 0
        wait_for(lambda: "resume with: " in said.read_text(), "the last words")
    (folder,) = (crowded / "out").iterdir()
    assert f"resume with: fairflower run --resume {folder}" in said.read_text()
    assert read_run(folder).status in ("killed", "failed")
    assert (crowded / "trained-here").exists(), "workers do not work in the user's folder"


def test_a_process_that_ends_by_itself_has_no_last_words(tmp_path: Path) -> None:
    code = """
import os, sys
from fairflower.engines.ray_cluster import last_words
last_words.prepare("nobody prints this")
last_words.begin()
last_words.prepare("Resume with: a")
last_words.prepare("Resume with: \N{GREEK SMALL LETTER BETA}")
if sys.argv[1] == "end":
    last_words.end()
os._exit(1)
"""
    said = {
        how: subprocess.run(
            [sys.executable, "-c", code, how], env=environment(tmp_path), stderr=subprocess.PIPE,
            text=True, check=False,
        ).stderr
        for how in ("end", "die")
    }  # fmt: skip
    assert said == {"end": "", "die": "Resume with: \N{GREEK SMALL LETTER BETA}"}


def test_ray_in_a_folder_with_a_long_path_names_the_variable(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 60)
    place.mkdir()
    options = ["--engine=ray", "--rounds=1", f"--output-dir={tmp_path}", *QUICK]
    text = call("run", *options, expect=1, env={"RAY_TMPDIR": str(place), "COLUMNS": "300"})
    assert "Set RAY_TMPDIR to a folder whose path has at most 35 bytes" in text


def test_a_user_without_a_home_folder_is_told_which_variable_to_set(monkeypatch) -> None:
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "FAIRFLOWER_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    result = invoke("run", "--rounds=1", env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "Set the environment variable FAIRFLOWER_HOME" in result.output
    monkeypatch.setenv("FAIRFLOWER_HOME", os.sep)
    assert home() == Path(os.sep)
    result = invoke("report", "~/runs", env={"COLUMNS": "300"})
    assert "starts with ~, but this user does not exist or has no home folder" in result.output
