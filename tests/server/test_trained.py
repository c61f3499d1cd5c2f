"""Models that are tested without training: the same numbers as in their runs, and no training."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import call
from flwr.app import Context, RecordDict
from run_folders import printed_tables
from runs import config, history, run
from safetensors.numpy import load_file, save_file

import fairflower as ff
from fairflower import server_app
from fairflower.client_app import app
from fairflower.config import RunConfig
from fairflower.config.run import default_values
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, RunFolderError
from fairflower.paths import home
from fairflower.server import checkpoint
from fairflower.server.contents import BEST, MODEL, read_facts

SETTINGS: dict[str, Any] = {
    "num-server-rounds": 3,
    "evaluate.by": "both",
    "data.validation-fraction": 0.3,
    "checkpoint.best": "average",
}
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return run(config(tmp_path_factory.mktemp("trained"), **SETTINGS))


@pytest.fixture
def sent(monkeypatch) -> Counter[str]:
    """Count the messages to clients by type."""
    count: Counter[str] = Counter()
    push = InlineGrid.push_messages

    def counted(grid: InlineGrid, messages: Any) -> Any:
        messages = list(messages)
        count.update(message.metadata.message_type for message in messages)
        return push(grid, messages)

    monkeypatch.setattr(InlineGrid, "push_messages", counted)
    return count


def scores_in(path: Path, server_round: int) -> set[tuple[str, ...]]:
    """Return what was tested in a round: level, name, metric and the text of the value."""
    keys = ("level", "name", "metric", "value")
    ours = [r for r in history(path) if r["round"] == str(server_round) and r["level"] != "run"]
    training = ("train_loss", "num-examples", "received_loss", "state-round")
    return {tuple(r[k] for k in keys) for r in ours if r["metric"] not in training}


def evaluate(model: Path, tmp_path: Path, **settings: Any) -> Path:
    return ff.evaluate(model, settings, output_dir=tmp_path, progress=False).path


@pytest.mark.parametrize("name", [MODEL, BEST])
def test_a_model_has_the_scores_of_its_run_to_the_bit(name, trained, tmp_path, sent):
    path = evaluate(trained if name == MODEL else trained / name, tmp_path)
    assert set(sent) == {"query", "evaluate"}
    facts = read_facts(trained)
    last = {MODEL: facts["rounds"], BEST: facts["best"]["round"]}[name]
    tested = scores_in(path, last)
    assert tested == scores_in(trained, last)
    assert {level for level, *_ in tested} == {
        *("domain", "client", "validation", "client-validation")
    }
    assert read_facts(path)["label"] == f"fedheal ({'last' if name == MODEL else 'best'} model)"
    assert (read_facts(path)["status"], read_facts(path)["rounds"]) == ("completed", last)


@pytest.mark.parametrize(
    "settings",
    [
        {"data.name": "heart-disease", "data.groups": "sex", "data.examples-per-client": 0},
        {"data.name": "heart-disease:target=severity", "data.examples-per-client": 0},
        {"client.name": "ditto", "strategy.name": "uniform", "evaluate.by": "both"},
        {"client.name": "fedbn", "model.name": "cnn:norm=batch", "evaluate.by": "both"},
        {"data.held-out": "printed", "evaluate.by": "both", "strategy.name": "qffl"},
    ],
    ids=lambda settings: settings.get("client.name", settings.get("data.name", "held-out")),
)
def test_other_tasks_and_clients_have_the_scores_of_their_runs(settings, tmp_path):
    whole = {"num-server-rounds": 1, "data.test-examples": 0, "data.validation-fraction": 0.0}
    nodes = 3 if "data.held-out" in settings else 4
    path = run(config(tmp_path / "runs", **whole | settings), nodes=nodes)
    tested = scores_in(evaluate(path, tmp_path), 1)
    personal = {row for row in scores_in(path, 1) if row[2].startswith("personal_")}
    assert bool(personal) == (settings.get("client.name") in ("ditto", "fedbn"))
    assert tested == scores_in(path, 1) - personal


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state-dict", "torchscript", "onnx"])
def test_exported_models_have_the_same_scores(kind, trained, tmp_path):
    model = (
        tmp_path
        / "away"
        / {"state-dict": "a.safetensors", "torchscript": "a.pt"}.get(kind, "a.onnx")
    )
    call("export", str(trained), "--best", "-f", kind, "--out", str(model))
    path = evaluate(
        model,
        tmp_path,
        **{
            k: v
            for k, v in RunConfig.from_flat(
                checkpoint.contents.read_config(trained) | {"evaluate.by": "server"}
            )
            .concise()
            .items()
            if k.startswith("data.")
        },
    )
    assert read_facts(path)["label"] == f"away/{model.name}"
    best = read_facts(trained)["best"]["round"]
    expected = {row[:3]: float(row[3]) for row in scores_in(trained, best) if row[0] == "domain"}
    found = {row[:3]: float(row[3]) for row in scores_in(path, 1) if row[0] == "domain"}
    assert found == pytest.approx(expected, abs=0 if kind == "state-dict" else 1e-6)


def test_the_command_shows_a_row_beside_the_run(trained, tmp_path):
    output = call("evaluate", str(trained), "--output-dir", str(tmp_path))
    assert "tested without training" in output
    assert "Uniform weights are not" not in output
    assert "to compare with" not in output
    (path,) = tmp_path.iterdir()
    tables = printed_tables(trained, path)
    assert re.search(r"fedheal \d", tables)
    assert re.search(r"fedheal \(last model\) \d", tables)
    assert "The runs differ in evaluate.model" in tables


def test_seeds_of_a_method_are_one_row(tmp_path):
    paths = [
        evaluate(run(config(tmp_path / "runs", **{"seed": s, "num-server-rounds": 1})), tmp_path)
        for s in (0, 1)
    ]
    assert "2 seeds" in printed_tables(*paths) or "seeds 0 and 1" in printed_tables(*paths)


def test_examples_are_normalized_as_in_training(trained, tmp_path):
    """A state dict's metadata say so; the data set declares other constants."""
    mean, std = [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]
    model = tmp_path / "own.safetensors"
    facts = {"mean": json.dumps(mean), "std": json.dumps(std), "task": '"classification"'}
    save_file(load_file(trained / MODEL), model, facts)
    chosen = {"data.test-examples": 40, "evaluate.by": "server"}
    path = evaluate(model, tmp_path / "out", **chosen)
    network = ff.read(trained)[0].network()
    data = prepare(RunConfig.from_flat(chosen).data)
    assert data.mean != tuple(mean)
    for domain in data.domains:
        x, y = data.test(domain)
        scaled = (torch.tensor(x) / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
            :, None, None
        ]
        right = (network.model(scaled).argmax(1).numpy() == y).mean()
        assert ff.read(path)[0].accuracy[domain] == pytest.approx(right)
    with pytest.raises(ConfigError, match=r"normalized differently from uci-digits, so clients"):
        evaluate(model, tmp_path / "out", **chosen | {"evaluate.by": "clients"})


@pytest.fixture
def wrong(trained, tmp_path) -> Iterator[Path]:
    """A copy of the run folder, and wrong models in it."""
    path = shutil.copytree(trained, tmp_path / "copy")
    alone = shutil.copytree(trained, path / "alone") / "config.toml"
    text, found = re.subn(
        r'name = "(fedheal|uniform|fedavg)".*', 'name = "alone"', alone.read_text()
    )
    assert found
    alone.write_text(text)
    arrays = load_file(path / MODEL)
    save_file({**arrays, "more": arrays["head.bias"]}, path / "more.safetensors")
    save_file({**arrays, "head.bias": arrays["head.bias"][:7]}, path / "seven.safetensors")
    (path / "damaged.safetensors").write_bytes((path / MODEL).read_bytes()[:50])
    torch.save(arrays, path / "pickled.pt")
    (path / "no.onnx").write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("more.safetensors", {}, r"expected \d+ arrays.* Unknown: more"),
        (
            "seven.safetensors",
            {},
            r"'head\.bias': expected float32 \(10,\), but got float32 \(7,\)",
        ),
        ("damaged.safetensors", {}, r"this file is damaged \(Error while deserializing header"),
        ("pickled.pt", {"evaluate.by": "server"}, "never read, because it would be unpickled"),
        ("no.onnx", {"evaluate.by": "server"}, r"\.onnx cannot be read"),
        ("no.onnx", {}, "it is a program, or .*, so clients cannot test it"),
        (MODEL, {"model.name": "resnet10"}, r"does not contain a resnet10 for uci-digits"),
        (MODEL, {"data.name": "heart-disease"}, r"data are features\. Choose data that fit eva"),
        (
            MODEL,
            {"data.name": "lung", "model.name": "mlp"},
            "'classification' in training, but lung has 'survival",
        ),
        ("none.safetensors", {}, r"there is no file .*none\.safetensors"),
        ("run.json", {}, r"expected a run folder, or a file \.safetensors"),
        ("checkpoints", {}, r"there is no file"),
        ("alone", {}, "no common model to test, because each client kept its own"),
    ],
)
def test_models_that_do_not_fit_are_refused(name, settings, message, wrong, tmp_path):
    with pytest.raises(ConfigError, match=message):
        evaluate(wrong / name, tmp_path / "out", **settings)
    assert not list((tmp_path / "out").glob("*/run.json"))


def test_a_model_that_its_run_has_not_written_is_refused(wrong, tmp_path):
    shutil.copy(wrong / BEST, wrong / MODEL)
    with pytest.raises(RunFolderError, match="has been changed since the run ended"):
        evaluate(wrong, tmp_path / "out")


def test_a_test_of_a_model_has_no_model_and_is_not_the_run(trained, tmp_path):
    path = evaluate(trained, tmp_path)
    with pytest.raises(RunFolderError, match="no model of its own: it has tested"):
        _ = ff.read(path)[0].model
    flat = checkpoint.contents.read_config(trained)
    from fairflower.plans.plan import run_key

    assert run_key(flat) != run_key(checkpoint.contents.read_config(path))


def test_a_test_that_was_killed_is_resumed(trained, tmp_path, monkeypatch):
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fairflower.server.rounds.RoundLoop._evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(trained, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = ff.run(resume=path, progress=False)
    assert whole.label == "fedheal (last model)"
    assert scores_in(path, 3) == scores_in(trained, 3)


@pytest.mark.parametrize("start", [ff.run, ff.compare])
def test_other_commands_train(start):
    with pytest.raises(ConfigError, match=r"evaluate\.model = 'x': use fairflower evaluate"):
        start({"evaluate.model": "x"})


def test_other_draws_of_the_data_are_warned_of(trained, tmp_path, caplog):
    evaluate(trained, tmp_path, **{"data.seed": 1})
    assert "was trained with data.seed = 0, so it may have seen" in caplog.text


# --- sites ---------------------------------------------------------------------------------------


def site(folder: Path, domain: str, classes: list[str]) -> dict[str, Any]:
    """Return the node config of a site whose images are in folders of classes."""
    from PIL import Image

    for name in classes:
        for k in range(12):
            path = folder / domain / name / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(RNG.integers(0, 256, (8, 8), np.uint8)).save(path)
    return {"domain": domain, "data-dir": str(folder / domain)}


def at_sites(sites: list[dict[str, Any]]) -> InlineGrid:
    grid = InlineGrid(app, len(sites))
    for context, node in zip(grid.contexts.values(), sites, strict=True):
        context.node_config = node
    return grid


def by_flwr(grid: InlineGrid, **settings: Any) -> None:
    """Start the ServerApp as Flower does, which sends all keys."""
    server_app.app(grid, Context(1, 1, {}, RecordDict(), {**default_values(), **settings}))


def test_sites_that_never_trained_are_asked_for_scores_only(tmp_path, sent):
    settings = {"evaluate.by": "clients", "data.name": "images", "data.image-size": 8}
    settings |= {"num-server-rounds": 1, "train.local-epochs": 1}
    classes = ["cat", "cow", "dog"]
    trained_at = [site(tmp_path, name, classes) for name in ("north", "south")]
    by_flwr(at_sites(trained_at), **settings, **{"output-dir": str(tmp_path / "runs")})
    (path,) = (tmp_path / "runs").iterdir()
    sent.clear()
    asked = [trained_at[0], site(tmp_path, "coast", classes[1:])]  # fewer classes than the model
    by_flwr(
        at_sites(asked),
        **{"evaluate.model": str(path), "output-dir": str(tmp_path / "tests")},
    )
    assert set(sent) == {"query", "evaluate"}
    (tested,) = (tmp_path / "tests").iterdir()
    facts = read_facts(tested)
    assert facts["domains"] == ["coast", "north"]
    assert facts["classes"] == classes
    assert facts["clients"][0]["class_counts"][0] == 0
    north = {row for row in scores_in(path, 1) if row[1] == "north"}
    assert north == {row for row in scores_in(tested, 1) if row[1] == "north"}
    assert facts["label"] == "fedheal (last model)"
    alone = [site(tmp_path, "other", ["cat", "horse"]), trained_at[0]]
    with pytest.raises(ConfigError, match=r"classes \['cat', 'cow', 'dog'\] in training, but "):
        by_flwr(at_sites(alone), **{"evaluate.model": str(path), "output-dir": str(tmp_path)})


def test_sites_whose_classes_are_numbers_may_have_fewer(tmp_path):
    def numbered(domain: str, classes: int) -> dict[str, Any]:
        (tmp_path / domain).mkdir()
        x, y = RNG.integers(0, 256, (12, 8, 8), np.uint8), np.arange(12) % classes
        np.savez(tmp_path / domain / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        return {"domain": domain, "data-dir": str(tmp_path / domain), "smallest-group": 1}

    settings = {"evaluate.by": "clients", "data.name": "npz", "num-server-rounds": 1}
    by_flwr(at_sites([numbered("a", 4), numbered("b", 4)]), **settings, **{"run-name": "run"})
    path = home() / "runs" / "run"
    by_flwr(at_sites([numbered("c", 2)]), **{"evaluate.model": str(path), "run-name": "test"})
    facts = read_facts(home() / "runs" / "test")
    assert (facts["num_classes"], facts["clients"][0]["class_counts"]) == (4, [6, 6, 0, 0])
