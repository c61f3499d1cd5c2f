"""Differential privacy between real processes has the bits of this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import invoke
from runs import SMALL

import fairflower as ff
from fairflower.config import RunConfig
from fairflower.deploy.local import LocalDeployment
from fairflower.deploy.nodes import nodes_with_shares

#: A rule that asks for a number, whose noise is the client's. A seed makes all noise reproducible.
PRIVATE: dict[str, Any] = {
    **SMALL,
    "strategy.name": "term",
    "seed": 3,
    "privacy.noise-multiplier": 2.0,
    "privacy.number-noise-multiplier": 0.2,
    "privacy.clip": 0.3,
    "privacy.noise-seed": 5,
    "bound.max-client-weight": 0.4,
}


def inline(folder: Path) -> Path:
    """The run in this process."""
    return ff.run(PRIVATE, output_dir=folder, progress=False).path


def assert_same(found: Path, expected: Path) -> None:
    """The same model, numbers with noise, and epsilon."""
    models = [(run / "model.safetensors").read_bytes() for run in (found, expected)]
    assert models[0] == models[1]
    accounts, losses = [], []
    for run in (found, expected):
        facts = json.loads((run / "run.json").read_text())
        assert facts["status"] == "completed"
        accounts.append(facts["privacy"])
        lines = (run / "history.csv").read_text().splitlines()
        losses.append([line for line in lines if ",received_loss," in line])
        assert "train_loss" not in "".join(lines)
    assert accounts[0] == accounts[1]
    assert accounts[0]["epsilon"] > 0
    assert accounts[0]["rounds"] == 2
    assert losses[0]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.nightly
def test_nodes_that_share_a_data_set_are_private_in_a_deployment(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    data, nodes = nodes_with_shares(RunConfig.from_flat(PRIVATE).data)
    settings = {**PRIVATE, "data.dir": data.dir}
    said: list[str] = []
    with LocalDeployment(tmp_path / "trial", nodes, said.append) as trial:
        found = trial.run(RunConfig.from_flat(settings))
    assert_same(found, inline(tmp_path / "inline"))
    assert "epsilon" in "\n".join(said)


def test_sites_with_folders_of_their_own_are_refused(tmp_path: Path) -> None:
    result = invoke(
        "deploy",
        "trial",
        f"--site=a={tmp_path / 'a'}",
        f"--site=b={tmp_path / 'b'}",
        "--strategies=uniform",
        "--set=privacy.noise-multiplier=1",
        f"--output-dir={tmp_path / 'trial'}",
    )
    assert result.exit_code
    assert "test the model themselves" in " ".join(result.output.split())
