"""Plans over federations: one number sets the data seed and the seed of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from resuming import config
from rich.console import Console

from fairflower.config import RunConfig, StrategyConfig
from fairflower.errors import DataError
from fairflower.plans.execution import execute
from fairflower.plans.plan import Plan, run_key


def test_a_federation_sets_the_data_seed_and_the_seed() -> None:
    plan = Plan.grid({"data.seed": 9}, StrategyConfig.parse("fedavg"), [3, 4], federations=True)
    assert [(c.strategy.name, c.data.seed, c.seed, c.run_name) for c in plan.runs] == [
        ("fedavg", 3, 3, "fedavg-federation3"),
        ("uniform", 3, 3, "uniform-federation3"),
        ("fedavg", 4, 4, "fedavg-federation4"),
        ("uniform", 4, 4, "uniform-federation4"),
    ]
    assert "data seed  3, 4" in plan.summary()


def test_seeds_do_not_change_the_data_seed() -> None:
    plan = Plan.grid({"data.seed": 9}, StrategyConfig.parse("uniform"), [3, 4])
    assert [(c.data.seed, c.seed, c.run_name) for c in plan.runs] == [
        (9, 3, "uniform-seed3"),
        (9, 4, "uniform-seed4"),
    ]
    assert "data seed" not in plan.summary()


def test_later_runs_of_a_plan_may_have_more_clients_than_the_first(tmp_path: Path) -> None:
    """As if each domain is held out in turn and the domains have different numbers of clients."""
    runs = [config(tmp_path, **{"data.clients-per-domain": clients}) for clients in (1, 2)]
    impossible = config(tmp_path, **{"data.clients-per-domain": 10**6})
    folders: list[Path] = []
    with pytest.raises(DataError):
        execute(Plan([*runs, impossible]), Console(quiet=True), folders, 1)
    assert [json.loads((path / "run.json").read_text())["status"] for path in folders] == [
        "completed",
        "completed",
    ]


def test_the_run_key_is_the_same_for_all_paths_to_a_weights_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ("w.pth", "~/w.pth", str(tmp_path / "w.pth"), "other.pth")
    settings = [{"model.name": "resnet18", "model.weights": path} for path in paths]
    here, home, absolute, other = (run_key(RunConfig.from_flat(s).to_flat()) for s in settings)
    assert here == home == absolute != other
