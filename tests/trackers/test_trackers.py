"""Metrics that were logged, as the trackers' own libraries read them back."""

from __future__ import annotations

import json
import multiprocessing
import re
import struct
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import resuming
from processes import wait_for
from resuming import resume, stopped
from runs import config, history, run

from fairflower import trackers
from fairflower.errors import ConfigError
from fairflower.registry import TRACKERS
from fairflower.report import read_run
from fairflower.report.notes import run_notes
from fairflower.server.contents import read_facts
from fairflower.trackers import Tracker

#: Name -> pairs of step and value.
Scalars = dict[str, list[tuple[int, float]]]


def metrics_of(folder: Path) -> Scalars:
    """Metrics of every round in the history, by the names that trackers use."""
    scalars: Scalars = {}
    for row in history(folder):
        name = {"domain": f"{row['metric']}/{row['name']}", "run": row["metric"]}.get(row["level"])
        if name:
            scalars.setdefault(name, []).append((int(row["round"]), float(row["value"])))
    return scalars


def tensorboard(folder: Path) -> tuple[Scalars, dict[str, str], dict[str, Any]]:
    """Scalars by round, texts and hyper-parameters, as TensorBoard shows them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    scalars = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    texts = {
        name.removesuffix("/text_summary"): events.Tensors(name)[-1].tensor_proto.string_val[0]
        for name in events.Tags()["tensors"]
    }
    metadata = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    chosen = parse_session_start_info_plugin_data(metadata).hparams
    return scalars, {name: text.decode() for name, text in texts.items()}, dict(chosen)


def mlflow(folder: Path) -> tuple[Scalars, dict[str, str], Any]:
    """Metrics by round, parameters, and the run as MLflow's own client reads them."""
    from mlflow import MlflowClient

    client = MlflowClient()
    (mlflow_run,) = client.search_runs([client.get_experiment_by_name("fairflower").experiment_id])
    assert mlflow_run.info.run_name == folder.name
    history = {
        name: client.get_metric_history(mlflow_run.info.run_id, name)
        for name in mlflow_run.data.metrics
    }
    scalars = {
        # MLflow keeps both values of a repeated round, which are equal.
        name: sorted({(metric.step, metric.value) for metric in metrics})
        for name, metrics in history.items()
    }
    return scalars, mlflow_run.data.params, mlflow_run


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after W&B's header of seven bytes."""
    block, whole, place = 2**15, b"", 7
    while place + 7 <= len(data):
        if block - place % block < 7:  # no room for the header of another record
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if place + 7 + length > len(data):  # it is still being written
            return
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def wandb(folder: Path) -> tuple[Scalars, dict[str, Any], dict[str, Any]]:
    """Metrics by round, config and summary, from the files that ``wandb sync`` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    def records(path: Path) -> list[Any]:
        return [Record.FromString(data) for data in leveldb_log(path.read_bytes())]

    scalars: Scalars = {}
    settings: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in paths}) == 1, "all sessions are of one run"
    for path in paths:
        # W&B's service may still be writing after `finish` has returned.
        wait_for(lambda path=path: any(r.HasField("exit") for r in records(path)), "W&B's last")
        for record in records(path):
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                value = json.loads(item.value_json)
                if isinstance(value, float | int) and not key.startswith("_"):
                    scalars.setdefault(key, []).append((record.history.step.num, value))
            for item in (*record.run.config.update, *record.config.update):
                settings[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return scalars, settings, summary


def assert_logged(scalars: Scalars, folder: Path) -> None:
    expected = metrics_of(folder)
    assert expected.keys() <= scalars.keys()
    for name, values in expected.items():
        assert [step for step, _ in scalars[name]] == [step for step, _ in values], name
        assert [v for _, v in scalars[name]] == pytest.approx([v for _, v in values]), name
    assert {"accuracy/AVG", "accuracy/MIN", "accuracy/STD", "train_loss"} <= scalars.keys()
    finals = read_run(folder).final()
    for domain, value in zip(read_run(folder).domains, finals, strict=True):
        assert scalars[f"final/accuracy/{domain}"][-1] == (3, pytest.approx(value))


@pytest.fixture
def interrupted(tmp_path):
    """Make a run that was stopped in its second round and goes on after the first one."""

    def make(track: str, **changes: Any) -> Path:
        return resume(stopped(resuming.config(tmp_path, track=track, **changes), 2))

    return make


def test_tensorboard_has_every_round_of_a_resumed_run_once(interrupted) -> None:
    # Without a checkpoint the run starts over, and no round is logged twice.
    for changes in ({}, {"checkpoint.every": 3}):
        folder = interrupted("tensorboard", **changes)
        scalars, texts, chosen = tensorboard(folder)
        assert_logged(scalars, folder)
        assert 'strategy.name = "fedheal"' in texts["config"]
        worst = scalars["final/accuracy/MIN"][-1][1]
        assert texts["final"].startswith("completed")
        assert f"| MIN | {100 * worst:.2f} |" in texts["final"]
        assert chosen["strategy.name"].string_value == "fedheal"
        assert chosen["train.lr"].number_value == 0.05


@pytest.mark.slow
def test_mlflow_has_every_round_of_a_resumed_run(interrupted, tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    folder = interrupted("mlflow")
    scalars, params, mlflow_run = mlflow(folder)
    assert_logged(scalars, folder)
    assert mlflow_run.info.status == "FINISHED"
    assert params["strategy.name"] == "fedheal"
    assert params["train.lr"] == "0.05"


def _begin(barrier: Any, answers: Any, number: int) -> None:
    from fairflower.trackers.mlflow import MLflow

    barrier.wait()
    try:
        MLflow(Path(f"run-{number}"), {}, "", -1)
        answers.put("")
    except Exception as error:
        answers.put(repr(error))


@pytest.mark.nightly
@pytest.mark.slow
def test_parallel_runs_create_the_store_and_the_experiment_once(tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=_begin, args=(barrier, answers, n)) for n in range(2)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=120) for _ in processes] == ["", ""]
    for process in processes:
        process.join()


@pytest.mark.slow
def test_an_experiment_that_another_machine_has_created_is_used(tmp_path, monkeypatch) -> None:
    pytest.importorskip("mlflow")
    from fairflower.trackers.mlflow import MLflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    assert len({MLflow(Path(name), {}, "", -1).key for name in ("one", "two")}) == 2


@pytest.mark.slow
def test_an_mlflow_experiment_may_be_created_by_another_run_at_the_same_time(
    tmp_path, monkeypatch
) -> None:
    """As in the first parallel comparison: both runs look for the experiment, then create it."""
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    from fairflower.trackers.mlflow import MLflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    create = MlflowClient.create_experiment

    def create_twice(client: MlflowClient, name: str) -> str:
        create(client, name)
        return create(client, name)

    monkeypatch.setattr(MlflowClient, "create_experiment", create_twice)
    tracker = MLflow(tmp_path / "a", {"train.lr": 0.05}, "", -1)
    tracker.end("completed", {"accuracy/mnist": 0.9})
    _, params, mlflow_run = mlflow(tmp_path / "a")
    assert (mlflow_run.info.run_id, params) == (tracker.key, {"train.lr": "0.05"})


@pytest.mark.slow
@pytest.mark.nightly
def test_wandb_files_have_every_round_of_a_resumed_run_once(interrupted, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = interrupted("wandb")
    scalars, settings, summary = wandb(folder)
    finals = {n: [(3, value)] for n, value in summary.items() if n.startswith("final/")}
    assert_logged(scalars | finals, folder)
    assert settings["strategy.name"] == "fedheal"
    assert summary["status"] == "completed"


@pytest.mark.parametrize("track", TRACKERS)
def test_a_missing_library_is_named_before_the_run(tmp_path, monkeypatch, track) -> None:
    monkeypatch.setattr(trackers, "installed", lambda name: False)
    with pytest.raises(ConfigError, match=rf'pip install "fairflower\[{track}\]"'):
        run(config(tmp_path, track=track))
    assert not list(tmp_path.iterdir())


class Lost(Tracker):
    """A tracker whose connection breaks."""

    def __init__(self, *args: object) -> None:
        self.key = "lost"

    def round(self, server_round: int, metrics: object) -> None:
        raise RuntimeError("no route")

    def end(self, status: str, final: object) -> None:
        raise AssertionError("a failed tracker is not called again")


class Unreachable(Tracker):
    """A tracker that does not find its server."""

    def __init__(self, *args: object) -> None:
        raise RuntimeError("no route")

    round = end = Lost.end


class Nameless(Tracker):
    """A tracker that forgot its key."""

    def __init__(self, *args: object) -> None:
        pass

    round = end = Lost.end


@pytest.mark.parametrize(
    ("tracker", "key", "message"),
    [
        (Lost, "lost", r"it failed with RuntimeError: no route \(test_trackers.py, line \d+"),
        (Unreachable, None, r"it failed with RuntimeError: no route \(test_trackers.py, line"),
        (Nameless, None, "has no attribute 'key'"),
    ],
)
def test_a_tracker_that_fails_or_cannot_start_does_not_end_the_run(
    tracker, key, message, tmp_path
) -> None:
    track = f"{__name__}:{tracker.__name__}"
    folder = run(config(tmp_path, track=track))
    assert read_run(folder).status == "completed"
    log = (folder / "log.txt").read_text()
    assert log.count(f"track = {track} failed") == 1
    assert re.search(message, log)
    facts = read_facts(folder)
    assert facts.get("tracked") == (key and {track: key})
    assert list(facts["untracked"]) == ["0"]
    (note,) = run_notes(read_run(folder))
    assert note.startswith(f"track = {track} logged no more from round 0 on: ")
    assert re.search(message, note)


@pytest.mark.parametrize(
    ("track", "message"),
    [
        ("tensorbord", "Unknown tracker 'tensorbord'. Did you mean 'tensorboard'"),
        ("nowhere:Mine", "Install its package where the server runs"),
        ("fairflower.errors:ConfigError", "expected a subclass of fairflower.trackers"),
        ("tensorboard:x=1", "track = 'tensorboard': x: tensorboard has no arguments"),
    ],
)
def test_an_invalid_tracker_is_refused_before_the_run(track, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, track=track)


def test_every_tracker_has_an_extra_of_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for track in TRACKERS:
        assert any(name.startswith(track) for name in extras[track])
