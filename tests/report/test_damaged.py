"""Damaged run folders: every reader names the file and the field, or reads the folder."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import invalid_values
import pytest
from parametrize import mark_others_nightly
from run_folders import make_run, rising

from fairflower.errors import RunFolderError, UserError
from fairflower.report import read_run, terminal_table, write_report
from fairflower.report.frames import differences_frame, history_frame, table_frame
from fairflower.report.summary import read_summary, write_summary
from fairflower.server.checkpoint import resumable_configs, resumed_config
from fairflower.server.contents import read_facts

MISSING = object()
VALUES = invalid_values.JSON_VALUES | {"missing": MISSING}

#: Names of values that represent the others.
FEW = ("missing", "null", "true", "minus one", "past doubles", "nan", "a lone surrogate")
FEW += ("a text", "an empty list", "a list", "an object")

SESSION = {"versions": {"flwr": "1.41.0"}, "machine": {"cpus": 2, "processor": "AMD EPYC"}}
RECORDS = [
    {
        "round": r,
        "client_ids": [0, 1, 2, 3],
        "weights": [0.1, 0.2, 0.3, 0.4],
        "distance": [[0.0, 1.0, 2.0, 3.0]] * 4,
        "residual": 0.5,
        "cluster": [0, 0, 1, 1],
        "map_x": [0.0, 0.1, 1.0, 1.1],
        "map_y": [0.0, 0.1, 1.0, 1.1],
        "consistency_histogram": [[0.1] * 10] * 4,
        "dropped": {"3": "late"},
        "dropped_in_test": {"2": "late"},
    }
    for r in (1, 2)
]


def write_run_folder(folder: Path) -> Path:
    return make_run(
        folder,
        rising(0.5, rounds=3),
        clients={2: [0.5, 0.6, 0.7, 0.8]},
        personal=[{"a": 0.5, "b": 0.6}],
        diagnostics=RECORDS,
        config="[observe]\nwindow = 1\n",
        status="stopped",
        path="/runs/a",
        run_id="0123456789abcdef" * 2,
        test_sizes=[100, 100],
        classes=["cat", "dog"],
        sources=["/data/a.npz", "/data/b.npz"],
        shape=[3, 8, 8],
        num_classes=2,
        images="ab",
        digest="ab",
        nodes={"0": 2**63},
        sites={"federation": {"name": "x"}, "numbered": True},
        resumed=[{**SESSION, "after_round": 1, "at": "2026-01-01"}],
        ended_early="no loss below 0.5",
        diverged=12.5,
        client_state=True,
        tracked={"mlflow": "x"},
        untracked={"2": "no route"},
        privacy={
            "epsilon": 1.5,
            "delta": 1e-5,
            "rounds": 2,
            "numbers": 1,
            "noise_multiplier": 4.0,
            "number_noise_multiplier": 8.0,
            "clip": 0.5,
            "noise": "secret",
        },
    )


def use(folder: Path) -> None:
    """Call every reader of a run folder."""
    run = read_run(folder)
    terminal_table([run, run])
    for frame in (history_frame, table_frame, differences_frame):
        frame([run])
    write_summary([run], folder / "summary.csv")
    read_summary(folder / "summary.csv")
    write_report([run], folder / "report")


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no figures, which take most of their time."""
    monkeypatch.setattr("fairflower.report.figures.comparison.draw", lambda *_: [])


def refused(call: Callable[[Path], object], folder: Path) -> str:
    """Return a reader's error about a folder, or an empty text without an error."""
    try:
        call(folder)
    except RunFolderError as error:
        return str(error).encode()[:2000].decode()
    except UserError:  # about the contents that were read
        return ""
    return ""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field, and of the first element of every list, in JSON."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def replaced(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return None if value is MISSING else value
    whole = copy.deepcopy(whole)
    at = whole
    for key in path[:-1]:
        at = at[key]
    if value is MISSING:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return whole


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run_folder(tmp_path / "run")


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", mark_others_nightly([(n,) for n in VALUES], [(n,) for n in FEW]))
def test_invalid_fields_of_run_json_raise_only_user_errors(
    name: str, folder: Path, pytestconfig: pytest.Config
) -> None:
    """A value replaces every third field, the next value the fields after them; at night, all."""
    file = folder / "run.json"
    whole = json.loads(file.read_text())
    first, step = (0, 1) if pytestconfig.getoption("--nightly") else (FEW.index(name) % 3, 3)
    wrong = 0
    for path in [*places(whole)][first::step]:
        file.write_text(json.dumps(replaced(whole, path, VALUES[name])))
        wrong += bool(refused(use, folder))
        refused(lambda folder: resumed_config(folder, {}), folder)
        resumable_configs(folder.parent)
    file.write_text(json.dumps(whole))
    assert not refused(use, folder)
    assert wrong >= (20 if name == "missing" else 40) / (step + 1)


def test_an_invalid_value_in_run_json_is_reported_with_its_field(folder: Path) -> None:
    file = folder / "run.json"
    whole = json.loads(file.read_text())
    wrong = 0
    for name, path in product(FEW, places(whole)):
        file.write_text(json.dumps(replaced(whole, path, VALUES[name])))
        text = refused(read_facts, folder)
        wrong += bool(text)
        if text:
            assert text.startswith(str(file))
            after = text.removeprefix(str(file))
            fields = [key for key in path if isinstance(key, str)]
            assert not path or fields[-1] in after or "of the domains" in after, (path, text)
    assert wrong > 550


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", mark_others_nightly([(n,) for n in VALUES], [(n,) for n in FEW]))
def test_invalid_fields_of_diagnostics_are_accepted_or_reported_with_their_line(
    name: str, folder: Path
) -> None:
    file = folder / "diagnostics.jsonl"
    wrong = 0
    for path in places(RECORDS[1]):
        line = json.dumps(replaced(RECORDS[1], path, VALUES[name]))
        file.write_text(f"{json.dumps(RECORDS[0])}\n{line}\n")
        text = refused(use, folder)
        assert not text or f"{file}, line 2" in text
        wrong += bool(text)
    assert wrong >= (2 if name == "missing" else 6)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", VALUES)
def test_invalid_fields_of_diagnostics_are_drawn_or_refused(name: str, folder: Path) -> None:
    file = folder / "diagnostics.jsonl"
    for field in RECORDS[1]:
        line = json.dumps(replaced(RECORDS[1], (field,), VALUES[name]))
        file.write_text(f"{json.dumps(RECORDS[0])}\n{line}\n")
        refused(lambda folder: write_report([read_run(folder)], folder / "report"), folder)


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize("line", [2, 5, -1])
def test_invalid_cells_of_the_history_are_accepted_or_reported_with_their_line(
    line: int, column: int, folder: Path
) -> None:
    file = folder / "history.csv"
    lines = file.read_text().splitlines()
    wrong = 0
    values = ("", "x.075", "1_0", " 1 ", "-1", "9" * 5000, "1e999", "nan", "\0", '"', "x" * 200_000)
    for value in (*values, "a,b", "1.5", "inf", "-inf", "accuracy", "domain", "run", "\u2028"):
        cells = lines[line].split(",")
        cells[column] = value
        file.write_text("\n".join([*lines[:line], ",".join(cells), *lines[line:]]) + "\n")
        text = refused(use, folder)
        assert not text or f"{file}, line" in text or "no round" in text
        wrong += bool(text)
    assert wrong >= {0: 19, 4: 12}.get(column, 3)


#: Setting -> how many of nine values are refused.
SETTINGS = {
    **dict.fromkeys(("seed", "num-server-rounds", "observe.window", "strategy.name"), 8),
    **dict.fromkeys(("data.dir", "data.name", "train.lr", "evaluate.test"), 7),
    **dict.fromkeys(("strategy.tau", "no.such"), 3),
}


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("key", SETTINGS)
def test_invalid_settings_in_config_toml_are_accepted_or_reported_with_their_file(
    key: str, folder: Path
) -> None:
    others = "" if key == "strategy.name" else 'strategy.name = "fedheal"\n'
    wrong = 0
    for value in (
        "true",
        "-1",
        "0.5",
        "nan",
        f"1{'0' * 400}",
        "'x'",
        '"a\\u0000"',
        "[]",
        "{a = 1}",
    ):
        (folder / "config.toml").write_text(f"{others}{key} = {value}\n")
        text = refused(use, folder)
        assert not text or f"{folder}/config.toml" in text
        wrong += bool(text)
        refused(lambda folder: resumed_config(folder, {}), folder)
    assert wrong >= SETTINGS[key]


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", ["run.json", "config.toml", "history.csv", "diagnostics.jsonl"])
def test_damaged_files_and_named_pipes_are_reported(name: str, folder: Path) -> None:
    whole = (folder / name).read_bytes()
    wrong = 0
    for content in (b"", b"\xff\xfe", b"\0" * 99, b"[" * 9000, whole[: len(whole) // 2], whole[9:]):
        (folder / name).write_bytes(content)
        text = refused(use, folder)
        assert not text or str(folder) in text
        wrong += bool(text)
    assert wrong >= (2 if name == "diagnostics.jsonl" else 5)
    (folder / name).unlink()
    os.mkfifo(folder / name)  # a pipe without a writer
    assert name in refused(use, folder)
    refused(lambda folder: resumed_config(folder, {}), folder)
    assert name != "run.json" or "not a regular file" in refused(read_facts, folder)
