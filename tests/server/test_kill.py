"""Runs killed with SIGKILL and resumed end with the model of an uninterrupted run."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import toy_trainers
from parametrize import mark_others_nightly
from resuming import SETTINGS, config, outcome, session

from fairflower.registry import CLIENTS
from fairflower.server.checkpoint import resumed_config
from fairflower.server.contents import read_facts
from fairflower.strategies import STRATEGIES

pytestmark = [pytest.mark.slow, pytest.mark.posix]

KILLS = 2
#: Two strategies without state, and all strategies with state.
STRATEGY_NAMES = [
    "fedavg",
    "fedequilibria",
    *(name for name, strategy in STRATEGIES.items() if strategy.STATE),
]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fedavg": {"server.optimizer": "adam"},
    "fedfv": {"strategy.tau": 3},
}
#: FairFed with a metric of group fairness, for which clients send counts of people.
GROUPS = "fairfed:metric=demographic_parity_difference"
ARGUMENTS[GROUPS] = {"data.name": "heart-disease", "data.groups": "sex", "evaluate.by": "both"}
#: Trainers with state at the clients.
STATEFUL = [
    "scaffold",
    "moon",
    "feddyn",
    "fedgc",
    "ditto",
    "fedbn",
    "silobn",
    "fedper",
    "fedrep",
    "lg-fedavg",
]
#: A trainer for each exchange that has state at the server only.
WITH_EXCHANGE = ["fedproto", "fedlsa", "fedbn:keep=server"]
# Strategies and exchanges have state at the server, trainers at the clients. Lost state changes the
# model whatever else has state, so pairs of a strategy and a trainer test both at once.
PAIRS = [("fedavg", "sgd"), *zip(STRATEGY_NAMES, STATEFUL + WITH_EXCHANGE, strict=False)]
# test_checkpoint.py tests that checkpoints have the whole state of every strategy.
SINGLE = [
    *((strategy, "sgd") for strategy in STRATEGY_NAMES),
    *(("fedavg", name) for name in STATEFUL + WITH_EXCHANGE),
    ("fedheal", "scaffold"),
    (GROUPS, "sgd"),
]

# A run starts quickly if it is forked from a process that has imported everything.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["resuming", "cvxpy", "fairflower.published.uci_digits"])


@pytest.fixture(autouse=True)
def _tests_can_be_imported(monkeypatch):
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def make(home: str, folder: Path, settings: dict[str, Any]) -> None:
    """Start or resume a run; the process that does so is killed."""
    os.environ["FAIRFLOWER_HOME"] = home
    os.environ["OMP_NUM_THREADS"] = "1"
    if not (folder / "run.json").exists():  # killed before the run began
        shutil.rmtree(folder, ignore_errors=True)
        run_config = config(folder.parent, **settings, **{"run-name": folder.name})
    elif read_facts(folder)["status"] == "completed":  # killed after it had ended
        return
    else:
        run_config = resumed_config(folder, {})
    session(run_config).run()


def test_the_list_of_trainers_with_state_is_complete():
    names = []
    for name in CLIENTS:
        trainer = toy_trainers.trainer(name)
        trainer.train(1)
        names += [name] if trainer.state else []
    assert names == STATEFUL


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "client"), mark_others_nightly(dict.fromkeys(PAIRS + SINGLE), PAIRS[::6])
)
def test_killed_and_resumed_runs_equal_an_uninterrupted_run(strategy, client, tmp_path):
    settings = {"strategy.name": strategy, "client.name": client, **ARGUMENTS.get(strategy, {})}
    if client == "silobn":  # which has local running statistics
        settings["model.name"] = "cnn:norm=batch"
    settings["num-server-rounds"] = 2 * SETTINGS["num-server-rounds"]
    home = os.environ["FAIRFLOWER_HOME"]
    begin = time.monotonic()
    finish(home, tmp_path / "whole", settings)
    seconds = time.monotonic() - begin
    # FedCE's clients store their model for its measurement.
    has_state = client in STATEFUL or strategy == "fedce"
    assert read_facts(tmp_path / "whole").get("client_state", False) == has_state
    kill_and_compare(f"{strategy}+{client}", settings, seconds, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "client"),
    mark_others_nightly(
        [("fedga", "ditto"), ("eagle", "sgd")], standing_for_all=[("fedga", "ditto")]
    ),
)
def test_killed_and_resumed_runs_with_secure_aggregation_equal_an_uninterrupted_run(
    strategy, client, tmp_path
):
    settings = {"strategy.name": strategy, "client.name": client, "secure-aggregation": True}
    settings["server.optimizer"] = "momentum"
    settings["num-server-rounds"] = SETTINGS["num-server-rounds"]
    begin = time.monotonic()
    finish(os.environ["FAIRFLOWER_HOME"], tmp_path / "whole", settings)
    kill_and_compare(f"{strategy}+{client}", settings, time.monotonic() - begin, tmp_path)


def kill_and_compare(name: str, settings: dict[str, Any], seconds: float, tmp_path: Path) -> None:
    """Kill and resume runs; compare them with the uninterrupted run, which took ``seconds``."""
    home = os.environ["FAIRFLOWER_HOME"]
    moments = random.Random(name)
    attempt = kills = 0
    while kills < KILLS:
        attempt += 1
        folder = tmp_path / f"killed-{attempt}"
        while kills < KILLS:
            process = processes.Process(target=make, args=(home, folder, settings))
            process.start()
            process.join(moments.uniform(0, 0.5) * seconds)
            if process.exitcode is not None:
                assert process.exitcode == 0
                break  # it ended before it was killed; the next attempt starts a new run
            process.kill()
            process.join()
            kills += 1
        finish(home, folder, settings)
        assert outcome(folder) == outcome(tmp_path / "whole")


def finish(home: str, folder: Path, settings: dict[str, Any]) -> None:
    process = processes.Process(target=make, args=(home, folder, settings))
    process.start()
    process.join()
    assert process.exitcode == 0
