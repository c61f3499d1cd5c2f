"""Reading run folders: complete lines count, and damage is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import constant, edit, make_run, printed_tables, rising, tables_of

from fairflower.config import RunConfig
from fairflower.errors import RunFolderError
from fairflower.report import read_run, terminal_table, write_report
from fairflower.server.folder import RunFolder


@pytest.mark.parametrize("name", ["a\u2028b", "a\x85b", "a\x0cb", "a\nb", 'a"b', "a,b", "=1+1"])
def test_domains_may_have_any_name(tmp_path: Path, name: str) -> None:
    config = RunConfig.from_flat({"output-dir": str(tmp_path)})
    clients = [{"client_id": 0, "domain": name, "num_examples": 3, "class_counts": [1, 2]}]
    folder = RunFolder.create(config, {"domains": [name], "clients": clients})
    for r in range(2):
        folder.append_metrics(r, "domain", name, {"accuracy": 0.25 * r, "loss": 1.0})
    folder.finish("completed")
    run = read_run(folder.path)
    assert (run.domains, run.values.tolist()) == ((name,), [[0.0], [0.25]])


def test_a_run_folder_is_read_back_as_written(tmp_path: Path) -> None:
    config = RunConfig.from_flat(
        {"output-dir": str(tmp_path), "seed": 4, "strategy.name": "fedheal", "num-server-rounds": 2}
    )
    clients = [{"client_id": 0, "domain": "a", "num_examples": 3, "class_counts": [1, 2]}]
    folder = RunFolder.create(config, {"domains": ["a"], "clients": clients})
    for r in range(3):
        folder.append_metrics(r, "domain", "a", {"accuracy": 0.25 * r, "loss": 1.0})
        folder.append_metrics(r, "client", "0", {"accuracy": 0.5, "train_loss": 1.0})
        folder.append_metrics(r, "run", "", {"seconds": 1.0})
    folder.append_diagnostics(1, [0], {"weights": np.ones(1), "scale": 0.5}, {})
    folder.append_diagnostics(2, [0], {"weights": np.ones(1)}, {1: "its reply has NaN"})
    running = read_run(folder.path)
    folder.finish("completed")
    run = read_run(folder.path)
    assert (running.status, run.status, run.seed, run.label) == (
        "running",
        "completed",
        4,
        "fedheal",
    )
    assert run.rounds.tolist() == run.by_client.rounds.tolist() == [0, 1, 2]
    assert run.values.tolist() == [[0.0], [0.25], [0.5]]
    assert run.by_client.values.tolist() == [[0.5]] * 3
    assert run.clients[0].class_counts == (1, 2)
    assert run.config["strategy.name"] == "fedheal"
    assert run.final(window=5).tolist() == [0.375]
    assert "1 reply was dropped, from client 1" in printed_tables(folder.path)


def test_a_stopped_run_is_readable_and_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=4), status="stopped", rounds=[0, 1, 2, 3])
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("num-server-rounds = 3", "num-server-rounds = 20"))
    text = printed_tables(folder)
    assert "federation 0, stopped after round 3 of 20" in text
    assert "mean of all 3 tested rounds (1 to 3)" in text
    page = tables_of(folder)
    assert (
        page.table("Accuracy per domain, mean of all 3")[
            "fedheal federation 0, stopped after round 3 of 20"
        ]["a"]
        == "52.00"
    )


def test_half_written_rounds_and_lines_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=3), status="running")
    with (folder / "history.csv").open("a") as history:
        history.write("3,domain,a,accuracy,0.7\n3,domain,b,accuracy,0.1")
    with (folder / "diagnostics.jsonl").open("a") as lines:
        lines.write('{"round": 1, "client_ids": [], "x": 1}\n{"round": 2, "cli')
    run = read_run(folder)
    assert run.rounds.tolist() == [0, 1, 2]
    assert len(run.diagnostics) == 1


def test_final_accuracies_use_only_tested_rounds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=4), rounds=[0, 5, 10, 15])
    run = read_run(folder)
    assert run.final_rounds(5) == (5, 10, 15)
    assert run.final(5).tolist() == pytest.approx([0.52, 0.9])
    assert run.final(1).tolist() == pytest.approx([0.53, 0.9])


def test_an_untrained_model_can_be_reported(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", constant(1, a=0.1, b=0.2))
    assert "Accuracy per domain, round 0" in printed_tables(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "run.json").unlink(),
            "not a run folder: the file run.json is missing",
        ),
        (lambda folder: (folder / "history.csv").unlink(), "the file history.csv is missing"),
        (edit("run.json", "{", "["), "run.json is not valid JSON"),
        (edit("run.json", '"label"', '"lable"'), "it has no 'label'"),
        (
            edit("run.json", '"domains": ["a", "b"]', '"domains": ["a"]'),
            "the domain of client 2 is not in the list of domains",
        ),
        (edit("run.json", '"client_id"', '"id"'), "run.json: clients[0] has no 'client_id'"),
        (edit("history.csv", "round,level", "level,round"), "history.csv has the columns"),
        (edit("history.csv", "accuracy,0.9", "accuracy,90.0"), "line 5: accuracy 90.0 of domain b"),
        (edit("history.csv", "0,domain,a,accuracy", "x,domain,a,accuracy"), "line 3: cannot read"),
        (edit("diagnostics.jsonl", "{", ""), "diagnostics.jsonl, line 1 is not valid JSON"),
        (edit("diagnostics.jsonl", "round", "r"), "line 1: it has no 'round'"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = make_run(tmp_path / "r", rising(0.5), diagnostics=[{"round": 1}])
    damage(folder)
    with pytest.raises(RunFolderError, match=re.escape(message)) as caught:
        read_run(folder)
    assert str(folder) in str(caught.value)


def test_folders_without_a_readable_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"The run folder .*nowhere does not exist"):
        read_run(tmp_path / "nowhere")
    folder = make_run(tmp_path / "r", constant(1, a=0.1), status="failed", error="it burnt")
    with pytest.raises(
        RunFolderError, match=r"trained and tested round \(failed\)\. Its error: it burnt"
    ):
        read_run(folder)
    (folder / "config.toml").write_text("seed = = 1")
    with pytest.raises(RunFolderError, match=r"config\.toml is not valid TOML"):
        read_run(folder)
    (folder / "config.toml").write_text("")
    with pytest.raises(
        RunFolderError, match=r"config\.toml has no strategy\.name, so the file is empty"
    ):
        read_run(folder)


def test_a_diverged_run_is_not_said_to_be_resumable(tmp_path: Path) -> None:
    errors = {
        "Diverged: Round 1: infinite.": "Start a new run with other settings.",
        "RoundFailed: Round 1: no reply.": "The run can be resumed from its last checkpoint.",
    }
    for number, (error, advice) in enumerate(errors.items()):
        folder = make_run(
            tmp_path / str(number), [{"a": 0.5}], rounds=[0], status="failed", error=error,
            config="[checkpoint]\nevery = 1\n",
        )  # fmt: skip
        with pytest.raises(RunFolderError) as refused:
            read_run(folder)
        assert str(refused.value).endswith(advice)


def test_a_report_without_runs_is_refused() -> None:
    with pytest.raises(RunFolderError, match="No runs"):
        terminal_table([])
    with pytest.raises(RunFolderError, match="No runs"):
        write_report([], Path("never"))
