"""What an installation lacks is said at once, with what to install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command import call

import fairflower as ff
from fairflower import errors
from fairflower.errors import EXTRAS, NotInstalled, installed
from fairflower.exchanges import ClusterCenters
from fairflower.strategies import STRATEGIES, min_norm_weights


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of any extra is there."""
    monkeypatch.setattr(errors, "installed", lambda library: False)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.usefixtures("lacking")
def test_a_strategy_that_needs_more_says_so_where_it_is_made(name: str) -> None:
    rule = STRATEGIES[name]
    if not rule.extra:
        rule()
        return
    with pytest.raises(NotInstalled, match=r'cvxpy, scipy.* pip install "fairflower\[solvers\]"'):
        rule()


@pytest.mark.usefixtures("lacking")
def test_so_does_what_others_compute_with() -> None:
    for needing in (ClusterCenters, lambda: min_norm_weights([[1.0]])):
        with pytest.raises(NotInstalled, match=r"fairflower\[solvers\]"):
            needing()


@pytest.mark.usefixtures("lacking")
def test_runs_need_all_of_it() -> None:
    for name in ("run", "compare", "read"):
        with pytest.raises(ImportError, match=rf"fairflower.{name} needs torch.*fairflower\[sim\]"):
            getattr(ff, name)
    for command in (["run"], ["tune"], ["report", "."], ["list", "settings"]):
        assert 'pip install "fairflower[sim]"' in call(*command, expect=1)
    assert "fedheal" in call("list", "strategies")


@pytest.mark.slow
def test_a_project_with_torch_alone_measures_and_trains() -> None:
    """Whatever else of the extras is missing; without torch, tests/deploy/test_light.py looks."""
    code = f"""
import sys
for library in {[library for library in EXTRAS["sim"] if library != "torch"]}:
    sys.modules[library] = None  # cannot be imported
import torch
from fairflower.clients import Trainer, fisher_diagonal
from fairflower.classic.client import NumPyTrainer
print(list(fisher_diagonal(torch.nn.Linear(2, 2), [(torch.ones(3, 2), torch.tensor([0, 1, 1]))])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['weight', 'bias']\n", done.stderr


def test_the_extras_are_those_of_the_project() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    parts = tomllib.loads(text)["project"]["optional-dependencies"]
    named = {"scikit-learn": "sklearn", "pillow": "PIL", "flwr-datasets": "flwr_datasets"}
    wanted = {
        extra: {
            named.get(name, name)
            for name in (re.split(r"[\[>=]", requirement)[0] for requirement in parts[extra])
            if name not in ("fairflower", "flwr", "numpy")
        }
        for extra in EXTRAS
    }
    assert set(EXTRAS["solvers"]) == wanted["solvers"]
    assert set(EXTRAS["export"]) == wanted["export"]
    assert set(EXTRAS["sim"]) - {"datasets"} == wanted["sim"] | wanted["solvers"]


def test_a_folder_of_a_librarys_name_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("no_such_library")
    assert not installed("nor_this")
    assert installed("numpy")
