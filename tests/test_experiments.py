"""The experiments: their commands are valid; all tables and figures of the papers are listed."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command import BOARD, COMMAND, LANDSCAPE, SHARPNESS
from experiment_files import FOLDER, run_configs

import fairflower.data
from experiments import landscape, sharpness
from fairflower.cli import report, run
from fairflower.config import RunConfig
from fairflower.config.text import read_toml
from fairflower.plans import execution

CONFIGS = run_configs()
INDEX = (FOLDER / "README.md").read_text()

#: Last numbers of the papers' tables and figures, appendices included.
PAPERS = {
    "FedHEAL": {"Table": 5, "Figure": 7},
    "FedISM": {"Table": 8, "Figure": 7},
    "FedGCR": {"Table": 5, "Figure": 2},
    "FedEquilibria": {"Table": 5, "Figure": 8},
}


def header(path: Path) -> str:
    """Return the comment at the beginning of a config."""
    lines = path.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    begins = ("fairflower ", "python -m experiments.")
    return [" ".join(line.split()) for line in lines if line.strip().startswith(begins)]


PROGRAMS = {
    "fairflower": COMMAND,
    "python -m experiments.landscape": LANDSCAPE,
    "python -m experiments.leaderboard": BOARD,
    "python -m experiments.sharpness": SHARPNESS,
}
COMMANDS = list(dict.fromkeys(c for text in (INDEX, *map(header, CONFIGS)) for c in commands(text)))


#: Cache: what each command began with.
BEGUN: dict[str, Any] = {}


class Begun(Exception):
    """Raised, with a command's input, when the command has read its arguments."""


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function from a command to its plan, its paths, or the data that it shows."""
    monkeypatch.chdir(FOLDER.parent)
    monkeypatch.setattr(execution, "remaining_plan", lambda plan, folder, console: plan)
    monkeypatch.setattr(execution, "locked_folder", lambda folder: nullcontext())

    def stop(what: Any, *_: Any, **__: Any) -> None:
        raise Begun(what)

    for module in (execution, run):
        monkeypatch.setattr(module, "execute", stop)
    for module in (report, landscape, sharpness):
        monkeypatch.setattr(module, "run_folders", stop)
    monkeypatch.setattr(fairflower.data, "prepare", stop)

    def call(command: str) -> Any:
        if command not in BEGUN:
            text = re.sub(r"[][]", "", command).replace("<folder>", "data")
            name = next(name for name in PROGRAMS if text.startswith(name))
            with pytest.raises(Begun) as begun:
                PROGRAMS[name].main(shlex.split(text.removeprefix(name)), standalone_mode=False)
            BEGUN[command] = begun.value.args[0]
        return BEGUN[command]

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_every_documented_command_is_valid(command: str, begin: Callable[[str], Any]) -> None:
    assert "..." not in command
    assert begin(command)


def test_analyzed_folders_are_made_by_documented_comparisons(begin: Callable[[str], Any]) -> None:
    run_folders = [
        f"{run.output_dir}/{run.run_name}/".removeprefix(f"{FOLDER.parent}/")
        for command in COMMANDS
        if command.startswith("fairflower compare") and "--output-dir" in command
        for run in begin(command).runs
    ]
    for command in COMMANDS:
        if "sharpness" in command or "landscape" in command:
            for path in (word for word in command.split() if "/" in word):
                assert any(run.startswith(f"{path}/") for run in run_folders), path


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_of_a_paper_is_listed(paper: str) -> None:
    (section,) = re.findall(rf"^## {paper} .*?(?=^## |\Z)", INDEX, re.DOTALL | re.MULTILINE)
    left_out = re.findall(r"Not made: (.*?)\.", section, re.DOTALL)
    headings = re.findall(r"^### (.*?):", section, re.MULTILINE)
    listed = Counter(re.findall(r"(?:Table|Figure) \d+", " ".join([*left_out, *headings])))
    assert listed == Counter(
        f"{kind} {n}" for kind, last in PAPERS[paper].items() for n in range(1, last + 1)
    )
    for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
        assert commands(part), part


@pytest.mark.parametrize("data", ["digits", "office"])
def test_the_command_of_table_2_is_that_of_its_page(data: str) -> None:
    name = f"fedheal-table2-{data}-cpu"
    made, _ = commands((FOLDER / f"{name}.md").read_text())
    assert made in commands(INDEX)
    assert f"{name}.toml" in made


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_in_the_index(path: Path) -> None:
    assert path.name in INDEX
    measured = path.with_suffix(".md")
    assert not measured.exists() or f"({measured.name})" in INDEX


def settings(path: Path) -> dict[str, Any]:
    return RunConfig.from_flat(read_toml(path)).to_flat()


#: Config -> the config from which it differs by what its header says.
LIKE = {
    path: FOLDER / match[1]
    for path in CONFIGS
    if (match := re.search(r"(?:Everything else as|settings of)\s+(\S+\.toml)", header(path)))
}


def test_some_configs_refer_to_others() -> None:
    assert len(LIKE) >= 4


@pytest.mark.parametrize("path", LIKE, ids=lambda path: path.name)
def test_headers_state_the_differences_from_another_config(path: Path) -> None:
    text = " ".join(header(path).split())
    other, own = settings(LIKE[path]), settings(path)
    for key in own:
        if own[key] != other[key] and "default" not in (own[key], other[key]):
            assert re.search(rf"(?<![\w.]){re.escape(str(own[key]))}(?!\d)", text), key


#: Configs with the settings of a paper.
PAPERS_OWN = [path for path in CONFIGS if "as in the paper" in header(path)]


def test_some_configs_have_the_settings_of_a_paper() -> None:
    assert len(PAPERS_OWN) >= 10


@pytest.mark.parametrize("path", PAPERS_OWN, ids=lambda path: path.name)
def test_configs_as_in_the_paper_have_the_papers_settings(path: Path) -> None:
    """FedEquilibria's Eq. 1 has unscaled Fisher diagonals; FedISM's ResNet-18 is pretrained."""
    own = settings(path)
    assert own["strategy.name"] != "fedequilibria" or own["strategy.scale"] == "none"
    assert own["strategy.name"] != "fedgcr" or own["strategy.variant"] == "paper"
    assert own["model.name"] != "resnet18" or own["model.weights"] == "imagenet"
