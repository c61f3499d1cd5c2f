"""Runs killed with SIGKILL at random moments end with the model of a run left alone."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import toys
from products import thinned
from resuming import SETTINGS, config, outcome, session

from fairflower.registry import CLIENTS
from fairflower.server.checkpoint import resumed_config
from fairflower.server.contents import read_facts
from fairflower.strategies import STRATEGIES

pytestmark = [pytest.mark.slow, pytest.mark.posix]

KILLS = 3
#: Whatever a strategy carries from round to round, and two that carry nothing.
RULES = ["fedavg", "fedequilibria", *(name for name, rule in STRATEGIES.items() if rule.STATE)]
ARGUMENTS: dict[str, dict[str, Any]] = {"fedfv": {"strategy.tau": 3}}
#: FairFed by groups of people, of which clients send counts.
GROUPS = "fairfed:metric=demographic_parity_difference"
ARGUMENTS[GROUPS] = {"data.name": "heart-disease", "data.groups": "sex", "evaluate.by": "both"}
#: Trainers that keep something at the clients.
KEEPERS = [
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
#: One for each exchange whose state is the server's alone.
SHARERS = ["fedproto", "fedlsa", "fedbn:keep=server"]
# A rule's state and an exchange's are the server's, a trainer's is the client's: what is lost of
# one shows in the model whatever the others keep.
PAIRS = [("fedavg", "sgd"), *zip(RULES, KEEPERS + SHARERS, strict=False)]
# That a rule's whole state is in its checkpoint is tested without killing anybody, of every rule.
ALONE = [
    *((rule, "sgd") for rule in RULES),
    *(("fedavg", name) for name in KEEPERS + SHARERS),
    ("fedheal", "scaffold"),
    (GROUPS, "sgd"),
]

# Forked from a process that has imported everything, a run starts in no time.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["resuming", "cvxpy"])


@pytest.fixture(autouse=True)
def _tests_can_be_imported(monkeypatch):
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def make(home: str, folder: Path, settings: dict[str, Any]) -> None:
    """Begin a run, or go on with it: what is killed."""
    os.environ["FAIRFLOWER_HOME"] = home
    os.environ["OMP_NUM_THREADS"] = "1"
    if not (folder / "run.json").exists():  # killed before the run began
        shutil.rmtree(folder, ignore_errors=True)
        made = config(folder.parent, **settings, **{"run-name": folder.name})
    elif read_facts(folder)["status"] == "completed":  # killed after it had ended
        return
    else:
        made = resumed_config(folder, {})
    session(made).run()


def test_every_trainer_that_keeps_something_is_killed():
    found = []
    for name in CLIENTS:
        trainer = toys.trainer(name)
        trainer.train(1)
        found += [name] if trainer.state else []
    assert found == KEEPERS


@pytest.mark.parametrize(("rule", "client"), thinned(dict.fromkeys(PAIRS + ALONE), PAIRS[::6]))
def test_killed_runs_end_in_the_same_bits(rule, client, tmp_path):
    settings = {"strategy.name": rule, "client.name": client, **ARGUMENTS.get(rule, {})}
    if client == "silobn":  # it keeps running statistics
        settings["model.name"] = "cnn:norm=batch"
    settings["num-server-rounds"] = 2 * SETTINGS["num-server-rounds"]
    home = os.environ["FAIRFLOWER_HOME"]
    begin = time.monotonic()
    finish(home, tmp_path / "whole", settings)
    seconds = time.monotonic() - begin
    # FedCE's clients keep their model for its measurement.
    keeps = client in KEEPERS or rule == "fedce"
    assert read_facts(tmp_path / "whole").get("client_state", False) == keeps
    kill_and_compare(f"{rule}+{client}", settings, seconds, tmp_path)


@pytest.mark.parametrize(
    ("rule", "client"),
    thinned([("fedga", "ditto"), ("eagle", "sgd")], standing_for_all=[("fedga", "ditto")]),
)
def test_killed_runs_under_secure_aggregation_end_in_the_same_bits(rule, client, tmp_path):
    settings = {"strategy.name": rule, "client.name": client, "secure-aggregation": True}
    settings["num-server-rounds"] = SETTINGS["num-server-rounds"]
    begin = time.monotonic()
    finish(os.environ["FAIRFLOWER_HOME"], tmp_path / "whole", settings)
    kill_and_compare(f"{rule}+{client}", settings, time.monotonic() - begin, tmp_path)


def kill_and_compare(name: str, settings: dict[str, Any], seconds: float, tmp_path: Path) -> None:
    """Kill runs with these settings, and compare them with the whole run, of ``seconds``."""
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
                break  # it was faster; the next one begins from the start
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
