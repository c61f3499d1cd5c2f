"""Plans of runs: remaining runs, the number of parallel runs, and arguments of methods."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from command import call
from resuming import config, session, stopped
from rich.console import Console

import fairflower as ff
from fairflower.config import ClientConfig, RunConfig, StrategyConfig
from fairflower.config.run import default_values
from fairflower.errors import ConfigError, DataError, RunInterrupted
from fairflower.plans import execution, parallel, power
from fairflower.plans.execution import auto_jobs, check_parallel, execute, remaining_plan
from fairflower.plans.plan import Plan, grid_configs, run_key, single_run_config
from fairflower.report import read_run


def test_a_completed_run_with_other_examples_is_refused(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    run = read_run(session(run_config).run())
    other = config(tmp_path, seed=1)
    assert Plan([run_config, other]).without([run]).runs == [other]
    run.info["digest"] = "of other examples"
    with pytest.raises(ConfigError, match=r"had other examples than data\.dir has now"):
        Plan([run_config, other]).without([run])
    assert not Plan([run_config]).without([run]).runs, (
        "no run is left that could be compared with it"
    )
    for earlier in ({"strategy.name": "uniform"}, {"num-server-rounds": 99}, {"train.lr": 0.5}):
        beside = dataclasses.replace(run, config={**run.config, **earlier})
        with pytest.raises(ConfigError, match=r"had other examples than data\.dir has now"):
            Plan([run_config, other]).without([beside])  # the report would compare it
    elsewhere = dataclasses.replace(run, config={**run.config, "data.seed": 9})
    assert len(Plan([run_config, other]).without([elsewhere]).runs) == 2


def test_completed_runs_that_are_kept_get_the_setting_tuned_of_the_command(tmp_path: Path) -> None:
    before = config(tmp_path)
    folder = session(before).run()
    console = Console(file=io.StringIO())
    now = dataclasses.replace(before, tuned="train.lr,client.mu")
    for changed in (1, 0):
        assert not remaining_plan(Plan([now]), tmp_path, console).runs
        assert read_run(folder).config == {**before.to_flat(), "tuned": now.tuned}
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert text.count("The setting tuned has been changed in 1 run folder.") == 1, changed


@pytest.mark.parametrize(
    ("settings", "jobs"),
    [
        ({}, 2),
        (default_values(), 2),  # the config.toml of a run has all keys
        ({"workers": 2}, 1),
        ({"engine": "ray"}, 1),
        ({"ray-address": "auto"}, 1),
    ],
)
def test_engine_settings_imply_one_run_at_a_time(
    settings: dict[str, Any], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "cpus", lambda: 2)
    config = RunConfig.from_flat({**settings, "train.device": "cpu"})
    assert auto_jobs(Plan([config] * 2)) == jobs


def test_the_run_key_is_the_same_for_relative_and_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.csv").write_text("round,client\n1,0\n1,1\n1,2\n1,3\n")
    monkeypatch.chdir(tmp_path)
    here, absolute = (
        config(tmp_path, **{"participation.availability": path})
        for path in ("trace.csv", str(tmp_path / "trace.csv"))
    )
    assert run_key(here.to_flat()) == run_key(absolute.to_flat())
    assert session(here).config == absolute


def test_later_runs_of_a_plan_may_have_more_clients_than_the_first(tmp_path: Path) -> None:
    """As if each domain is held out in turn and the domains have different numbers of clients."""
    runs = [config(tmp_path, **{"data.clients-per-domain": clients}) for clients in (1, 2)]
    impossible = config(tmp_path, **{"data.clients-per-domain": 10**6})
    with pytest.raises(DataError):
        execute(Plan([*runs, impossible]), Console(quiet=True))
    statuses = [json.loads(path.read_text())["status"] for path in tmp_path.rglob("run.json")]
    assert statuses == ["completed", "completed"]


def test_a_stopped_command_says_how_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def stop(runs: Any, grid: Any, console: Any, stop: Any, folders: list[Path], _: Any) -> None:
        folders += begun
        raise RunInterrupted

    def said(**options: Any) -> str:
        console = Console(file=io.StringIO(), width=500)
        with pytest.raises(KeyboardInterrupt):
            execute(Plan([config(tmp_path)]), console, **options)
        return console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setattr(execution, "execute_in_turn", stop)
    assert said() == said(home=tmp_path) == "Stopped."
    begun.append(stopped(config(tmp_path), 2))
    assert said() == f"Stopped. To resume the run: fairflower run --resume {begun[0]}"
    assert said(home=tmp_path) == (
        f"Stopped. To resume unfinished runs, repeat the command with --output-dir {tmp_path}"
    )


def test_there_are_no_more_processes_than_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(parallel, "execute_parallel", lambda plan, jobs, *_: asked.append(jobs))
    runs = [config(tmp_path, seed=seed) for seed in (1, 2)]
    execute(Plan(runs), Console(quiet=True), jobs=400)
    assert asked == [2]


def test_the_run_key_is_the_same_for_all_paths_to_a_weights_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ("w.pth", "~/w.pth", str(tmp_path / "w.pth"), "other.pth")
    settings = [{"model.name": "resnet18", "model.weights": path} for path in paths]
    here, home, absolute, other = (run_key(RunConfig.from_flat(s).to_flat()) for s in settings)
    assert here == home == absolute != other


def test_parallel_runs_are_stopped_if_the_waiting_process_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for name in ("stop", "close"):
        monkeypatch.setattr(parallel._Processes, name, lambda self, name=name: called.append(name))
    with pytest.raises(MemoryError), parallel._Processes(1):
        raise MemoryError
    assert called == ["stop", "close"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"engine": "ray"}, "engine"),
        ({"workers": 2}, "workers"),
        ({"client-gpus": 0.5}, "client-gpus"),
        ({"ray-address": "auto"}, "ray-address"),
    ],
)
def test_settings_of_parallel_clients_are_refused_with_parallel_runs(
    settings: dict[str, Any], key: str, tmp_path: Path
) -> None:
    plan = Plan([RunConfig.from_flat({**default_values(), **settings})])
    with pytest.raises(ConfigError, match=f"{key} = .*: 2 parallel runs"):
        check_parallel(plan, "2 parallel runs")
    assigned = [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
    output = call("tune", "--strategies", "fedavg", "--output-dir", tmp_path, *assigned, expect=2)
    assert f"{key} = {settings[key]!r}: the runs of a study use the inline engine" in output


def test_arguments_without_a_name_apply_to_all_methods_that_have_them() -> None:
    strategies = StrategyConfig.parse("fedavg,qffl,fedheal:tau=0.1")
    flat = {"strategy.q": 5.0, "client.mu": 0.5}
    clients = ClientConfig.parse("sgd,fedprox")
    labels = [config.label for config in grid_configs(flat, strategies, clients=clients)]
    assert labels == [
        *("fedavg", "qffl:q=5.0", "fedheal:tau=0.1"),
        *("fedprox:mu=0.5+fedavg", "fedprox:mu=0.5+qffl:q=5.0", "fedprox:mu=0.5+fedheal:tau=0.1"),
    ]
    named = {"strategy.name": "qffl", **flat, "client.name": "fedprox"}
    labels = [config.label for config in grid_configs(named, strategies, clients=clients)]
    assert labels[4] == "fedprox:mu=0.5+qffl:q=5.0"
    with pytest.raises(ConfigError, match=r"strategy\.q is not an argument of fedavg"):
        grid_configs(flat, strategies[:1], clients=clients)
    single = single_run_config({"strategy.q": 5.0}, [StrategyConfig("qffl")], {})
    assert single.label == "qffl:q=5.0"
    with pytest.raises(ConfigError, match=r"strategy\.q is an argument of .*qffl"):
        single_run_config({"strategy.q": 5.0}, [StrategyConfig("fedavg")], {})


def test_references_train_plainly_once_whatever_the_clients_and_bounds_are() -> None:
    flat = {"client.name": "fedprox", "client.mu": 0.1, "bound.max-client-weight": 0.5}
    flat |= {"train.lr": 0.2, "strategy.tau": 0.4}
    plan = Plan.grid(
        flat,
        StrategyConfig.parse("fedheal"),
        [0, 1],
        clients=ClientConfig.parse("moon,fedprox"),
        references=["alone", "pooled"],
    )
    references = [config for config in plan.runs if config.reference]
    assert [(c.label, c.seed) for c in references] == [
        *(("alone", 0), ("pooled", 0), ("alone", 1), ("pooled", 1))
    ]
    assert {(c.client.label, c.bound.max_client_weight, c.train.lr) for c in references} == {
        ("sgd", 1.0, 0.2)
    }
    assert power.comparisons_of(plan) == 1  # fedheal against uniform, for each client


@pytest.mark.parametrize(
    "protection", [{"secure-aggregation": True}, {"privacy.noise-multiplier": 1.0}]
)
def test_references_have_neither_masks_nor_noise(protection: dict[str, Any]) -> None:
    strategies = [StrategyConfig("uniform")]
    plan = Plan.grid(protection, strategies, [0], references=["alone", "pooled"])
    protected = {c.label: c.secure_aggregation or c.privacy.on for c in plan.runs}
    assert protected == {"uniform": True, "alone": False, "pooled": False}


@pytest.mark.parametrize("given", [["alone", "alone"], "nobody", [], "alone:mu=1"])
def test_unknown_references_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^references .*expected alone or pooled, or both"):
        ff.compare(references=given)
