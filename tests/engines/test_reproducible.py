"""`fairflower run` on Ray: the same results as on other engines, a clean stop, crashed workers."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from command import call
from processes import (
    ROOT,
    SCRIPTS,
    TIMEOUT,
    environment,
    run,
    session_processes,
    started,
    still_running,
)
from resuming import outcome
from safetensors.numpy import load_file

from fairflower.config.text import toml_value
from fairflower.report import read_run
from fairflower.server.contents import read_facts

pytestmark = pytest.mark.slow

SETTINGS = {
    "num-server-rounds": 2,
    "fraction-train": 0.75,
    "data.clients-per-domain": 2,
    "data.examples-per-client": 40,
    "data.test-examples": 40,
    "train.local-epochs": 1,
}


def settings(folder: Path, **more: object) -> dict[str, object]:
    changes = {k.replace("__", ".").replace("_", "-"): v for k, v in more.items()}
    return SETTINGS | {"output-dir": str(folder)} | changes


def command(folder: Path, **more: object) -> list[str | Path]:
    pairs = settings(folder, **more).items()
    return [SCRIPTS / "fairflower", "run", *(f"--set={k}={toml_value(v)}" for k, v in pairs)]


def inline(command: Sequence[str | Path]) -> None:
    """The same run in this process."""
    call(*map(str, command[1:]), "--engine=inline")


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


# Flower has announced the removal of run_simulation.
WITHOUT_RUN_SIMULATION = (
    "import sys, flwr.simulation; del flwr.simulation.run_simulation\n"
    "from fairflower.cli import main; main()"
)


ALL_EXAMPLES = {"data__examples_per_client": 0, "data__test_examples": 0}

#: Runs of eight clients by kind of data. SCAFFOLD has client states.
KINDS = {
    "images": {"client__name": "scaffold", "strategy__name": "uniform"},
    "features": {
        "data__name": "randhie",
        "data__examples_per_client": 100,
        "client__name": "scaffold",
        "strategy__name": "fedequilibria",  # clients measure what it needs
    },
    "tokens": {
        "data__name": "tiny_data_sets:Texts",  # of two domains, the others of four
        "data__clients_per_domain": 4,
        **ALL_EXAMPLES,
        "client__name": "moon",
        "strategy__name": "fedheal",
    },
}

#: Clients with local arrays, each with another strategy; clients also test personal models.
KINDS |= {
    client: {
        "data__examples_per_client": 20,
        "data__test_examples": 20,
        "model__name": "cnn:norm=batch",
        "evaluate__by": "both",
        "client__name": client,
        "strategy__name": strategy,
    }
    for client, strategy in {
        "fedbn": "fairrfl",
        "silobn": "fedism+",
        "fedper": "fedpw",
        "fedrep": "daa",
        "lg-fedavg": "dq-ffl",
    }.items()
}
KINDS["kept-by-server"] = KINDS["fedbn"] | {"client__keep": "server"}

#: The references: models that clients keep, and one on the examples of all clients.
KINDS |= {name: {"evaluate__by": "both", "strategy__name": name} for name in ("alone", "pooled")}

#: FairFed with a metric of group fairness: clients send counts of training and test examples.
KINDS["groups"] = {
    "data__name": "heart-disease",
    "data__groups": "sex",
    **ALL_EXAMPLES,
    "evaluate__by": "both",
    "strategy__name": "fairfed",
    "strategy__metric": "demographic_parity_difference",
    "strategy__beta": 1.0,
}

#: Masks: clients augment images, and what the server draws is a mask.
KINDS["masks"] = {
    "data__name": "strokes",
    "model__name": "unet:width=4",
    "train__lr": 0.2,
    "client__name": "fedprox",
    "data__augment": True,
}

#: Secure aggregation, and differential privacy with noise of the clients and of the server.
KINDS["secure_aggregation"] = {"secure_aggregation": True, "strategy__name": "qffl"}
KINDS["privacy"] = {
    "strategy__name": "term",
    "fraction_train": 1.0,
    "bound__max_client_weight": 0.4,
    "privacy__noise_multiplier": 2.0,
    "privacy__number_noise_multiplier": 0.2,
    "privacy__clip": 0.3,
    "privacy__noise_seed": 5,
}

#: Kinds that run with --nightly only, and those that also run on Flower's engine, which carries
#: messages and stores states in other ways; all run on it with --nightly.
AT_NIGHT = ("features", "silobn", "fedper", "fedrep", "lg-fedavg", "pooled")
ON_FLOWER = ("images", "kept-by-server", "secure_aggregation")

# One process, and in it each engine once for all runs, because starting them takes long.
IN_TURN = """
import json, sys
from rich.console import Console
from fairflower.config import RunConfig
from fairflower.engines.launch import launch
from fairflower.server.session import Session

for all_given in json.loads(sys.argv[1]):
    configs = [RunConfig.from_flat(given) for given in all_given]

    def server(grid):
        for config in configs:
            Session(grid, config, Console(width=200)).run()

    launch(server, configs[0], 8)
"""


def language_model(folder: Path) -> dict[str, object]:
    """Write a tiny GPT-2; return the settings of a run that trains it with LoRA."""
    transformers = pytest.importorskip("transformers", reason="needs fairflower[hf]")
    pytest.importorskip("peft", reason="needs fairflower[hf]")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special))
    network.save_pretrained(folder / "gpt2")
    return {
        "data__name": "languages",
        "data__domains": "german,greek,hebrew,japanese",
        "train__lr": 0.3,
        "train__batch_size": 4,
        "model__name": f"hf:{folder / 'gpt2'}",
        "model__adapter": "lora:r=4",
        "strategy__name": "afl",
    }


def test_results_are_identical_on_all_engines(tmp_path: Path, pytestconfig: pytest.Config):
    nightly = pytestconfig.getoption("--nightly")
    every = KINDS | {"language": language_model(tmp_path)}
    on_ray = [kind for kind in every if nightly or kind not in AT_NIGHT]
    for kind in on_ray:
        inline(command(tmp_path, run_name=f"{kind}-inline", **every[kind]))
    on_engines = {"ray": on_ray, "flower": on_ray if nightly else ON_FLOWER}
    given = [
        [
            # Two workers; the test of Ctrl-C has one.
            settings(tmp_path, run_name=f"{kind}-{engine}", engine=engine, workers=2, **every[kind])
            for kind in kinds
        ]
        for engine, kinds in on_engines.items()
    ]
    script = [sys.executable, "-c", IN_TURN, json.dumps(given)]
    run(script, env=environment(tmp_path), cwd=ROOT / "tests")
    for engine, kinds in on_engines.items():
        for kind in kinds:
            on_engine, same = (outcome(tmp_path / f"{kind}-{by}") for by in (engine, "inline"))
            assert on_engine == same, f"{kind} on {engine}"
            runs = [read_run(tmp_path / f"{kind}-{by}") for by in (engine, "inline")]
            np.testing.assert_array_equal(*(read.personal.values for read in runs))
            np.testing.assert_array_equal(*(read.own_models.values for read in runs))
            actual, expected = (read.group_metrics for read in runs)
            assert actual.keys() == expected.keys(), f"{kind} on {engine}"
            for metric, history in expected.items():
                np.testing.assert_array_equal(actual[metric].values, history.values)
            assert bool(expected) == (kind == "groups")
            on_engine, same = (read_facts(tmp_path / f"{kind}-{by}") for by in (engine, "inline"))
            for field in ("privacy", "secure_aggregation"):
                assert on_engine.get(field) == same.get(field), f"{kind} on {engine}"
                assert (field in on_engine) == (field == kind), f"{kind} on {engine}"
    assert all("lora_" in name for name in load_file(tmp_path / "language-ray/model.safetensors"))


@pytest.mark.nightly
def test_flowers_engine_is_refused_without_run_simulation(tmp_path: Path):
    """Flower has announced the removal of run_simulation."""
    call = command(tmp_path, engine="flower")
    without = [sys.executable, "-c", WITHOUT_RUN_SIMULATION, *call[1:]]
    refused = subprocess.run(without, env=environment(tmp_path), capture_output=True, text=True)
    assert refused.returncode == 2
    assert "Choose engine = 'ray'" in " ".join(refused.stderr.split() + refused.stdout.split())


def test_ctrl_c_ends_all_processes_and_the_run_can_be_resumed(tmp_path: Path):
    folder = tmp_path / "long"
    endless = command(tmp_path, run_name="long", num_server_rounds=10_000, workers=1)
    log = tmp_path / "output.txt"
    with (
        log.open("w") as output,
        started(endless, env=environment(tmp_path), stdout=output, stderr=subprocess.STDOUT) as cli,
    ):
        deadline = time.monotonic() + TIMEOUT
        while last_round(folder) < 1:
            assert cli.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        members = session_processes(cli)
        assert len(members) > 2, "Ray's processes were expected among them"
        os.killpg(cli.pid, signal.SIGINT)  # a terminal sends it to the whole group
        assert cli.wait(60) == 130, log.read_text()
        assert not still_running(members, 30)
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
    stopped = read_run(folder)
    assert stopped.status == "stopped"
    assert stopped.last_round >= 1
    assert (folder / "model.safetensors").stat().st_size > 0
    assert "Traceback" not in log.read_text()

    # Resumed in this process, the run equals an uninterrupted run.
    rounds = stopped.last_round + 2
    call("run", f"--resume={folder}", f"--rounds={rounds}", "--engine=inline")
    inline(command(tmp_path, run_name="whole", num_server_rounds=rounds))
    assert model(folder) == model(tmp_path / "whole")


def last_round(folder: Path) -> int:
    """Return the last round in the history; -1 if there is none."""
    try:
        with (folder / "history.csv").open() as file:
            return max((int(row["round"]) for row in csv.DictReader(file)), default=-1)
    except FileNotFoundError:
        return -1


# Client 1 ends its worker's process in round 2, as the kernel does when memory runs out.
FATAL = """
import os, sys
from flwr.serverapp import ServerApp
from rich.console import Console
from fairflower.client_app import query, trainer_of
from fairflower.clients import make_client_app
from fairflower.config import RunConfig
from fairflower.engines.launch import simulate
from fairflower.server.session import Session
from fairflower.errors import RoundFailed

def trainer(context, config):
    if (context.node_config["partition-id"], config["server-round"]) == (1, 2):
        os._exit(1)
    return trainer_of(context, config)

def session(**settings):
    flat = {name.replace("_", "-"): value for name, value in settings.items()}
    config = RunConfig.from_flat(flat | {"data.clients-per-domain": 1, "train.local-epochs": 1,
                                         "num-server-rounds": 3, "output-dir": sys.argv[1]})
    clients = make_client_app(trainer)
    clients.query()(query)
    server = ServerApp()
    server.main()(lambda grid, context: Session(grid, config, Console(width=200)).run())
    simulate(server, clients, 4, RunConfig(engine="ray", workers=2))

session(run_name="lenient", min_clients=1)
try:
    session(run_name="strict", min_clients=4)
except RoundFailed as error:
    print("RoundFailed:", error)
"""


@pytest.mark.nightly
def test_a_client_whose_workers_crash_is_dropped_and_named(tmp_path: Path):
    script = tmp_path / "fatal.py"
    script.write_text(FATAL)
    output = run([sys.executable, script, str(tmp_path)], env=environment(tmp_path))

    assert read_run(tmp_path / "lenient").status == "completed"
    lines = (tmp_path / "lenient" / "diagnostics.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert first["client_ids"] == [0, 1, 2, 3]
    assert list(second["dropped"]) == ["1"]  # tried twice; no other client is dropped
    assert second["client_ids"] == [0, 2, 3]
    assert third["client_ids"] == [0, 1, 2, 3]

    assert "RoundFailed: Round 2: " in output
    strict = json.loads((tmp_path / "strict" / "run.json").read_text())
    assert strict["status"] == "failed"
    assert "fewer than the 4 that min-clients requires" in strict["error"]
    named = re.findall(r"^  clients? ([\d, ]+):", strict["error"], re.MULTILINE)
    assert "1" in ", ".join(named).split(", "), strict["error"]
