"""The GPU benchmark program (benchmarks/cuda.py), on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairflower.registry import CLIENTS, STRATEGIES

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "cuda.py"

#: Libraries that the program does not need; `pandas` and `jinja2` are for reports.
MISSING = ("ray", "flwr_datasets", "datasets", "pandas", "matplotlib")
WITHOUT = f"import sys\nsys.modules |= dict.fromkeys({(*MISSING, 'jinja2')})\n"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the program as a module; its name differs from NVIDIA's package ``cuda``."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("cuda_benchmark", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(WITHOUT)
    command = [sys.executable, str(PROGRAM), "--device", "cpu", "--quick", *more]
    command += ["--output-dir", str(folder / "out")]
    there = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=there, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_program_runs_all_parts_without_ray_and_resumes(tmp_path: Path) -> None:
    first = call(tmp_path, "--parts", "right", "--minutes", "8")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "| fedheal with sgd        |    0.0e+00 |" in first.stdout
    assert "7 parts are left: call it again." in first.stdout
    rows = tmp_path / "out" / "cpu-quick" / "rows.jsonl"
    before = rows.read_text()

    second = call(tmp_path, "--minutes", "8")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resnet10, 32x32: inline" in second.stdout
    assert "| 2 of 2 |" in second.stdout
    assert "All parts are done." in second.stdout
    assert rows.read_text().startswith(before)
    assert [row["name"] for row in map(json.loads, rows.read_text().splitlines())].count(
        "fedheal with sgd"
    ) == 2  # started and finished
    assert rows.with_name("table.md").read_text() == second.stdout


def test_the_parts_contain_every_strategy_and_client(cuda: Any) -> None:
    from cuda_parts import items

    names = items(quick=False)["right"]
    assert {name.partition(" with ")[0] for name in names} == {*STRATEGIES}
    trained = {name.partition(" with ")[2].removesuffix(" in bf16") for name in names}
    assert trained == {*CLIENTS} - {"fedavg"}  # another name of sgd


def test_later_rows_replace_earlier_ones_and_incomplete_lines_are_skipped(
    cuda: Any, tmp_path: Path
) -> None:
    cuda.add_row(tmp_path, "right", "a", {"error": "CUDA error"})
    cuda.add_row(tmp_path, "right", "b", {"begun": True})
    cuda.add_row(tmp_path, "right", "a", {"right": True})
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"kind": "right", "na')
    rows = cuda.read_rows(tmp_path)
    assert rows == {("right", "a"): {"right": True}, ("right", "b"): {"begun": True}}
    assert cuda.is_finished(rows["right", "a"])
    assert not any(map(cuda.is_finished, (rows["right", "b"], None, {"error": "x"})))
    assert not cuda.is_finished({"rounds": 3, "unfinished": True})


@pytest.mark.nightly
def test_a_paper_run_stops_at_the_time_limit_and_resumes(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_parts import papers

    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parent))
    first = papers("digits: uniform", "cpu", tmp_path, quick=True, until=0.0)
    assert first["rounds"] == 1
    assert first["unfinished"]
    second = papers("digits: uniform", "cpu", tmp_path, quick=True, until=1e12)
    assert (second["rounds"], second["unfinished"]) == (2, False)
    assert [*second["accuracy"]] == ["mnist", "usps", "svhn", "syn"]


def test_bits_runs_every_strategy_and_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """``benchmarks/bits.py``, which shows that a change of code changes no model."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    from bits import RUNS

    assert {name.partition(":")[0] for name, _, _ in RUNS} == {*STRATEGIES}
    assert {name.partition(":")[0] for _, name, _ in RUNS} == {*CLIENTS}
