"""What a user's strategy may do wrong in a round: the error has its name and place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flwr
import pytest
from runs import config, run

from fairflower.errors import StrategyError
from fairflower.strategies import FedAvg


class Exits(FedAvg):
    def weigh(self, cohort):
        sys.exit(0)


class TellsAnObject(FedAvg):
    def tell(self, client_id):
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
        (TellsAnObject, "TellsAnObject failed with TypeError: Not all values are of valid type"),
        (KeepsAFunction, "KeepsAFunction failed with TypeError: .*: cannot keep <built-in"),
        (ReportsAnObject, "ReportsAnObject failed with TypeError: .* is not JSON serializable"),
        (HasNoText, r"HasNoText failed with NoText: no text \(RuntimeError\)"),
    ],
)
def test_whatever_a_rule_does_wrong_fails_the_run_by_the_rules_name(strategy, words, tmp_path):
    made = config(tmp_path, **{"strategy.name": f"{__name__}:{strategy.__name__}"})
    with pytest.raises(StrategyError, match=words):
        run(made)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"


def test_flowers_own_exit_during_a_merge_stops_the_run(tmp_path, monkeypatch):
    by_flower: dict[str, Any] = {}
    source = "def leave(*_):\n    raise SystemExit(0)"
    exec(compile(source, str(Path(flwr.__file__).parent / "exit.py"), "exec"), by_flower)
    monkeypatch.setattr(Exits, "weigh", by_flower["leave"])
    made = config(tmp_path, **{"strategy.name": f"{__name__}:Exits"})
    with pytest.raises(SystemExit):
        run(made)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
