"""`pip install "fairflower[train]"`: comparisons, reports and runs without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environments import built_wheel, environment_with
from processes import environment, run

pytestmark = pytest.mark.slow

SMALL = ["--rounds=1", "--set=data.clients-per-domain=1", "--set=train.local-epochs=1"]
BEYOND_TRAINING = ("ray", "datasets", "flwr_datasets")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` folder of an environment with the wheel and only the extra `[train]`."""
    wheel = built_wheel(tmp_path_factory)
    return environment_with(tmp_path_factory.mktemp("train"), f"{wheel}[train]")


@pytest.mark.nightly
def test_compare_and_run_work_without_the_sim_extra(scripts: Path, tmp_path: Path) -> None:
    env = environment(tmp_path, PATH=str(scripts), FAIRFLOWER_DATA="")

    def fairflower(*arguments: str, expect: int = 0) -> str:
        command = [scripts / "fairflower", *arguments]
        return run(command, env=env, cwd=tmp_path, expect=expect)

    code = f"from fairflower.errors import installed; print(*map(installed, {BEYOND_TRAINING}))"
    python = [scripts / "python", "-c", code]
    assert run(python, env=env, cwd=tmp_path).split() == ["False"] * len(BEYOND_TRAINING)

    compared = fairflower(
        "compare", "--engine=inline", "--federations=0-1", *SMALL, "--output-dir=compared"
    )
    assert "Accuracy per domain" in compared
    all_facts = [json.loads(path.read_text()) for path in tmp_path.glob("compared/**/run.json")]
    assert sorted(facts["label"] for facts in all_facts) == [
        *("fedavg", "fedavg", "fedheal", "fedheal", "uniform", "uniform")
    ]
    assert {facts["status"] for facts in all_facts} == {"completed"}
    assert "</html>" in (tmp_path / "compared/report/index.html").read_text("utf-8")

    output = fairflower("run", "--strategy=fedheal", *SMALL, "--output-dir=made")
    assert "engine    inline, one client at a time, because Ray is not installed" in output
    refused = fairflower("run", "--engine=ray", expect=1)
    assert 'Run: pip install "fairflower[sim]"' in refused
