"""Whole runs under secure aggregation: refusals, halted rounds, resuming, engines and sites."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import tiny_data_sets
from apps import app_with_handlers
from command import call
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from hospital_tables import SCHEMA, write_three
from resuming import config, outcome, resume, session
from rich.console import Console
from safetensors.numpy import load_file
from secure_federation import stage_of

from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.deploy.credentials import make_key_pair
from fairflower.deploy.local import LocalDeployment
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, RoundFailed, RunInterrupted
from fairflower.registry import REFERENCES
from fairflower.server.contents import read_facts
from fairflower.server.session import Session
from fairflower.strategies import STRATEGIES, FairStrategy

SECURE: dict[str, Any] = {"secure-aggregation": True, "fraction-train": 1.0}
REFUSED = [
    name
    for name, strategy in STRATEGIES.items()
    if not strategy().sums_suffice and name not in REFERENCES
]


def app(train: Any) -> ClientApp:
    """Return fairflower's app with ``train`` as the handler of both kinds of train messages."""
    secure_app = app_with_handlers(train=train)
    secure_app.train("measure")(train)
    return secure_app


# --- before a run --------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_strategy_that_needs_single_updates_is_refused_with_an_alternative(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{re.escape(name)}' .*the most similar") as refused:
        RunConfig.from_flat({"secure-aggregation": True, "strategy.name": name})
    nearest = str(refused.value).partition("Choose '")[2].partition("'")[0]
    RunConfig.from_flat({"secure-aggregation": True, "strategy.name": nearest})


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"client.name": "scaffold"}, "'scaffold' exchanges 'control'"),
        ({"client.name": "fedproto"}, "'fedproto' exchanges 'prototypes'"),
        ({"client.name": "fedbn:keep=server"}, "'fedbn' exchanges 'personal' .*client.keep"),
        ({"client.name": "harmofl"}, "'harmofl': its mean amplitudes .*Choose a client"),
        ({"bound.clip-update-norm": 1.0}, "bound.clip-update-norm = 1.0 uses individual"),
        ({"bound.clip-update-median": 2.0}, "bound.clip-update-median = 2.0 uses individual"),
        ({"observe.window": 3}, "observe.window = 3 uses individual updates"),
        ({"strategy.name": "fairfed", "strategy.metric": "trained_loss"}, "after training"),
        ({"strategy.name": "tiny_data_sets:Own"}, "does not set sums_suffice"),
        ({"strategy.name": "tiny_data_sets:Arrays"}, "needs the array 'gradient' from each client"),
    ],
)
def test_settings_that_need_single_updates_are_refused(
    settings: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = type("Own", (FairStrategy,), {})
    needy = type("Arrays", (FairStrategy,), {"sums_suffice": True, "needs": ("gradient",)})
    for strategy in (own, needy):
        monkeypatch.setattr(tiny_data_sets, strategy.__name__, strategy, raising=False)
    with pytest.raises(ConfigError, match=rf"secure-aggregation = true: .*{error}"):
        RunConfig.from_flat({"secure-aggregation": True, "strategy.name": "uniform"} | settings)


def test_two_clients_per_round_are_refused(tmp_path: Path) -> None:
    config = runs.config(tmp_path, **{"secure-aggregation": True, "fraction-train": 0.5}, **UNIFORM)
    with pytest.raises(ConfigError, match=r"per round is 2, .* needs at least 3"):
        runs.run(config)


UNIFORM = {"strategy.name": "uniform"}

# --- whole runs ----------------------------------------------------------------------------


def test_a_halted_round_is_recorded_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(message: Message, context: Context) -> Message:
        late = stage_of(message) == "collect_masked_vectors"
        if late and message.content["config"]["server-round"] == 2 and context.node_id % 2:
            raise RuntimeError("its disk is full")
        return client_app(message, context)

    run_config = config(tmp_path, **SECURE, **{"strategy.name": "fedism"})
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        folder = session(run_config, app(train)).run()
    facts = json.loads((folder / "run.json").read_text())
    assert facts["status"] == "completed"
    assert list(facts["halted_rounds"]) == ["2"]
    assert facts["secure_aggregation"]["threshold"] == 3
    assert "secure aggregation stopped, so the model is unchanged: 2 of 2 clients" in caplog.text
    lines = [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]
    assert [line["client_ids"] for line in lines] == [[0, 1, 2, 3], [], [0, 1, 2, 3]]
    assert set(lines[1]["dropped"].values()) == {"its disk is full"}
    output = " ".join(call("report", str(folder), "--out", str(tmp_path / "page")).split())
    assert "round 2 did not change the model: 2 of 2 clients have a weight above 0" in output


def test_a_run_whose_rounds_all_halt_fails_and_can_be_resumed(tmp_path: Path) -> None:
    failing = True

    def train(message: Message, context: Context) -> Message:
        if failing and stage_of(message) == "collect_masked_vectors" and context.node_id % 2:
            raise RuntimeError("its disk is full")
        return client_app(message, context)

    new_session = session(config(tmp_path, **SECURE, **UNIFORM), app(train))
    with pytest.raises(
        RoundFailed, match=r"every round \(1 to 3\).*: 2 of 2 clients have a weight"
    ):
        new_session.run()
    assert new_session.folder is not None
    path = new_session.folder.path
    facts = json.loads((path / "run.json").read_text())
    assert (facts["status"], list(facts["halted_rounds"])) == ("failed", ["1", "2", "3"])
    assert "its disk is full" in (path / "log.txt").read_text()
    with pytest.raises(RoundFailed, match=r"every round \(1 to 3\)"):
        resume(path, app=app(train))
    failing = False
    resume(path, app=app(train))  # repeats the last round
    facts = json.loads((path / "run.json").read_text())
    assert (facts["status"], list(facts["halted_rounds"])) == ("completed", ["1", "2"])


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    settings = {**SECURE, "strategy.name": "fedga"}
    whole = session(config(tmp_path / "whole", **settings)).run()
    count = 0

    def train(message: Message, context: Context) -> Message:
        nonlocal count
        if stage_of(message) == "unmask":
            count += 1
            if count == 6:  # the second client of the second round
                stopping.stop.set()
        return client_app(message, context)

    stopping = session(config(tmp_path / "stopped", **settings), app(train))
    with pytest.raises(RunInterrupted):
        stopping.run()
    assert stopping.folder is not None
    facts = read_facts(stopping.folder.path)
    assert (facts["status"], facts["rounds"]) == ("stopped", 1)
    resumed = resume(stopping.folder.path)
    assert outcome(resumed) == outcome(whole)


def test_masked_and_plain_runs_with_personal_layers_give_the_same_model(tmp_path: Path) -> None:
    settings = {"client.name": "fedbn", "model.name": "cnn:norm=batch", **UNIFORM}
    settings |= {"server.optimizer": "momentum", "server.lr": 0.5}
    models = []
    for secure in (True, False):
        run_config = config(
            tmp_path / str(secure), **{**SECURE, "secure-aggregation": secure}, **settings
        )
        models.append(load_file(session(run_config).run() / "model.safetensors"))
    for name, array in models[1].items():
        np.testing.assert_allclose(models[0][name], array, atol=1e-5)


def test_clients_send_only_numbers_keys_shares_and_masked_vectors(tmp_path: Path) -> None:
    received: dict[str, set[str]] = {}

    def record(message: Message, context: Context) -> Message:
        kind = stage_of(message) or message.metadata.message_type  # Flower's mod removes it
        reply = client_app(message, context)
        names = received.setdefault(kind, set())
        names |= {name for name, record in reply.content.array_records.items() if record}
        for values in reply.content.config_records.values():
            names |= {key for key, value in values.items() if kind_of(value) is bytes}
        return reply

    recording_app = ClientApp()
    for register in (
        recording_app.train(),
        recording_app.train("measure"),
        recording_app.evaluate(),
        recording_app.query(),
    ):
        register(record)
    settings = {**SECURE, "strategy.name": "qffl", "evaluate.by": "clients"}
    session(config(tmp_path, **settings), recording_app).run()
    assert received == {
        "query": set(),
        "measure": set(),
        "setup": {"pk1", "pk2"},
        "share_keys": {"ctxts"},
        "collect_masked_vectors": {"masked_params"},
        "unmask": {"shares"},
        "evaluate": set(),
    }


def kind_of(value: object) -> type:
    """Return the type of a value, or of the items of a list."""
    return type(value[0]) if isinstance(value, list) and value else type(value)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_deployment_with_masks_equals_simulated_runs(tmp_path: Path) -> None:
    domains = ("plain", "inverted", "rotated")
    folders = tiny_data_sets.digits_folders(tmp_path, domains, most=20)
    nodes: list[dict[str, Any]] = [
        {"domain": domain, "data-dir": str(folder), "secure-aggregation": True}
        for domain, folder in folders.items()
    ]
    # The sites also sign for each other.
    lines = [f"{d} {make_key_pair(tmp_path / f'{d}.key').read_text()}" for d in domains]
    (tmp_path / "sites").write_text("\n".join(lines))
    for node in nodes:
        node["consortium"] = str(tmp_path / "sites")
        node["signing-key"] = str(tmp_path / f"{node['domain']}.key")
    settings = {
        **SECURE,
        "strategy.name": "qffl",
        "num-server-rounds": 1,
        "data.name": "npz",
        "evaluate.by": "clients",
        "sites": len(nodes),
        "train.local-epochs": 1,
    }
    # In the same folders, tables whose sums are masked.
    three = write_three(tmp_path / "three")
    for folder, table in zip(folders.values(), sorted(three.iterdir()), strict=True):
        shutil.copy(table, folder)
        (folder / "schema.toml").write_text(SCHEMA)
    tables = {"data.name": "table", "data.target": "disease", "model.name": "mlp"}
    messages: list[str] = []
    with LocalDeployment(tmp_path / "trial", nodes, messages.append) as trial:
        deployed = trial.run(RunConfig.from_flat(settings))
        of_tables = trial.run(RunConfig.from_flat(settings | tables))
    facts = json.loads((deployed / "run.json").read_text())
    assert facts["status"] == "completed"
    assert facts["secure_aggregation"]["clients"] == 3
    assert "halted_rounds" not in facts
    (line,) = map(json.loads, (deployed / "diagnostics.jsonl").read_text().splitlines())
    assert line["client_ids"] == [*range(len(nodes))]

    # The same bits as in this process, and the model of a plain run.
    def in_this_process(masked: bool, settings: dict[str, Any]) -> Path:
        grid = InlineGrid(client_app, len(nodes))
        for context, node in zip(grid.contexts.values(), nodes, strict=True):
            own = {key: node[key] for key in ("domain", "data-dir")}
            context.node_config = {**own, "secure-aggregation": masked}
        flat = {**settings, "secure-aggregation": masked, "output-dir": str(tmp_path / "here")}
        return Session(grid, RunConfig.from_flat(flat), Console(quiet=True)).run()

    model = load_file(deployed / "model.safetensors")
    for masked in (True, False):
        for name, array in load_file(
            in_this_process(masked, settings) / "model.safetensors"
        ).items():
            assert not masked or array.tobytes() == model[name].tobytes()
            np.testing.assert_allclose(array, model[name], atol=1e-5)
    again = in_this_process(True, settings | tables)
    assert (again / "model.safetensors").read_bytes() == (
        of_tables / "model.safetensors"
    ).read_bytes()
    encodings = [read_facts(f)["sites"]["federation"]["encoding"] for f in (of_tables, again)]
    assert encodings[0] == encodings[1]
