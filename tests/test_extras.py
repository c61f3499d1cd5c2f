"""Missing libraries are reported at once, with the extra to install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command import call
from processes import environment

import fairflower as ff
from fairflower import errors
from fairflower.config import RunConfig
from fairflower.errors import EXTRAS, NotInstalled, installed
from fairflower.exchanges import ClusterCenters
from fairflower.plans import execution, plan
from fairflower.plans.execution import auto_jobs
from fairflower.strategies import STRATEGIES, min_norm_weights


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that no library of any extra is installed."""
    monkeypatch.setattr(errors, "installed", lambda library: False)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.usefixtures("lacking")
def test_strategies_report_their_missing_extra_when_constructed(name: str) -> None:
    rule = STRATEGIES[name]
    if not rule.extra:
        rule()
        return
    with pytest.raises(NotInstalled, match=r'cvxpy, scipy.* pip install "fairflower\[solvers\]"'):
        rule()


@pytest.mark.usefixtures("lacking")
def test_exchanges_and_solvers_report_their_missing_extra() -> None:
    for needing in (ClusterCenters, lambda: min_norm_weights([[1.0]])):
        with pytest.raises(NotInstalled, match=r"fairflower\[solvers\]"):
            needing()


@pytest.mark.usefixtures("lacking")
def test_runs_and_reports_report_the_missing_extra_train() -> None:
    for name in ("run", "compare", "read"):
        with pytest.raises(
            ImportError, match=rf"fairflower.{name} needs torch.*fairflower\[train\]"
        ):
            getattr(ff, name)
    for command in (["run"], ["tune"], ["report", "."], ["list", "settings"]):
        assert 'pip install "fairflower[train]"' in call(*command, expect=1)
    assert "fedheal" in call("list", "strategies")


#: What `fairflower[sim]` has and `fairflower[train]` lacks.
BEYOND_TRAINING = ("ray", "datasets", "flwr_datasets")


@pytest.mark.nightly
def test_without_ray_runs_use_the_inline_engine_and_say_so(tmp_path: Path) -> None:
    """A run, a comparison and a report in a process that can import none of `BEYOND_TRAINING`."""
    code = f"""
import sys
for library in {BEYOND_TRAINING}:
    sys.modules[library] = None  # cannot be imported
from fairflower.cli import app
small = ["data.clients-per-domain=1", "data.examples-per-client=20", "train.local-epochs=1"]
runs = ["--rounds=2", "--output-dir=runs", *(f"--set={{key}}" for key in small)]
compared = ["--strategies=fedavg", "--federations=0", "--jobs=1"]
for call in (["run", *runs], ["compare", *runs, *compared], ["report", "runs"]):
    app(call, standalone_mode=False)
"""
    command = [sys.executable, "-c", code]
    home = {"env": environment(tmp_path), "cwd": tmp_path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **home)
    assert done.returncode == 0, done.stdout + done.stderr
    message = "engine    inline, one client at a time, because Ray is not installed"
    assert done.stdout.count(message) == 2
    assert 'For parallel clients: pip install "fairflower[sim]"' in done.stdout
    assert len(list(tmp_path.glob("runs/**/model.safetensors"))) == 3
    assert (tmp_path / "runs" / "report" / "index.html").exists()


@pytest.fixture
def training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that only the libraries of `fairflower[train]` are installed."""
    for module in (errors, execution):
        monkeypatch.setattr(module, "installed", lambda library: library not in BEYOND_TRAINING)


@pytest.mark.usefixtures("training_alone")
@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (["run", "--engine=ray"], "engine = 'ray' needs ray."),
        (["compare", "--engine=flower"], "engine = 'flower' needs ray."),
        (["run", "--ray-address=auto"], "ray-address = 'auto' needs ray."),
        (["run", "--data=cifar10"], "uoft-cs/cifar10 on the Hugging Face Hub needs flwr_datasets"),
        (["run", "--data=femnist"], "needs flwr_datasets, datasets."),
    ],
)
def test_features_report_the_library_that_they_need(
    command: list[str], needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAIRFLOWER_DATA", raising=False)
    output = call(*command, expect=1)
    assert needs in output
    assert 'Run: pip install "fairflower[sim]"' in output


@pytest.mark.usefixtures("training_alone")
def test_engine_auto_is_ray_if_installed_and_else_inline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RunConfig(workers=2)
    engine, line = execution.chosen_engine(config)
    assert engine == "inline"
    assert "because Ray is not installed" in line
    assert line.endswith("; workers = 2 has no effect")
    inline = RunConfig(engine="inline")
    assert execution.chosen_engine(inline) == ("inline", "")
    line = execution.chosen_engine(RunConfig(engine="inline", workers=4))[1]
    assert line == "inline, one client at a time; workers = 4 has no effect"
    monkeypatch.setattr(execution, "installed", lambda library: True)
    assert execution.chosen_engine(config) == ("ray", "")
    assert execution.chosen_engine(inline) == ("inline", "")


@pytest.mark.usefixtures("training_alone")
def test_a_few_runs_are_parallel_jobs_only_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "cpus", lambda: 4)
    monkeypatch.setattr(execution, "installed", lambda library: False)
    assert [auto_jobs(plan.Plan([RunConfig()] * count)) for count in (1, 3, 9)] == [
        1,
        3,
        4,
    ]
    monkeypatch.setattr(execution, "installed", lambda library: True)
    assert [auto_jobs(plan.Plan([RunConfig()] * count)) for count in (1, 3, 9)] == [
        1,
        1,
        4,
    ]
    studies = [auto_jobs(plan.Plan([RunConfig()]), count) for count in (0, 1, 3, 9)]
    assert studies == [1, 1, 3, 4], "their runs are inline anyway"


@pytest.mark.slow
def test_training_and_measuring_need_no_library_but_torch_without_its_compiler() -> None:
    """All other libraries are missing; tests/deploy/test_light.py tests without torch.

    Importing torch's compiler would take a second in every process.
    """
    code = f"""
import sys
for library in {[library for library in EXTRAS["sim"] if library != "torch"]}:
    sys.modules[library] = None  # cannot be imported
import torch
from fairflower.config import TrainConfig
from fairflower.training.trainer import build_optimizer
for name in ("sgd", "adam", "adamw"):
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([weights], TrainConfig(optimizer=name))
    weights.sum().backward()
    optimizer.step()
print("torch._dynamo" in sys.modules)
from fairflower.clients import Trainer, fisher_diagonal
from fairflower.classic.client import NumPyTrainer
print(list(fisher_diagonal(torch.nn.Linear(2, 2), [(torch.ones(3, 2), torch.tensor([0, 1, 1]))])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n['weight', 'bias']\n", done.stderr


def test_the_extras_match_pyproject() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    parts = tomllib.loads(text)["project"]["optional-dependencies"]
    named = {"scikit-learn": "sklearn", "pillow": "PIL", "flwr-datasets": "flwr_datasets"}
    expected = {
        extra: {
            named.get(name, name)
            for name in (re.split(r"[\[>=]", requirement)[0] for requirement in parts[extra])
            if name not in ("fairflower", "flwr", "numpy")
        }
        for extra in EXTRAS
    }
    assert set(EXTRAS["solvers"]) == expected["solvers"]
    assert set(EXTRAS["export"]) == expected["export"]
    assert set(EXTRAS["train"]) == expected["train"] | expected["solvers"]
    assert set(EXTRAS["sim"]) - {"datasets"} == expected["sim"] | set(EXTRAS["train"])


def test_a_folder_with_a_librarys_name_does_not_count_as_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("no_such_library")
    assert not installed("nor_this")
    assert installed("numpy")
