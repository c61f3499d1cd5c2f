"""A disk that fills up during a run, and output folders that cannot be written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import call
from resuming import config, outcome, resume, session
from safetensors import SafetensorError

from fairflower import files
from fairflower.errors import WriteError, error_text
from fairflower.server.folder import RunFolder


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_to_serialize(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


def fail_from_second_round(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a writing function fail from round 2 on, as on a full disk."""
    sound: Callable[..., Any] = getattr(kind, name)

    def write(self: RunFolder, server_round: int, *args: Any) -> Any:
        if server_round < 2:
            return sound(self, server_round, *args)
        monkeypatch.setattr(RunFolder, "_write_facts", full)  # its end cannot be written either
        return full()

    monkeypatch.setattr(kind, name, write)


@pytest.mark.parametrize("what", ["append_metrics", "append_diagnostics", "checkpoint"])
def test_a_full_disk_ends_the_run_with_advice_and_the_run_can_be_resumed(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = session(config(tmp_path / "whole")).run()
    with monkeypatch.context() as patched:
        if what == "checkpoint":
            patched.setattr(files, "save_file", fail_to_serialize)
        else:
            fail_from_second_round(RunFolder, what, patched)
        new_session = session(config(tmp_path / "cut"))
        with pytest.raises(WriteError) as caught:
            new_session.run()
    assert new_session.folder is not None
    folder = new_session.folder.path
    text = str(caught.value)
    assert "No space left on device. Free some disk space" in text
    assert f"fairflower run --resume {folder}" in text
    assert "Traceback" not in "".join(capfd.readouterr())
    assert json.loads((folder / "run.json").read_text())["status"] in ("failed", "running")
    assert not list(folder.rglob("*.tmp"))
    assert outcome(resume(folder)) == outcome(whole)


def test_an_unwritable_log_prints_no_logging_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    new_session = session(config(tmp_path, **{"num-server-rounds": 1}))
    monkeypatch.setattr("logging.StreamHandler.flush", full)
    new_session.run()
    assert "Logging error" not in capfd.readouterr().err


@pytest.mark.linux
@pytest.mark.parametrize("command", ["run", "compare"])
def test_an_unwritable_output_folder_is_named_before_data_are_prepared(command: str) -> None:
    output = call(command, "--output-dir=/proc/x", expect=1)
    assert output.count("/proc/x") == 2  # the plan, and the error
    assert "Preparing" not in output
    assert "failed" not in output


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            "/x: No space .* Free some disk space",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "/x: Read-only .* another folder"),
        (
            FileExistsError(errno.EEXIST, "File exists", "k"),
            "k: File exists. Existing files are not",
        ),
        (OSError(errno.EIO, "Input/output error"), r"^Input/output error\.$"),
        (OSError("odd"), "^odd$"),
        (ValueError("odd"), "^odd$"),
    ],
)
def test_error_text_adds_advice_to_known_os_errors(error: Exception, text: str) -> None:
    with pytest.raises(WriteError, match=text):
        raise WriteError(error_text(error))
