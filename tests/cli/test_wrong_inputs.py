"""Wrong inputs give one short error that names the input and the remedy."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import invalid_files
import pytest
from command import COMMAND, LANDSCAPE, SHARPNESS, invoke
from invalid_inputs import WRONG

from fairflower.cli.terminal import console

pytestmark = pytest.mark.linux  # paths and system messages of Linux

#: Maximum number of lines of an error, including the usage of a mistyped command.
LINES = 5


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of `invalid_files`, in which commands may write."""
    folder = tmp_path_factory.mktemp("places")
    invalid_files.make(folder)
    return folder


@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param(f"{prefix} {given}", message, id=f"{name}: {given}")
        for name, (prefix, rows) in WRONG.items()
        for given, message in rows
    ],
)
def test_wrong_inputs_give_a_short_error(
    command: str, message: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 10_000)
    monkeypatch.delenv("FAIRFLOWER_DATA", raising=False)
    monkeypatch.chdir(places)
    command = re.sub(r"\{([\w.-]+)\}", lambda name: str(places / name[1]), command)
    name, *options = shlex.split(command)
    scripts = {"landscape": LANDSCAPE, "sharpness": SHARPNESS}
    words = options if name in scripts else [name, *options]
    result = invoke(*words, command=scripts.get(name, COMMAND))
    output = result.output.replace(f"{places}/", "")
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2), output
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.strip()]
    heads = ("Error", "Usage", "Skipped", "\N{BOX DRAWINGS LIGHT ARC DOWN AND RIGHT}")
    begin = next(k for k, line in enumerate(lines) if line.startswith(heads))
    assert len(lines[begin:]) <= LINES, output
    assert message in output
