"""The programs in examples/ work."""

from __future__ import annotations

import csv
import json
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from command import call
from experiment_files import FOLDER
from safetensors.numpy import load_file

from fairflower.config import RunConfig
from fairflower.engines.launch import simulate
from fairflower.report import read_run

ROOT = FOLDER.parent
NOTEBOOK = ROOT / "examples/compare.ipynb"
LORA = ROOT / "examples/lora"


def outputs(cell: Any, kind: str) -> str:
    """Return a cell's outputs of one MIME type as one text."""
    return "".join(
        output["data"][kind] for output in cell.outputs if kind in output.get("data", {})
    )


def test_the_notebook_installs_from_its_clone_or_from_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    source = next("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code")
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda words, **_: commands.append(words))
    exec(source, {})
    assert not commands  # it is installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(NOTEBOOK.parent)
    exec(source, {})
    monkeypatch.chdir(tmp_path)
    exec(source.replace('ADDRESS = ""', 'ADDRESS = "git+https://example.org/x"'), {})
    assert [words[-1] for words in commands] == [
        f"{ROOT}[train]",
        "fairflower[train] @ git+https://example.org/x",
    ]
    with pytest.raises(RuntimeError, match="set ADDRESS"):
        exec(source, {})


@pytest.mark.nightly
@pytest.mark.slow
def test_the_notebook_shows_runs_tables_and_figures(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4), resources={"metadata": {"path": str(tmp_path)}}
    )
    by_source = {cell.source: cell for cell in client.execute().cells if cell.cell_type == "code"}

    def cell(start: str) -> Any:
        return next(cell for source, cell in by_source.items() if start in source)

    printed = [o.get("text", "") for o in cell("on_round").outputs if o.get("name") == "stdout"]
    assert "\rround   4/4" in "".join(printed)
    page = outputs(cell("ff.compare("), "text/html")
    assert page.count("<tbody>") == 1
    assert "fedprox+fedheal" in page
    assert "3 seeds" in page
    assert outputs(cell("results.plot"), "image/png")
    assert "<table" in outputs(cell("results.table"), "text/html")
    assert "fedprox+uniform" in outputs(cell("groupby"), "text/html")
    assert not any(
        output.get("name") == "stderr" for cell in by_source.values() for output in cell.outputs
    )


def test_the_lora_example_has_1000_sentences_per_domain() -> None:
    for domain in ("films", "products", "restaurants"):
        with (LORA / f"texts/{domain}.csv").open(encoding="utf-8", newline="") as file:
            labels = [row["label"] for row in csv.DictReader(file)]
        assert [labels.count(name) for name in ("negative", "positive")] == [500, 500]


@pytest.mark.slow
def test_the_command_of_the_lora_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    """The command of its config, for one round of one seed with a few of the texts."""
    pytest.importorskip("peft", reason="needs fairflower[hf]")
    pytest.importorskip("transformers", reason="needs fairflower[hf]")
    header = (LORA / "lora.toml").read_text().split("\n\n")[0].replace("#", "")
    (line,) = re.findall(r"fairflower compare .*", header.replace("\\\n", " "))
    assert (
        line.split()
        == re.findall(r"fairflower compare .*", (LORA / "README.md").read_text())[0].split()
    )
    small = "--seeds 0 --rounds 1 --set data.fraction=0.02 --set data.test-examples=5"
    words = shlex.split(line.replace("--seeds 0-2", small))
    monkeypatch.chdir(ROOT)
    call(*words[1:], "--engine", "inline", "--output-dir", str(tmp_path))
    runs = {read_run(path).label: path for path in (tmp_path / "runs").iterdir()}
    assert runs.keys() == {"fedavg", "uniform", "fedheal", "fedism"}
    for path in runs.values():
        arrays = load_file(path / "model.safetensors")
        assert sum(array.size for array in arrays.values()) == 20_866
        assert any("lora_" in name for name in arrays)
        assert len(read_run(path).clients) == 12


def test_the_one_strategy_app_improves_its_worst_client(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `flwr run` does it, but fewer rounds, and one client after another in this process."""
    app = ROOT / "examples/one-strategy"
    monkeypatch.syspath_prepend(str(app))
    settings = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    server, client = (
        import_module(f"one_strategy.{name}_app").app for name in ("server", "client")
    )
    assert settings["components"] == {
        f"{name}app": f"one_strategy.{name}_app:app" for name in ("server", "client")
    }
    metrics = []
    strategy = import_module("one_strategy.server_app").FedHEAL
    aggregate = strategy.aggregate_evaluate

    def noted(self: Any, *args: Any) -> Any:
        metrics.append(aggregate(self, *args))
        return metrics[-1]

    monkeypatch.setattr(strategy, "aggregate_evaluate", noted)
    shorter = {**settings["config"], "num-server-rounds": 5}
    simulate(server, client, 8, RunConfig(engine="inline"), run_config=shorter)
    assert len(metrics) == 5
    assert metrics[-1]["worst-accuracy"] > metrics[0]["worst-accuracy"] + 0.1
