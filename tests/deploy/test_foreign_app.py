"""The wheel in another project's environment: our strategies in its app, its parts in our runs."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import built_wheel, environment_with, uv
from flwr_run import superlink
from parametrize import at_night
from processes import ROOT, environment, run

pytestmark = pytest.mark.slow

CLIENTS, COORDINATES, ROUNDS = 4, 50, 4
SETTINGS = [{}, {"tau": 0.0, "beta": 0.0}, {"tau": 0.7, "beta": None}, {"tau": None, "beta": 0.8}]

# Each app below is inserted between these two; its last arguments are the engine and the file of
# results.
BEFORE = """
import json, sys
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from fairflower import strategies

client, server, results = ClientApp(), ServerApp(), {}
"""
AFTER = f"""
if sys.argv[-2] == "inline":
    from fairflower.engines.inline import InlineGrid
    server(InlineGrid(client, {CLIENTS}), Context(1, 1, {{}}, RecordDict(), {{}}))
else:
    from flwr.simulation import run_simulation
    run_simulation(server, client, num_supernodes={CLIENTS},
                   backend_config={{"client_resources": {{"num_cpus": 1, "num_gpus": 0.0}}}})
json.dump(results, open(sys.argv[-1], "w"))
"""

# No fairflower in the ClientApp, no `client-id`, no answer to a query.
APP = f"""
@client.train()
def train(message, context):
    k, t = context.node_config["partition-id"], message.content["config"]["server-round"]
    model = message.content["arrays"]["w"].numpy()
    model = (model + np.sin(np.arange({COORDINATES}) * (k + 2) + 3 * t)).astype(np.float32)
    metrics = MetricRecord({{"num-examples": 10 * (k + 1)}})
    reply = RecordDict({{"arrays": ArrayRecord({{"w": Array(model)}}), "metrics": metrics}})
    return Message(reply, reply_to=message)

@server.main()
def main(grid, context):
    for number, settings in enumerate(json.loads(sys.argv[1])):
        strategy = strategies.FedHEAL(**settings, fraction_train=1.0, fraction_evaluate=0.0,
                                      min_train_nodes={CLIENTS}, min_available_nodes={CLIENTS})
        model = ArrayRecord({{"w": Array(np.zeros({COORDINATES}, np.float32))}})
        result = strategy.start(grid, model, num_rounds={ROUNDS})
        results[number] = result.arrays["w"].numpy().tolist()
"""


# The same for FedEquilibria. Client k's Fisher diagonal is k + 1 at the coordinates i = k mod K and
# 0 elsewhere: so <F_i, F_j> = 0, and the QP has the closed form w_k ~ 1 / ||F_k||^2.
FISHER_APP = f"""
lazy = 2  # this client measures nothing in the run that is to fail

@client.train()
def train(message, context):
    k, config = context.node_config["partition-id"], message.content["config"]
    model = message.content["arrays"]["w"].numpy() + np.float32(k + 1)
    reply = RecordDict({{"arrays": ArrayRecord({{"w": Array(model)}}),
                        "metrics": MetricRecord({{"num-examples": 5, "client-id": k}})}})
    if config["measure"] == "fisher" and not (k == lazy and "lazy" in config):
        fisher = np.where(np.arange({COORDINATES}) % {CLIENTS} == k, k + 1, 0)
        reply["fisher"] = ArrayRecord({{"w": Array(fisher.astype(np.float32))}})
    return Message(reply, reply_to=message)

@server.main()
def main(grid, context):
    nodes = dict(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes={CLIENTS},
                 min_available_nodes={CLIENTS})
    model = ArrayRecord({{"w": Array(np.zeros({COORDINATES}, np.float32))}})
    for scale in ("unit", "none"):
        strategy = strategies.FedEquilibria(t=0.5, scale=scale, **nodes)
        result = strategy.start(grid, model, num_rounds=1)
        results[scale] = result.arrays["w"].numpy().tolist()
    try:
        strategies.FedEquilibria(min_clients={CLIENTS}, **nodes).start(
            grid, model, num_rounds=1, train_config=ConfigRecord({{"lazy": True}}))
    except strategies.RoundFailed as error:
        results["error"] = str(error)
"""


# The same for strategies that read numbers. Client k sends ((k + 1) / 4)^2 for every metric that it
# is asked for, and moves the first coordinate by k and coordinate k + 1 by 1.
METRIC_APP = f"""
lazy = 1  # this client measures nothing in the runs that are to fail

@client.train()
def train(message, context):
    k, config = context.node_config["partition-id"], message.content["config"]
    model = message.content["arrays"]["w"].numpy().copy()
    model[[0, k + 1]] += np.float32([k, 1])
    metrics = MetricRecord({{"num-examples": 5, "client-id": k}})
    if not (k == lazy and "lazy" in config):
        metrics.update({{name: ((k + 1) / 4) ** 2 for name in config["measure"].split(",")}})
    return Message(RecordDict({{"arrays": ArrayRecord({{"w": Array(model)}}), "metrics": metrics}}),
                   reply_to=message)

@server.main()
def main(grid, context):
    nodes = dict(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes={CLIENTS},
                 min_available_nodes={CLIENTS})
    model = ArrayRecord({{"w": Array(np.zeros({CLIENTS} + 1, np.float32))}})
    for name, arguments in json.loads(sys.argv[1]).items():
        kind = getattr(strategies, name)
        result = kind(**arguments, **nodes).start(grid, model, num_rounds=1)
        try:
            kind(min_clients={CLIENTS}, **arguments, **nodes).start(
                grid, model, num_rounds=1, train_config=ConfigRecord({{"lazy": True}}))
        except strategies.RoundFailed as error:
            results[name] = [float(result.arrays["w"].numpy()[0]), str(error)]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory)


@pytest.fixture(scope="module")
def foreign(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` folder of an environment with the wheel and its dependencies."""
    return environment_with(tmp_path_factory.mktemp("foreign"), f"{wheel}[sim]")


def fedheal(tau: float | None = 0.3, beta: float | None = 0.4) -> np.ndarray:
    """Compute the model of ``APP`` by Eq. 5-12, with every client in every round."""
    examples = 10.0 * np.arange(1, CLIENTS + 1)
    p, dp = examples / examples.sum(), np.zeros(CLIENTS)
    rises = np.zeros((CLIENTS, COORDINATES))
    model = np.zeros(COORDINATES)
    for t in range(1, ROUNDS + 1):
        rates = np.arange(CLIENTS)[:, None] + 2
        delta = np.sin(np.arange(COORDINATES) * rates + 3 * t)
        kept = np.ones_like(delta)
        if tau is not None and t > 1:
            share = rises / (t - 1)
            kept = np.where(delta >= 0, share, 1 - share) >= tau
        rises += delta >= 0
        if beta is not None:
            distance = ((kept * delta) ** 2).sum(axis=1)
            dp = (1 - beta) * dp + beta * distance / distance.sum()
            p = (p + dp) / (p + dp).sum()
        mass = (kept * p[:, None]).sum(axis=0)
        model += (kept * delta * p[:, None]).sum(axis=0) / np.where(mass > 0, mass, 1)
    return model


def results_of(
    app: str, foreign: Path, folder: Path, *arguments: str, engine: str = "flower"
) -> dict[str, Any]:
    """Run an app in the foreign environment; return its results."""
    (folder / "app.py").write_text(BEFORE + app + AFTER)
    command = [foreign / "python", "app.py", *arguments, engine, "results.json"]
    run(command, env=environment(folder), cwd=folder)
    return json.loads((folder / "results.json").read_text())


def test_the_wheel_holds_the_whole_package(wheel: Path):
    files = {path for path in (ROOT / "fairflower").rglob("*") if path.is_file()}
    package = {p.relative_to(ROOT).as_posix() for p in files if "__pycache__" not in p.parts}
    assert set(zipfile.ZipFile(wheel).namelist()) >= package


def test_strategies_are_imported_without_torch(foreign: Path, tmp_path: Path):
    code = "import sys, fairflower.strategies as s; print('torch' in sys.modules, s.__file__)"
    imported, place = run(
        [foreign / "python", "-c", code], env=environment(tmp_path), cwd=tmp_path
    ).split()
    assert imported == "False"
    assert Path(place).is_relative_to(foreign.parent)


@pytest.mark.parametrize("engine", ["inline", at_night("flower")])
def test_fedheal_in_a_foreign_app_follows_the_papers_equations(
    engine: str, foreign: Path, tmp_path: Path
):
    given = json.dumps(SETTINGS)
    results = list(results_of(APP, foreign, tmp_path, given, engine=engine).values())
    for settings, result in zip(SETTINGS, results, strict=True):
        np.testing.assert_allclose(result, fedheal(**settings), atol=1e-5, err_msg=str(settings))
    default, fedavg, *_ = map(np.array, results)
    assert np.abs(default - fedavg).max() > 0.1


@pytest.mark.nightly
def test_fedequilibria_in_a_foreign_app_weights_by_the_sent_fisher_diagonals(
    foreign: Path, tmp_path: Path
):
    results = results_of(FISHER_APP, foreign, tmp_path)
    k = np.arange(CLIENTS)
    counts = np.array([np.sum(np.arange(COORDINATES) % CLIENTS == i) for i in k])
    moved = k + 1.0  # what client k adds to every coordinate
    for scale, squares in (("unit", np.ones(CLIENTS)), ("none", counts * (k + 1.0) ** 2)):
        w_moo = (1 / squares) / (1 / squares).sum()
        w = 0.5 * w_moo + 0.5 * moved / moved.sum()
        np.testing.assert_allclose(results[scale], np.full(COORDINATES, w @ moved), rtol=1e-6)
    assert "client 2: it sent no ArrayRecord 'fisher'" in results["error"]


@pytest.mark.nightly
def test_strategies_in_a_foreign_app_weight_by_the_sent_metrics(foreign: Path, tmp_path: Path):
    k = np.arange(CLIENTS)
    value = ((k + 1) / 4) ** 2
    # All clients have equally many examples; FedCE and FedGA have no history in the first round.
    expected = {
        "FedISM": ({"q": 3.0}, value**3, "sharpness"),
        "QFFL": ({"q": 2.0, "rule": "weights"}, value**2, "received_loss"),
        "TERM": ({"t": 4.0}, np.exp(4 * value), "received_loss"),
        "AFL": ({"lr": 0.5}, np.ones(CLIENTS), "received_loss"),
        "FairFed": (
            {"beta": 0.5},
            1 / CLIENTS - 0.5 * (abs(value - value.mean()) - abs(value - value.mean()).mean()),
            "received_score",
        ),
    }
    settings = {name: arguments for name, (arguments, _, _) in expected.items()}
    settings |= {"FedCE": {}, "FedGA": {}}
    needs = {name: need for name, (_, _, need) in expected.items()}
    needs |= {"FedCE": "minus_score", "FedGA": "received_loss"}
    results = results_of(METRIC_APP, foreign, tmp_path, json.dumps(settings))
    assert set(results) == set(settings)
    for name, (moved, error) in results.items():
        assert f"client 1: it sent no metric '{needs[name]}'" in error
        if name in expected:
            w = expected[name][1]
            np.testing.assert_allclose(moved, w / w.sum() @ k, rtol=1e-6, err_msg=name)
        else:
            assert 0 < moved < CLIENTS - 1


# --- a package with a strategy, a client, a model and a data set -----------------------------

STRATEGY = "loss-power:power=2.0"
PARTS = ["--model=shallow:hidden=16", "--data=stripes"]
SHORT = [*PARTS, "--rounds=1", "--epochs=1", "--set=data.clients-per-domain=1"]


@pytest.fixture(scope="module")
def example(foreign: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, installed in the foreign environment."""
    folder = tmp_path_factory.mktemp("example") / "my-method"
    copied = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "examples" / "my-method", folder, ignore=copied)
    uv("pip", "install", "--python", foreign / "python", "--no-deps", folder, cwd=folder)
    return folder


@pytest.mark.nightly
def test_parts_of_an_installed_package_give_the_same_model_with_all_commands(
    foreign: Path, example: Path, tmp_path: Path
):
    path = os.pathsep.join([str(foreign), os.environ.get("PATH", "")])
    env, own = environment(tmp_path, PATH=path), tmp_path / "runs"

    def fairflower(*arguments: str) -> str:
        return run([foreign / "fairflower", *arguments, *SHORT], env=env, cwd=tmp_path)

    code = "import test_my_method as test; test.test_my_method()"
    run([foreign / "python", "-c", code], env=env, cwd=example / "tests")
    one = [f"--strategy={STRATEGY}", "--client=smooth", "--set=run-name=ray", f"--output-dir={own}"]
    assert "round   1/1" in fairflower("run", *one, "--engine=ray", "--workers=2")
    several = [
        f"--strategies={STRATEGY}",
        "--clients=smooth",
        "--seeds=0",
        f"--output-dir={own}/jobs",
    ]
    assert f"smooth+{STRATEGY}" in fairflower("compare", *several, "--jobs=2")
    assert "</html>" in (own / "jobs" / "report" / "index.html").read_text("utf-8")
    sites = [
        f"--strategies={STRATEGY}",
        "--client=smooth",
        "--sites=2",
        f"--output-dir={own}/sites",
    ]
    fairflower("deploy", "trial", *sites)
    with superlink(example, tmp_path / "flower", foreign) as flower:
        keys = {"num-server-rounds": "1", "train.local-epochs": "1"}
        keys |= {"data.clients-per-domain": "1", "output-dir": f"'{own}/flwr'"}
        row = flower.run(keys, supernodes=2)
        assert row["status"] == "finished:completed", row

    models = {}
    for facts in own.rglob("run.json"):
        if "uniform" not in facts.parent.name:
            run_facts = json.loads(facts.read_text())
            assert (run_facts["status"], run_facts["label"]) == (
                "completed",
                f"smooth+{STRATEGY}",
            ), facts
            assert "power = 2.0" in (facts.parent / "config.toml").read_text()
            where = facts.relative_to(own).parts[0]
            models[where] = (facts.parent / "model.safetensors").read_bytes()
    assert models.keys() == {"ray", "jobs", "sites", "flwr"}
    assert len(set(models.values())) == 1
