"""Differential privacy in a deployment of real processes equals that of an inline run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import invoke
from runs import SMALL

import fairflower as ff
from fairflower.config import RunConfig
from fairflower.deploy.local import LocalDeployment, nodes_of

#: TERM asks clients for a number, to which they add noise. A seed makes all noise reproducible.
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
    """Make the same run in this process; return its folder."""
    return ff.run(PRIVATE, output_dir=folder, progress=False).path


def assert_same(actual: Path, expected: Path) -> None:
    """Check that model, noised numbers and epsilon are the same."""
    models = [(run / "model.safetensors").read_bytes() for run in (actual, expected)]
    assert models[0] == models[1]
    privacy, losses = [], []
    for run in (actual, expected):
        facts = json.loads((run / "run.json").read_text())
        assert facts["status"] == "completed"
        privacy.append(facts["privacy"])
        lines = (run / "history.csv").read_text().splitlines()
        losses.append([line for line in lines if ",received_loss," in line])
        assert "train_loss" not in "".join(lines)
    assert privacy[0] == privacy[1]
    assert privacy[0]["epsilon"] > 0
    assert privacy[0]["rounds"] == 2
    assert losses[0]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_private_deployment_equals_an_inline_run(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    data, nodes = nodes_of(RunConfig.from_flat(PRIVATE).data, None, None)
    settings = {**PRIVATE, "data.dir": data.dir}
    messages: list[str] = []
    with LocalDeployment(tmp_path / "trial", nodes, messages.append) as trial:
        actual = trial.run(RunConfig.from_flat(settings))
    assert_same(actual, inline(tmp_path / "inline"))
    assert "epsilon" in "\n".join(messages)


def test_privacy_is_refused_for_sites_with_their_own_folders(tmp_path: Path) -> None:
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
