"""The oldest and the newest version of Flower that pyproject.toml allows."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from processes import ROOT, environment, run

import fairflower

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def canonical(name: str) -> str:
    """Return the name of a distribution as `uv` writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def flower_requirement() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [d for d in project["dependencies"] if d.startswith("flwr>")]
    return requirement.replace("flwr", "flwr[simulation]")


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_both_engines_agree_with_the_oldest_and_the_newest_flower(resolution: str, tmp_path: Path):
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    here = {canonical(d.name): d.version for d in distributions()}
    env = environment(tmp_path)
    uv = [sys.executable, "-m", "uv"]
    run([*uv, "venv", "--python", sys.executable, venv], env=env, cwd=tmp_path)
    install = ["pip", "install", "--python", python, "--resolution", resolution]
    run([*uv, *install, flower_requirement()], env=env, cwd=tmp_path)
    listed = run([*uv, "pip", "list", "--python", python, "--format", "json", "--quiet"], env=env)
    if all(here.get(canonical(p["name"])) == p["version"] for p in json.loads(listed)):
        pytest.skip("these are the versions that all other tests run with")
    # The new environment has Flower and its dependencies; all other packages come from this one.
    behind = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    places = [str(Path(fairflower.__file__).parents[1]), *sorted(behind)]
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run([python, "-c", query], env=env).strip())
    (packages / "behind.pth").write_text("\n".join(places) + "\n")

    settings = ["num-server-rounds=2", "data.clients-per-domain=1", "train.local-epochs=1"]
    for engine in ("inline", "ray"):
        pairs = [*settings, f"engine={engine}", f"run-name={engine}", f"output-dir={tmp_path}"]
        command = [python, "-m", "fairflower.cli", "run", *(f"--set={pair}" for pair in pairs)]
        run(command, env=env, cwd=tmp_path)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("inline", "ray")]
    assert models[0] == models[1]

    used = json.loads((tmp_path / "ray" / "run.json").read_text())["versions"]["flwr"]
    if resolution == "lowest-direct":
        assert f"{used}.".startswith(flower_requirement().partition(">=")[2] + ".")
