"""Whole runs of tasks on embedded tables and own files, and what is refused before training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resuming
from rich.console import Console
from runs import config, history, run
from sklearn.metrics import mean_absolute_error

from fairflower.client_app import app
from fairflower.config import DataConfig
from fairflower.data import FeatureSet, prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, DataError
from fairflower.server.session import Session

NODES = {
    "randhie:target=visits": 4,
    "heart-disease:target=severity": 3,
    "heart-disease:target=labels": 4,
    "lung": 8,
}
WHOLE = {"data.examples-per-client": 0, "data.test-examples": 0}
SCORES = {
    "regression": {"rmse", "mae", "r2"},
    "multilabel": {"auc", "macro_f1"},
    "survival": {"concordance", "uno_concordance", "integrated_brier"},
}


def own_mae(predictions: Any, targets: Any) -> float:
    """Return the mean absolute error of predictions, a metric of a user."""
    return float(mean_absolute_error(targets, predictions))


def values(folder: Path, level: str = "domain") -> dict[tuple[int, str], dict[str, float]]:
    """Return the tests of a run: round and domain -> metric -> value."""
    tests: dict[tuple[int, str], dict[str, float]] = {}
    for row in history(folder):
        if row["level"] == level:
            place = int(row["round"]), row["name"]
            tests.setdefault(place, {})[row["metric"]] = float(row["value"])
    return tests


@pytest.mark.slow
@pytest.mark.parametrize("name", NODES)
def test_embedded_data_are_learnt_from_the_first_to_the_last_round(
    name: str, tmp_path: Path
) -> None:
    metric = {"evaluate.metrics": "test_embedded_runs:own_mae"} if "visits" in name else {}
    folder = run(config(tmp_path, **{"data.name": name}, **WHOLE, **metric), nodes=NODES[name])
    facts, tests = json.loads((folder / "run.json").read_text()), values(folder)
    assert facts["status"] == "completed"
    kind, *_ = facts["task"].split(":")
    names = {score["name"] for score in facts["scores"]}
    assert names == SCORES[kind]
    for (_, domain), scores in tests.items():
        assert names | {"loss"} <= scores.keys(), domain
        assert all(map(math.isfinite, scores.values()))
        if metric:  # a user's metrics receive predictions, not logarithms
            assert scores["own_mae"] == pytest.approx(scores["mae"], rel=1e-5)
    domains = {domain for _, domain in tests}
    before, after = (np.mean([tests[r, d]["loss"] for d in domains]) for r in (0, 2))
    assert after < before


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NODES)[1:])
def test_tests_of_clients_equal_those_of_the_server_with_one_client_per_domain(
    name: str, tmp_path: Path
) -> None:
    names = {"data.name": name, **WHOLE}
    names |= {"evaluate.metrics": "test_embedded_runs:own_mae"} if "severity" in name else {}
    by = {
        who: values(run(config(tmp_path / who, **names, **{"evaluate.by": who}), nodes=NODES[name]))
        for who in ("server", "clients")
    }
    for place, scores in by["clients"].items():
        for metric, value in scores.items():
            assert value == pytest.approx(by["server"][place][metric], rel=1e-5), metric


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heart-disease:target=labels", "lung"])
def test_a_resumed_run_has_the_same_model_and_tests(name: str, tmp_path: Path) -> None:
    names = {"data.name": name, "data.test-examples": 0, "data.examples-per-client": 6}
    names |= {"data.clients-per-domain": 1, "fraction-train": 1.0}
    if name == "lung":
        names |= {"data.domains": "institution 1,institution 3,institution 11,others"}
    whole = resuming.session(resuming.config(tmp_path / "whole", **names)).run()
    again = resuming.resume(resuming.stopped(resuming.config(tmp_path / "cut", **names), 2))
    assert resuming.outcome(again) == resuming.outcome(whole)


@pytest.mark.parametrize("name", ["daa", "fedce", "fairfed", "fedgcr"])
def test_a_strategy_that_needs_classes_is_refused_before_training(
    name: str, tmp_path: Path
) -> None:
    names = {"data.name": "heart-disease:target=severity", "strategy.name": name}
    with pytest.raises(ConfigError, match=f"strategy.name = '{name}' needs "):
        run(config(tmp_path, **names), nodes=3)


class Numbers(FeatureSet):
    """Two domains of ten examples with features 0 to 9; a test sets the targets."""

    y: Any = np.arange(10.0)

    def all_domains(self) -> list[str]:
        return ["a", "b"]

    def labels(self, domain: str, split: str) -> Any:
        return np.asarray(self.y)

    def features(self, domain: str, split: str, rows: Any) -> Any:
        return rows[:, None].astype(np.float32)

    def fingerprint(self) -> int:
        return 1

    def source(self, domain: str) -> str:
        return "made up"


def prepared(monkeypatch: pytest.MonkeyPatch, y: Any, task: str) -> Any:
    monkeypatch.setattr(Numbers, "y", y)
    name = f"{__name__}:Numbers"
    return prepare(DataConfig(name=name, task=task, clients_per_domain=1))


TIMES = np.column_stack([np.arange(10.0), np.arange(10) % 2])


@pytest.mark.parametrize(
    ("task", "y", "wrong"),
    [
        ("", np.arange(10.0), r"labels \[N\] \(or another task, such as data.task = 'regression'"),
        ("regression", np.full(10, 3.5), r"the same target 3.5 in all 20 training examples\."),
        ("multilabel", np.ones((10, 2)), r"the same target \[1. 1.\] in all 20 training examples"),
        ("multilabel", np.full((10, 2), np.nan), r"the same target \[nan nan\] in all 20 training"),
        ("survival:cuts=5", TIMES * [1, 0], "found no event until 5 in all 20 training examples"),
        ("survival:cuts=0.5", TIMES, r"found no event until 0\.5 in all 20 training examples"),
        ("regression", np.array([*range(9), np.nan]), "labels: found nan for example 9; expected"),
        ("survival:cuts=5", -TIMES, r"found time -1 and event -1 for example 1.*survival:cuts=5'"),
        ("survival:cuts=5", 2 * TIMES, "found time 2 and event 2 for example 1; expected times >="),
        ("survival:cuts=5", np.arange(10.0), r"found float64 \[10\]; expected times >= 0 and even"),
    ],
)
def test_targets_that_do_not_fit_are_refused_with_their_place(
    task: str, y: Any, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=wrong):
        prepared(monkeypatch, y, task)


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        ("regresion", "regresion"),
        ("regression:loss=cubic", "loss = 'cubic': expected squared or huber or absolute or"),
        ("regression:scale=0", "scale = 0: expected a number above 0"),
        ("regression:q=1", r"q = 1: expected a number in \[1e-06, 0.999999\]"),
        ("survival", "needs either cuts"),
        ("survival:cuts=3;2", "cuts = '3;2': expected increasing numbers above 0"),
    ],
)
def test_a_task_or_argument_that_is_not_there_is_refused(
    task: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=wrong):
        prepared(monkeypatch, TIMES, task)


class OneWithoutEvents(Numbers):
    """The second domain has no event."""

    task = "survival:cuts=3;6;9"

    def labels(self, domain: str, split: str) -> Any:
        return TIMES * [1, domain == "a"]


class OneWithEqualTargets(Numbers):
    """All targets of the second domain are 0.1."""

    task = "regression"

    def labels(self, domain: str, split: str) -> Any:
        return np.arange(10.0) if domain == "a" else np.full(10, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["server", "clients"])
@pytest.mark.parametrize("kind", [OneWithoutEvents, OneWithEqualTargets])
def test_a_score_that_a_domain_does_not_define_is_said_and_not_0(
    kind: type[Numbers], by: str, tmp_path: Path
) -> None:
    names = {"data.name": f"{__name__}:{kind.__name__}", "evaluate.by": by}
    folder = run(config(tmp_path, **names, **WHOLE), nodes=2)
    tests = values(folder)
    undefined = SCORES["survival"] if kind is OneWithoutEvents else {"r2"}
    assert undefined <= tests[2, "a"].keys()
    assert not undefined & tests[2, "b"].keys()
    assert "loss" in tests[2, "b"]
    notes = json.loads((folder / "run.json").read_text())["undefined_metrics"]
    where = "domain b" if by == "server" else "a client of domain b"
    assert list(notes) == [where]
    assert all(f"{name} (" in notes[where] for name in undefined)


def npz(folder: Path, y: Any) -> DataConfig:
    """Write images whose brightness grows with a number, and return their data config."""
    for domain in "ab":
        x = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None] * 5, (40, 8, 8))
        split = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
        np.savez(folder / f"{domain}.npz", **split)
    return DataConfig(name="npz", dir=str(folder), task="regression")


def test_own_arrays_may_have_real_targets(tmp_path: Path) -> None:
    federation = prepare(npz(tmp_path, np.linspace(-1, 1, 40)))
    assert (federation.task, federation.num_classes) == ("regression", 1)
    assert federation.train(0).y.dtype == np.float32
    y = np.linspace(-1, 1, 40)
    y[7] = np.inf
    with pytest.raises(DataError, match=r"a\.npz: y_train: found inf for example 7; expected fin"):
        prepare(npz(tmp_path, y))


@pytest.mark.slow
def test_own_arrays_with_real_targets_are_learnt(tmp_path: Path) -> None:
    data = npz(tmp_path, np.linspace(-1, 1, 40))
    names = {"data.name": "npz", "data.dir": data.dir, "data.task": "regression"}
    tests = values(run(config(tmp_path / "runs", **names, **WHOLE), nodes=2))
    assert tests[2, "a"]["rmse"] < tests[0, "a"]["rmse"]


@pytest.mark.slow
def test_sites_learn_real_targets_as_a_simulation_does(tmp_path: Path) -> None:
    data = npz(tmp_path, np.linspace(-1, 1, 40))
    names = {"data.name": "npz", "data.task": "regression", "evaluate.by": "clients", **WHOLE}
    simulated = values(run(config(tmp_path / "one", **names, **{"data.dir": data.dir}), nodes=2))
    grid = InlineGrid(app, 2)
    for context, domain in zip(grid.contexts.values(), "ab", strict=True):
        context.node_config = {"data-dir": data.dir, "domain": domain}
    folder = Session(grid, config(tmp_path / "two", **names), Console(quiet=True)).run()
    assert values(folder) == simulated
