"""The sharpness of a run's final model, client by client."""

from __future__ import annotations

import csv
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from command import LANDSCAPE, SHARPNESS, call, invoke
from rich.console import Console

from experiments.sharpness import ClientSharpness, by_method, client_sharpness
from fairflower.api.final_model import load_model
from fairflower.cli.terminal import console
from fairflower.clients import Images, sharpness
from fairflower.config import RunConfig
from fairflower.data import Augment, prepare
from fairflower.engines.launch import launch
from fairflower.plans.execution import execute_in_turn
from fairflower.plans.plan import Plan
from fairflower.report import read_run

TINY = {
    "engine": "inline",
    "num-server-rounds": 1,
    "data.clients-per-domain": 2,
    "data.examples-per-client": 20,
    "data.test-examples": 10,
    "train.local-epochs": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = TINY | {"output-dir": str(tmp_path_factory.mktemp("runs")), "run-name": "one"}
    config = RunConfig.from_flat(settings)
    folders: list[Path] = []
    plan, quiet = Plan([config]), Console(quiet=True)
    launch(
        lambda grid: execute_in_turn(plan.runs, grid, quiet, threading.Event(), folders), config, 8
    )
    return folders[0]


def test_every_client_is_measured_on_its_own_images(folder: Path) -> None:
    run = read_run(folder)
    config = RunConfig.from_flat(run.config)
    federation = prepare(config.data)
    model = load_model(run, config, federation)
    actual = client_sharpness(run, rho=0.1)
    assert list(actual.values) == list(federation.domains)
    every = []
    for client in federation.clients:
        split = federation.train(client.client_id)
        images = Images(split, federation.mean, federation.std, Augment())
        every.append(sharpness(model, images, rho=0.1))
    assert np.concatenate(list(actual.values.values())).tolist() == every
    assert actual.over_clients == (pytest.approx(np.mean(every)), pytest.approx(np.std(every)))
    assert min(every) > 0
    assert client_sharpness(run).over_clients[0] < actual.over_clients[0]


def test_the_sharpness_command_prints_domains_and_writes_every_client(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 160)
    out = tmp_path / "sharpness.csv"
    output = call(folder, "--out", out, command=SHARPNESS)
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 8
    for domain in read_run(folder).domains:
        mean = np.mean([float(row["sharpness"]) for row in rows if row["domain"] == domain])
        assert f"{mean:.4f}" in output
    (folder / "model.safetensors").rename(folder / "aside")
    try:
        missing = call(folder, command=SHARPNESS, expect=1)
    finally:
        (folder / "aside").rename(folder / "model.safetensors")
    assert "model.safetensors is missing" in missing


def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.txt"
    file.touch()
    for command, out, reason in (
        (SHARPNESS, tmp_path, "is a folder"),
        (SHARPNESS, file, "expected a file name that ends in .csv"),
        (LANDSCAPE, file, "is a file. Name a folder"),
    ):
        refused = invoke(folder, "--out", out, command=command)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"Error: --out {out}")
        assert reason in refused.stderr
        assert not refused.stdout


def test_no_number_is_cropped_on_a_narrow_terminal() -> None:
    values = {f"domain {k}": np.full(2, k + 0.5) for k in range(8)}
    narrow = Console(width=60, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    narrow.print(by_method([ClientSharpness("fedism", 0, values)]))
    shown = narrow.export_text()
    assert all(f"{k}.5000" in shown for k in range(8))


def test_a_long_name_is_not_truncated_on_a_narrow_terminal() -> None:
    name = "fairfed:metric=received_balanced_accuracy"
    narrow = Console(width=60, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    narrow.print(by_method([ClientSharpness(name, 0, {"clean": np.ones(2)})]))
    cells = [
        line.split("\N{BOX DRAWINGS LIGHT VERTICAL}") for line in narrow.export_text().splitlines()
    ]
    assert "".join(row[1].strip() for row in cells if len(row) > 1) == name
