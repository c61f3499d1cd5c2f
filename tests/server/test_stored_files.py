"""Files of a run folder that do not belong together: every reader says so, and resuming goes on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resuming import config, outcome, resume, session, stopped
from rich.console import Console
from run_folders import edit, make_run, rising

import fairflower as ff
from fairflower.api.final_model import export, load_run_model
from fairflower.errors import ConfigError, RunFolderError
from fairflower.plans.execution import remaining_plan
from fairflower.plans.plan import Plan
from fairflower.report import find_readable_runs, read_run
from fairflower.server.checkpoint import resumed_config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run of three rounds."""
    return session(config(tmp_path_factory.mktemp("whole"))).run()


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the completed run, which a test may damage."""
    return shutil.copytree(whole, tmp_path / "copy")


def cut(name: str, lines: int) -> Callable[[Path], Any]:
    """Return a function that cuts off the last lines of a file."""

    def change(folder: Path) -> None:
        kept = (folder / name).read_bytes().splitlines(keepends=True)[:-lines]
        (folder / name).write_bytes(b"".join(kept))

    return change


def cut_after(server_round: int) -> Callable[[Path], Any]:
    """Return a function that cuts the history after a round."""

    def change(folder: Path) -> None:
        first, *lines = (folder / "history.csv").read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if int(line.partition(b",")[0]) <= server_round]
        (folder / "history.csv").write_bytes(first + b"".join(kept))

    return change


def test_a_completed_run_whose_history_was_cut_is_not_read_by_any_reader(folder: Path) -> None:
    cut_after(1)(folder)
    words = r"history\.csv ends after round 1; the run has made 3 rounds\. Restore"
    with pytest.raises(RunFolderError, match=words):
        read_run(folder)
    with pytest.warns(UserWarning, match=words), pytest.raises(RunFolderError, match="no readable"):
        ff.read(folder)


def test_a_cut_history_of_an_earlier_version_is_recognized_by_the_number_of_rounds(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=41))  # no digests in its run.json
    assert read_run(folder).last_round == 40
    cut_after(3)(folder)
    with pytest.raises(RunFolderError, match="ends after round 3; the run has made 40 rounds"):
        read_run(folder)
    killed = make_run(tmp_path / "k", rising(0.5, rounds=8), status="running")
    cut_after(6)(killed)  # killed in the tests of its last round
    assert (read_run(killed).status, read_run(killed).last_round) == ("killed", 6)
    cut_after(5)(killed)
    with pytest.raises(RunFolderError, match="or resume the run"):
        read_run(killed)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut("history.csv", 1), "history.csv"),
        (cut("diagnostics.jsonl", 1), "diagnostics.jsonl"),
        (edit("history.csv", "2,run,,", "3,run,,"), "history.csv"),
        (lambda folder: (folder / "diagnostics.jsonl").unlink(), "diagnostics.jsonl"),
    ],
)
def test_files_that_a_run_did_not_write_are_named(damage: Any, named: str, folder: Path) -> None:
    read_run(folder)
    damage(folder)
    with pytest.raises(RunFolderError, match=re.escape(str(folder / named))):
        read_run(folder)


def test_other_line_ends_are_no_change(folder: Path) -> None:
    content = (folder / "history.csv").read_bytes()
    other = content.replace(b"\r\n", b"\n")
    assert content != other
    (folder / "history.csv").write_bytes(other)  # as Git may do
    assert read_run(folder).last_round == 3


def test_a_config_that_was_edited_by_hand_is_named_with_its_settings(folder: Path) -> None:
    edit("config.toml", "\nworkers = 0", "\n# of this machine\nworkers = 7")(folder)
    assert read_run(folder).config["workers"] == 7  # it does not change results
    edit("config.toml", "\nlr = 0.05", "\nlr = 0.5")(folder)
    with pytest.raises(RunFolderError, match=r"train\.lr was 0\.05 and is 0\.5"):
        read_run(folder)
    edit("config.toml", "\nlr = 0.5", "\nlr = 0.05\n[trian]\nlr = 1")(folder)
    with pytest.raises(RunFolderError, match=r"trian\.lr was 'default' and is 1"):
        read_run(folder)


def test_an_unknown_key_of_an_earlier_run_is_reported_with_its_file(folder: Path) -> None:
    facts = json.loads((folder / "run.json").read_text())
    del facts["config"], facts["files"]
    (folder / "run.json").write_text(json.dumps(facts))
    edit("config.toml", "seed = 0", "sead = 0")(folder)
    shutil.rmtree(folder / "checkpoints")
    for read in (
        lambda: resumed_config(folder, {}),
        lambda: export(read_run(folder), "state-dict"),
        lambda: load_run_model(read_run(folder), "", "cpu"),
    ):
        with pytest.raises(ConfigError, match=rf"{folder}/config\.toml: .*sead"):
            read()


def test_a_deleted_or_exchanged_model_is_not_explained_by_too_few_rounds(folder: Path) -> None:
    model = folder / "model.safetensors"
    content = model.read_bytes()
    model.write_bytes(content[:-4] + b"\0\0\x80?")
    for use in (lambda: export(read_run(folder), "state-dict"), lambda: ff.read(folder)[0].model):
        with pytest.raises(RunFolderError, match=r"model\.safetensors has been changed since"):
            use()
    model.unlink()
    with pytest.raises(RunFolderError, match=r"safetensors is missing; the run has made 3 rounds"):
        export(read_run(folder), "state-dict")


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_the_model_of_a_run_that_did_not_end_is_exported_with_a_warning(
    status: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stopped(config(tmp_path), 3)
    edit("run.json", '"status": "stopped"', f'"status": "{status}"')(folder)
    said = {"running": "killed", "stopped": "stopped"}[status]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        export(read_run(folder), "state-dict")
    assert (
        f"{folder}: {said} after round 2 of 3. This is not the model of a completed run."
        in caplog.text
    )


def test_a_comparison_names_the_damaged_run_that_it_repeats(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan([config(folder.parent)])
    console = Console(quiet=True)
    assert not remaining_plan(plan, folder.parent, console).runs
    cut_after(2)(folder)
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert find_readable_runs(folder.parent) == []
    assert "ends after round 2" in caplog.text
    assert "This run is left out" in caplog.text
    assert remaining_plan(plan, folder.parent, console).runs == plan.runs


# --- resuming --------------------------------------------------------------------------------


def test_a_history_whose_last_line_is_lost_goes_on_from_the_checkpoint_before(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stopped(config(tmp_path), 3)
    cut("history.csv", 1)(folder)
    with pytest.raises(RunFolderError, match="Restore the file, or resume the run"):
        read_run(folder)
    resume(folder)
    assert outcome(folder) == outcome(whole)
    assert "history.csv is shorter than at the time of round-000002.safetensors" in caplog.text
    assert read_run(folder).info["resumed"][0]["after_round"] == 1


def change_accuracy(content: bytes) -> bytes:
    """Return a history with another accuracy in round 0, in as many bytes."""
    at = content.index(b",accuracy,0.") + len(b",accuracy,0.")
    return content[:at] + (b"8" if content[at : at + 1] == b"9" else b"9") + content[at + 1 :]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("history.csv", change_accuracy),
        ("diagnostics.jsonl", lambda content: content.replace(b"\n", b"\r\n")),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_a_run_does_not_go_on_from_rounds_that_were_changed(
    name: str, change: Callable[[bytes], bytes], ended: bool, tmp_path: Path
) -> None:
    folder = stopped(config(tmp_path), 3)
    if not ended:  # a killed run has no digests in run.json
        facts = json.loads((folder / "run.json").read_text())
        del facts["files"]
        (folder / "run.json").write_text(json.dumps(facts | {"status": "running"}))
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(ConfigError, match=f"{name} has been changed since the time of round-0000"):
        resume(folder)


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_run_is_resumed_without_its_run_json(
    content: str | None, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stopped(config(tmp_path), 3)
    before = json.loads((folder / "run.json").read_text())
    (folder / "run.json").unlink() if content is None else (folder / "run.json").write_text(content)
    resume(folder)
    assert outcome(folder) == outcome(whole)
    after = json.loads((folder / "run.json").read_text())
    for name in ("run_id", "started", "command", "clients", "digest", "label", "name"):
        assert after[name] == before[name], name
    assert "The newest checkpoint is read instead" in caplog.text
    read_run(folder)


def test_a_private_run_without_its_run_json_is_not_resumed(tmp_path: Path) -> None:
    private = {"privacy.noise-multiplier": 2.0, "privacy.clip": 1.0, "model.name": "cnn"}
    folder = stopped(config(tmp_path, **{"strategy.name": "fedavg", **private}), 3)
    (folder / "run.json").write_text("")  # it counts the rounds that have begun
    with pytest.raises(ConfigError, match=r"run\.json is not valid JSON"):
        resumed_config(folder, {})
