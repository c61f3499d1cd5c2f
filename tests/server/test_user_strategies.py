"""Errors in a user's strategy or trainer during a round: the message names class and line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flwr
import pytest
from runs import config, run

from fairflower.clients import SGD
from fairflower.errors import RoundFailed, StrategyError, UserError
from fairflower.strategies import FedAvg


class Exits(FedAvg):
    def weigh(self, cohort):
        sys.exit(0)


class Quits(BaseException):
    """Derived directly from BaseException, which only a user's code would do."""


class RaisesABareOne(FedAvg):
    def weigh(self, cohort):
        raise Quits("tired")


class RaisesABareOneAtOnce(FedAvg):
    def __init__(self, **options):
        raise Quits("tired")


class RaisesABareOneAtAClient(SGD):
    def loss(self, x, y):
        raise Quits("tired")


class TellsAnObject(FedAvg):
    def client_config(self, client_id):
        return {"hint": object()}


class KeepsAFunction(FedAvg):
    STATE = ("kept",)
    kept = staticmethod(len)


class ReportsAnObject(FedAvg):
    def weigh(self, cohort):
        self.diagnostics["hint"] = object()
        return super().weigh(cohort)


class HasNoText(FedAvg):
    def weigh(self, cohort):
        raise NoText


class NoText(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Exits, r"Exits failed with SystemExit: 0 \(test_user_strategies.py, line \d+, in weigh\)"),
        (
            RaisesABareOne,
            r"RaisesABareOne failed with Quits: tired \(test_user_strategies.py, line",
        ),
        (TellsAnObject, "TellsAnObject failed with TypeError: Not all values are of valid type"),
        (KeepsAFunction, "KeepsAFunction failed with TypeError: .*: cannot keep <built-in"),
        (ReportsAnObject, "ReportsAnObject failed with TypeError: .* is not JSON serializable"),
        (HasNoText, r"HasNoText failed with NoText: no text \(RuntimeError\)"),
    ],
)
def test_errors_in_a_strategy_fail_the_run_and_name_the_strategy(strategy, words, tmp_path):
    run_config = config(tmp_path, **{"strategy.name": f"{__name__}:{strategy.__name__}"})
    with pytest.raises(StrategyError, match=words):
        run(run_config)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"


def test_a_base_exception_is_named_before_the_run_and_at_clients(tmp_path):
    with pytest.raises(UserError, match=r"RaisesABareOneAtOnce': it failed with Quits: tired"):
        config(tmp_path, **{"strategy.name": f"{__name__}:RaisesABareOneAtOnce"})
    run_config = config(tmp_path, **{"client.name": f"{__name__}:RaisesABareOneAtAClient"})
    with pytest.raises(RoundFailed, match=r"Quits: tired \(test_user_strategies.py, line"):
        run(run_config)


def test_ctrl_c_in_a_strategy_stops_the_run_without_failing_it(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Exits, "weigh", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path, **{"strategy.name": f"{__name__}:Exits"}))
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"


def test_a_system_exit_raised_by_flower_during_a_merge_stops_the_run(tmp_path, monkeypatch):
    by_flower: dict[str, Any] = {}
    source = "def leave(*_):\n    raise SystemExit(0)"
    exec(compile(source, str(Path(flwr.__file__).parent / "exit.py"), "exec"), by_flower)
    monkeypatch.setattr(Exits, "weigh", by_flower["leave"])
    run_config = config(tmp_path, **{"strategy.name": f"{__name__}:Exits"})
    with pytest.raises(SystemExit):
        run(run_config)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
