"""Checkpoints and resuming: a resumed run equals an uninterrupted run bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from parametrize import mark_others_nightly
from remembering import attributes, equal
from resuming import config, outcome, resume, session, stopped

from fairflower.aggregation.consistency import SignConsistency
from fairflower.errors import ConfigError, WriteError
from fairflower.files import DamagedFile, read_arrays, write_arrays
from fairflower.models.prompt_vit import vit_tiny
from fairflower.paths import client_states
from fairflower.plans.plan import Plan
from fairflower.registry import CLIENTS
from fairflower.report import read_run
from fairflower.server import checkpoint
from fairflower.server.checkpoint import (
    Checkpoint,
    resumable_configs,
    resumed_config,
)
from fairflower.server.contents import read_facts
from fairflower.server.folder import RunFolder, lock_folder
from fairflower.strategies import STRATEGIES, FedAvg
from fairflower.testing.rounds import MODEL, Rounds, updates

# --- files of arrays with checksums --------------------------------------------------------

dtypes = st.sampled_from(["f4", "f8", "f2", "i1", "i8", "u1", "u2", "u8", "?"])
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


@given(st.dictionaries(st.text(max_size=6).filter(lambda n: n != "__metadata__"), arrays))
def test_arrays_are_read_back_with_their_dtype_shape_order_and_bits(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "arrays.safetensors"
    write_arrays(path, content, {"round": 3, "sizes": {"a": 1}})
    actual, facts = read_arrays(path)
    assert facts == {"round": 3, "sizes": {"a": 1}}
    assert list(actual) == list(content)
    for name, array in content.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
        assert actual[name].tobytes() == array.tobytes()
        assert actual[name].flags.writeable


def test_strided_and_transposed_views_are_read_back_unchanged(tmp_path):
    array = np.arange(12.0).reshape(3, 4).T[::2]
    write_arrays(tmp_path / "x", {"a": array}, {})
    np.testing.assert_array_equal(read_arrays(tmp_path / "x")[0]["a"], array)


def test_a_changed_byte_and_a_truncated_file_are_detected(tmp_path):
    path = tmp_path / "x.safetensors"
    write_arrays(path, {"w": np.ones(3, np.float32), "n": np.array(5)}, {"round": 7})
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(DamagedFile, match=r"x\.safetensors"):
            read_arrays(path)
    for length in (0, 7, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile):
            read_arrays(path)


def test_an_interrupted_write_keeps_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write_arrays(path, {"w": np.zeros(2)}, {})

    def die(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_arrays(path, {"w": np.ones(2)}, {})
    assert read_arrays(path)[0]["w"].sum() == 0
    assert list(tmp_path.iterdir()) == [path], "a partly written file is left"


# --- checkpoints -----------------------------------------------------------------------------


def make_checkpoint(server_round: int) -> Checkpoint:
    return Checkpoint(server_round, {"w": np.full(2, server_round)}, {}, 1.5, {}, {})


def test_saving_deletes_old_checkpoints_and_temporary_files_but_no_other_files(tmp_path):
    for server_round in range(12):
        checkpoint.save(tmp_path, make_checkpoint(server_round), keep=3)
        (tmp_path / "checkpoints" / ".round-9.tmp").write_text("half a file")
    (tmp_path / "checkpoints" / "round-000009 (copy).safetensors").write_text("of the user")
    checkpoint.save(tmp_path, make_checkpoint(12), keep=3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "round-000009 (copy).safetensors",
        *(f"round-0000{n}.safetensors" for n in (10, 11, 12)),
    ]
    assert checkpoint.rounds(tmp_path) == [10, 11, 12]
    saved = checkpoint.load(tmp_path)
    assert (saved.server_round, saved.model["w"].tolist()) == (12, [12, 12])


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog):
    for server_round in (4, 5):
        checkpoint.save(tmp_path, make_checkpoint(server_round), keep=2)
    newest, before = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert checkpoint.load(tmp_path).server_round == 4
    assert newest.name in caplog.text
    before.write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"All checkpoints of.*(?s:.*){before.name}"):
        checkpoint.load(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_skipped_with_a_warning(tmp_path, caplog):
    for server_round in (4, 5):
        checkpoint.save(tmp_path, make_checkpoint(server_round), keep=2)
    newest, _ = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    arrays, facts = read_arrays(newest)
    write_arrays(newest, arrays, {name: value for name, value in facts.items() if name != "best"})
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert checkpoint.load(tmp_path).server_round == 4
    assert f"{newest} has no 'best': an earlier version of fairflower has written it" in caplog.text


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_restored_from_checkpoints_computes_the_same_rounds(name, tmp_path):
    def make():
        options = {"tau": 3} if name == "fedfv" else {}
        return STRATEGIES[name](min_clients=1, observers=[SignConsistency(3)], **options)

    random = np.random.default_rng(8)
    whole = Rounds(make(), MODEL, range(5))
    going = Rounds(make(), MODEL, range(5))
    for present in ([0, 1, 4], [3, 1], [0, 3], [4, 2, 1], [2, 0], [1, 4]):
        moves = updates(random, present)
        examples = {k: 7 * k + 3 for k in present}
        now = Checkpoint(going.round, going.model, going.strategy.state_dict(), 0.0, {}, {})
        checkpoint.save(tmp_path, now, keep=1)
        saved = checkpoint.load(tmp_path)
        going = Rounds(make(), saved.model, range(5))
        going.round = saved.server_round
        going.strategy.load_state_dict(saved.state)
        one, two = whole.step(moves, examples), going.step(moves, examples)
        assert all(one[key].tobytes() == two[key].tobytes() for key in MODEL)
        assert equal(attributes(whole.strategy), attributes(going.strategy))


# --- whole runs ------------------------------------------------------------------------------

METHODS = {
    "fedavg": {"strategy.name": "fedavg", "evaluate.by": "both", "server.optimizer": "adam"},
    "fedheal": {"strategy.name": "fedheal", "observe.window": 2},
    "fedequilibria": {"strategy.name": "fedequilibria", "evaluate.every": 2},
    "fedfv": {"strategy.name": "fedfv", "strategy.tau": 3, "checkpoint.every": 2},
    "fedce": {"strategy.name": "fedce"},  # whose clients have state for its measurement
}


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_stopped_in_every_round_equals_an_uninterrupted_run(method, tmp_path):
    whole = session(config(tmp_path, **METHODS[method])).run()
    folder = stopped(config(tmp_path, **METHODS[method]), 1)
    for server_round in (2, 3):
        assert stopped(resumed_config(folder, {}), server_round) == folder
    assert resume(folder) == folder
    assert outcome(folder) == outcome(whole)
    facts = json.loads((folder / "run.json").read_text())
    every = METHODS[method].get("checkpoint.every", 1)
    assert [r["after_round"] for r in facts["resumed"]] == [
        (n - 1) // every * every for n in (1, 2, 3)
    ]


@pytest.fixture
def no_states():
    """Remove client states of earlier tests, which share the home folder."""
    shutil.rmtree(client_states(), ignore_errors=True)


# The first five have no state, like `sgd`; test_kill.py kills runs of the others at night.
TESTED_ELSEWHERE = ("fedavg", "sam", "fedsam", "gsam", "fedprox", "moon", "feddyn", "fedgc")
TESTED_HERE = [(name,) for name in CLIENTS if name not in TESTED_ELSEWHERE]


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", mark_others_nightly([(name,) for name in CLIENTS], TESTED_HERE))
def test_a_resumed_run_of_each_trainer_equals_an_uninterrupted_run(name, tmp_path, no_states):
    settings = {"strategy.name": "fedavg", "client.name": name, "evaluate.by": "both"}
    whole = session(config(tmp_path, **settings)).run()
    folder = resume(stopped(config(tmp_path, **settings), 3))
    assert outcome(folder) == outcome(whole)
    assert not list(client_states().glob("*"))  # deleted at the end of the run


def test_clients_states_are_deleted_only_after_the_status_is_written(
    tmp_path, no_states, monkeypatch
):
    def die(folder: RunFolder, *_: str) -> None:
        folder._lock.release()
        raise KeyboardInterrupt

    new = session(config(tmp_path, **{"client.name": "scaffold"}))
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            new.run()
    (folder,) = tmp_path.glob("*/run.json")
    assert list(client_states().glob("*/*"))
    resume(folder.parent)
    assert not list(client_states().glob("*"))


@pytest.mark.slow
def test_repeated_rounds_start_from_the_client_states_of_the_checkpoint(tmp_path):
    settings = {"strategy.name": "uniform", "client.name": "scaffold", "num-server-rounds": 5}
    settings |= {"checkpoint.every": 2, "checkpoint.keep": 2}
    whole = session(config(tmp_path, **settings)).run()
    folder = stopped(config(tmp_path, **settings), 5)
    (newest, _) = sorted((folder / "checkpoints").iterdir(), reverse=True)
    assert newest.name == "round-000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])  # so that rounds 3 and 4 are repeated
    assert outcome(resume(folder)) == outcome(whole)


def test_client_states_are_kept_for_the_checkpoint_of_a_run_stopped_by_a_callback(tmp_path):
    """The run stops after round 2, which is not a multiple of checkpoint.every."""
    settings = {"client.name": "scaffold", "num-server-rounds": 5, "checkpoint.every": 4}
    whole = session(config(tmp_path, **settings)).run()
    folder = session(config(tmp_path, **settings), on_round=lambda n, _: n == 2).run()
    assert stopped(resumed_config(folder, {}), 4) == folder
    assert outcome(resume(folder)) == outcome(whole)


def test_resuming_accepts_the_same_relative_path_again(tmp_path, monkeypatch):
    (tmp_path / "trace.csv").write_text("round,client\n1,0\n1,1\n1,2\n1,3\n")
    monkeypatch.chdir(tmp_path)
    trace = {"participation.availability": "trace.csv"}
    folder = stopped(config(tmp_path, **trace), 2)
    resumed = resumed_config(folder, trace)
    assert resumed.participation.availability == str(tmp_path / "trace.csv")
    with pytest.raises(ConfigError, match=r"availability = 3: expected text"):
        resumed_config(folder, {"participation.availability": 3})
    with pytest.raises(ConfigError, match=r"availability = 'other\.csv' was given"):
        resumed_config(folder, {"participation.availability": "other.csv"})


def test_a_run_whose_end_cannot_be_written_names_the_resume_command(tmp_path, monkeypatch):
    finish = RunFolder.finish

    def on_a_full_disk(folder, status, *error):
        if status == "completed":
            os.listdir(tmp_path / "gone")
        finish(folder, status, *error)

    whole = session(config(tmp_path / "whole")).run()
    with monkeypatch.context() as full:
        full.setattr(RunFolder, "finish", on_a_full_disk)
        new_session = session(config(tmp_path))
        with pytest.raises(WriteError, match="fairflower run --resume"):
            new_session.run()
    facts = json.loads((new_session.folder.path / "run.json").read_text())
    assert (facts["status"], facts["rounds"]) == ("failed", 3)
    assert outcome(resume(new_session.folder.path)) == outcome(whole)


def test_an_os_error_in_a_callback_is_logged_and_advises_a_new_run_without_checkpoints(
    tmp_path,
):
    new_session = session(
        config(tmp_path, **{"checkpoint.every": 0}),
        on_round=lambda *_: os.listdir(tmp_path / "gone"),
    )
    with pytest.raises(WriteError, match=r"gone: No such file .* start a new run, because check"):
        new_session.run()
    assert "os.listdir(" in (new_session.folder.path / "log.txt").read_text()


def test_a_run_resumed_with_fewer_rounds_completes_with_a_test_that_more_rounds_keep(tmp_path):
    folder = stopped(config(tmp_path, **{"num-server-rounds": 5, "evaluate.every": 5}), 3)
    resume(folder, **{"num-server-rounds": 2})
    run = read_run(folder)
    assert list(run.rounds) == [0, 2]
    with pytest.raises(ConfigError, match="is complete"):
        resume(folder, **{"num-server-rounds": 2})
    resume(folder, **{"num-server-rounds": 3})
    assert list(read_run(folder).rounds) == [0, 2, 3]


def test_a_damaged_checkpoint_does_not_outlive_the_one_that_a_run_goes_on_from(tmp_path):
    whole = session(config(tmp_path)).run()
    folder = stopped(config(tmp_path), 3)
    (newest, _) = sorted((folder / "checkpoints").iterdir(), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-1])
    assert resumed_config(folder, {})
    assert checkpoint.load(folder).server_round == 1
    assert checkpoint.rounds(folder) == [1, 2], "reading deletes nothing"
    stopped(resumed_config(folder, {}), 2)
    assert checkpoint.rounds(folder) == [1]
    resume(folder, **{"num-server-rounds": 1})
    assert outcome(resume(folder, **{"num-server-rounds": 3})) == outcome(whole)


def test_resuming_warns_of_clients_that_lost_their_state(tmp_path, caplog, no_states):
    settings = {"client.name": "scaffold", "fraction-train": 1.0}
    folder = stopped(config(tmp_path, **settings), 3)
    (run,) = client_states().iterdir()
    for path in (run / "1").iterdir():
        path.unlink()
    (run / "2" / "round-000002.safetensors").write_bytes(b"")
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        resume(folder)
    assert "client 1 has lost its state from round 2 and trained with a new state" in caplog.text
    assert (
        "client 2 has lost its state from round 2 and trained with its state from round 1"
        in caplog.text
    )
    assert "client 0" not in caplog.text


@pytest.mark.posix
def test_a_copied_run_whose_clients_have_state_is_refused_and_a_moved_one_resumed(
    tmp_path, caplog, no_states
):
    settings = {"client.name": "scaffold"}
    whole = session(config(tmp_path, **settings)).run()
    folder = stopped(config(tmp_path, **settings), 3)
    moved = folder.rename(tmp_path / "moved")
    copy = shutil.copytree(stopped(resumed_config(moved, {}), 3), tmp_path / "copy")
    with pytest.raises(ConfigError, match=rf"a copy of {moved}, .* Resume {moved}, or start a new"):
        resume(copy)
    (tmp_path / "link").symlink_to(moved)
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert outcome(resume(tmp_path / "link")) == outcome(whole)
    assert "lost its state" not in caplog.text
    with pytest.raises(ConfigError, match="copy is a copy of"):
        resume(copy)


@pytest.mark.parametrize(("client", "server_round"), [("sgd", 3), ("scaffold", 1)])
def test_a_copied_run_whose_clients_have_no_state_yet_is_a_run_of_its_own(
    tmp_path, client, server_round
):
    settings = {"client.name": client}
    whole = session(config(tmp_path, **settings)).run()
    folder = stopped(config(tmp_path, **settings), server_round)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert stopped(resumed_config(copy, {}), 3) == copy
    assert outcome(resume(folder)) == outcome(whole)
    assert outcome(resume(copy)) == outcome(whole)
    assert read_facts(copy)["run_id"] != read_facts(folder)["run_id"]


WRITES = ["append_metrics", "append_diagnostics", "write_model", "_write_facts", "sizes"]


@pytest.mark.parametrize("where", WRITES)
def test_a_run_interrupted_at_any_write_can_be_resumed(where, tmp_path, monkeypatch):
    whole = session(config(tmp_path)).run()
    new_session = session(config(tmp_path))
    write = getattr(RunFolder, where)

    def die(self, *args, **options):
        if hasattr(self, "_facts") and self._facts["rounds"] >= 1:
            monkeypatch.setattr(RunFolder, where, write)
            with (self.path / "history.csv").open("a") as file:
                file.write("2,domain,pla")
            raise KeyboardInterrupt
        return write(self, *args, **options)

    monkeypatch.setattr(RunFolder, where, die)
    with pytest.raises(KeyboardInterrupt):
        new_session.run()
    assert outcome(resume(new_session.folder.path)) == outcome(whole)


def test_a_run_killed_before_its_first_checkpoint_restarts_in_its_folder(tmp_path, monkeypatch):
    whole = session(config(tmp_path)).run()
    new_session = session(config(tmp_path))

    save = checkpoint.save

    def die(*args):
        monkeypatch.setattr(checkpoint, "save", save)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", die)
    with pytest.raises(KeyboardInterrupt):
        new_session.run()
    assert outcome(resume(new_session.folder.path)) == outcome(whole)


@pytest.mark.posix
@pytest.mark.parametrize("name", ["history.csv", "diagnostics.jsonl", "log.txt"])
def test_a_pipe_in_a_run_folder_is_refused_without_blocking(tmp_path, name):
    folder = stopped(config(tmp_path), 2)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(OSError, match="not a regular file") as error:
        resume(folder)
    assert error.value.filename == str(folder / name)


@pytest.mark.parametrize("every", [1, 3])
def test_a_completed_run_can_be_resumed_with_more_rounds(tmp_path, every):
    saved = {"checkpoint.every": every}
    whole = session(config(tmp_path, **saved, **{"num-server-rounds": 4})).run()
    folder = session(config(tmp_path, **saved, **{"num-server-rounds": 2})).run()
    (last,) = (folder / "checkpoints").iterdir()
    assert last.name == "round-000002.safetensors"
    resume(folder, **{"num-server-rounds": 4})
    assert outcome(folder) == outcome(whole)
    assert "num-server-rounds = 4" in (folder / "config.toml").read_text()
    with pytest.raises(ConfigError, match=r"num-server-rounds = 3: .* already has 4 rounds"):
        resume(folder, **{"num-server-rounds": 3})
    with pytest.raises(
        ConfigError, match=r"is complete: .* 4 rounds are done\. Increase num-server"
    ):
        resume(folder)


def test_a_completed_run_with_client_states_cannot_be_resumed_with_more_rounds(tmp_path):
    folder = session(config(tmp_path, **{"client.name": "scaffold"})).run()
    with pytest.raises(ConfigError, match=r"\(scaffold\) was deleted"):
        resume(folder, **{"num-server-rounds": 9})
    with pytest.raises(ConfigError, match=r"rounds are done\. Start a new run\."):
        resume(folder)


def test_a_run_without_checkpoints_cannot_be_resumed(tmp_path):
    folder = stopped(config(tmp_path, **{"checkpoint.every": 0}), 2)
    assert not (folder / "checkpoints").exists()
    with pytest.raises(ConfigError, match=r"no checkpoint \(perhaps because checkpoint.every = 0"):
        resume(folder)


def test_resuming_accepts_other_engine_settings_and_refuses_other_training_settings(tmp_path):
    folder = stopped(config(tmp_path, **{"train.lr": 0.01}), 2)
    with pytest.raises(ConfigError, match=r"train\.lr = 0\.2 was given.*\(train\.lr = 0\.01\)"):
        resumed_config(folder, {"train.lr": 0.2})
    with pytest.raises(ConfigError, match=r"Did you mean 'train\.lr'"):
        resumed_config(folder, {"train.learning-rate": 0.2})
    given = {"train.lr": 0.01, "workers": 1, "engine": "inline", "privacy.loss-range": 0.0}
    run_config = resumed_config(folder, given)  # 0 is the default for 5, as the run has stored
    assert (run_config.train.lr, run_config.workers, run_config.resume) == (0.01, 1, str(folder))
    with pytest.raises(ConfigError, match=r"not a run folder"):
        resumed_config(tmp_path, {})


def test_resuming_refuses_training_settings_changed_in_config_toml(tmp_path):
    folder = stopped(config(tmp_path), 2)
    file = folder / "config.toml"
    text = file.read_text()

    beta = re.search(r"\[strategy\][^\[]*\nbeta = .*", text)[0]

    def change(before, after):
        assert before in text
        file.write_text(text.replace(before, after, 1))

    edits = {
        r"train\.lr was 0\.05 and is 0\.5": ("\nlr = 0.05", "\nlr = 0.5"),
        r"seed was 0 and is 1": ("seed = 0\nnum", "seed = 1\nnum"),
        r"train\.local-epochs was 1 and is 2": ("local-epochs = 1", "local-epochs = 2"),
        r"client\.name was 'sgd' and is 'sam'": ('name = "sgd"', 'name = "sam"'),
        r"strategy\.beta was 'default' and is 0\.9": (
            beta,
            beta.replace('\nbeta = "default"', "\nbeta = 0.9"),
        ),
    }
    for named, (before, after) in edits.items():
        change(before, after)
        with pytest.raises(
            ConfigError, match=rf"toml has been changed since the run began: {named}\."
        ):
            resumed_config(folder, {})
    newest = max((folder / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])  # the older checkpoint stores the same settings
    with pytest.raises(ConfigError, match=r"strategy\.beta"):
        resumed_config(folder, {})
    # Accepted: a removed default value, and settings that may change when resuming.
    for same in (("lr = 0.05\n", ""), ("workers = 0", "workers = 1"), ("rounds = 3", "rounds = 4")):
        change(*same)
        resumed_config(folder, {})


def test_a_run_that_restarts_from_round_0_uses_its_edited_config_toml(tmp_path):
    folder = stopped(config(tmp_path), 1)
    shutil.rmtree(folder / "checkpoints")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('name = "fedheal"', 'name = "afl"'))
    run = read_run(resume(folder))
    assert (run.label, run.config["strategy.name"]) == ("afl", "afl")


@pytest.mark.parametrize("by", ["server", "clients"])
def test_resuming_compares_data_by_content_and_not_by_path(tmp_path, by):
    def images(place, shade):
        for domain in "ab":
            x, y = np.full((24, 8, 8), shade, np.uint8), np.arange(24) % 2
            place.mkdir(exist_ok=True)
            np.savez(place / f"{domain}.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    for place, shade in (("before", 7), ("after", 7), ("others", 8)):
        images(tmp_path / place, shade)
    run_config = config(tmp_path, **{"data.name": "npz", "data.dir": str(tmp_path / "before")})
    run_config = replace(
        run_config,
        data=replace(run_config.data, examples_per_client=8, clients_per_domain=2),
        evaluate=replace(run_config.evaluate, by=by),
    )
    folder = stopped(run_config, 2)
    shutil.rmtree(tmp_path / "before")
    with pytest.raises(ConfigError, match="its examples changed"):
        resume(folder, **{"data.dir": str(tmp_path / "others")})
    run = read_run(resume(folder, **{"data.dir": str(tmp_path / "after")}))
    assert run.status == "completed"


def test_resuming_refuses_clients_with_other_numbers_of_examples(tmp_path):
    folder = stopped(config(tmp_path), 2)
    facts = json.loads((folder / "run.json").read_text())
    facts["clients"][0]["num_examples"] += 1
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="its clients changed"):
        resume(folder)
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_resuming_refuses_other_frozen_weights(tmp_path):
    weights = tmp_path / "vit.safetensors"
    arrays = {name: tensor.numpy() for name, tensor in vit_tiny().state_dict().items()}
    write_arrays(weights, arrays, {})
    original = weights.read_bytes()
    prompts = {"model.name": "vpt-vit-tiny", "model.weights": str(weights)}
    folder = stopped(config(tmp_path / "runs", **prompts), 2)
    name = next(name for name in arrays if "mlp" in name)
    write_arrays(weights, arrays | {name: arrays[name] + np.float32(0.01)}, {})
    with pytest.raises(ConfigError, match="its frozen weights changed"):
        resume(folder)
    weights.write_bytes(original)
    run = read_run(resume(folder))
    assert run.status == "completed"
    plan = Plan([config(tmp_path / "runs", **prompts)])
    assert not plan.without([run]).runs
    write_arrays(weights, arrays, {"another": "file"})
    with pytest.raises(ConfigError, match=r"vit.safetensors \(model.weights\) has changed since"):
        plan.without([run])


QUALITY = {
    "data.domains": "plain,printed",
    "data.clients-per-domain": 2,
    "data.corrupted-clients": 1,
}


@pytest.mark.parametrize("by", ["server", "clients"])
def test_resuming_refuses_other_images_in_equal_numbers(tmp_path, by):
    folder = stopped(config(tmp_path, **QUALITY, **{"evaluate.by": by}), 2)
    facts = json.loads((folder / "run.json").read_text())
    assert len(facts["digest"]) == 8
    (folder / "run.json").write_text(json.dumps(facts | {"digest": "0" * 8}))
    with pytest.raises(ConfigError, match="its examples changed"):
        resume(folder)


def test_two_processes_cannot_write_to_the_same_run_folder(tmp_path):
    folder = stopped(config(tmp_path), 2)
    held = RunFolder.reopen(folder, config(tmp_path), {}, lock=lock_folder(folder))
    with pytest.raises(ConfigError, match="Another process is using"):
        resume(folder)
    held.finish("stopped")
    with pytest.raises(ConfigError, match="shorter than at the time of round-000001"):
        resume(folder)  # because the first process has reset the files to round 0


def test_a_checkpoint_with_other_strategy_state_is_refused(tmp_path, monkeypatch):
    folder = stopped(config(tmp_path, **{"strategy.name": "fedavg"}), 2)
    monkeypatch.setattr(FedAvg, "STATE", ("momentum",))
    with pytest.raises(ConfigError, match=r"cannot be resumed: FedAvg keeps .*'momentum'\]"):
        resume(folder)


def test_resumable_runs_are_sorted_by_completed_rounds(tmp_path):
    session(config(tmp_path, **{"run-name": "whole", "num-server-rounds": 0})).run()
    stopped(config(tmp_path, **{"run-name": "a-far"}), 3)
    stopped(config(tmp_path, **{"run-name": "b-near"}), 2)
    stopped(config(tmp_path, **{"run-name": "c-lost", "checkpoint.every": 0}), 3)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "run.json").write_text("{")
    actual = [run_config.resume for run_config in resumable_configs(tmp_path)]
    assert actual == [str(tmp_path / "b-near"), str(tmp_path / "a-far")]


def test_the_server_app_resumes_although_flower_sends_all_keys_with_defaults(tmp_path, monkeypatch):
    from flwr.app import Context, RecordDict

    from fairflower import server_app
    from fairflower.client_app import app as client_app
    from fairflower.config.run import default_values
    from fairflower.engines.inline import InlineGrid

    whole = session(config(tmp_path, **{"num-server-rounds": 4})).run()
    folder = stopped(config(tmp_path), 2)
    grid = InlineGrid(client_app, 4)
    sent = default_values() | {"resume": str(folder), "num-server-rounds": 4}
    server_app.app(grid, Context(1, 1, {}, RecordDict(), sent))
    assert outcome(folder) == outcome(whole)
    with pytest.raises(ConfigError, match=r"train\.lr = 0\.3 was given"):
        server_app.app(grid, Context(1, 1, {}, RecordDict(), sent | {"train.lr": 0.3}))
