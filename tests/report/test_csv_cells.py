"""CSV files that spreadsheets open: names of sites and users are no formulas."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from rich.console import Console

from experiments.landscape import Landscape, Surface
from experiments.leaderboard.ledger import Ledger, Row
from experiments.sharpness import ClientSharpness, write_csv
from fairflower.client_app import app
from fairflower.config import RunConfig
from fairflower.engines.inline import InlineGrid
from fairflower.files import cell_of, text_of
from fairflower.report import read_run
from fairflower.report.frames import csv_table
from fairflower.report.summary import read_summary, write_summary
from fairflower.server.session import Session

#: Names that spreadsheets evaluate, or that look as if they had been escaped.
NAMES = ('=HYPERLINK("http://x.example")', "+1+1", "-2-cmd|' /C calc'!A0", "@SUM(1)", "'=1", "''+x")
NAMES += ("\n=1", "\uff1d1", "\uff0b1+1", "\uff0d2-a", "\uff20SUM(1)")  # full-width signs, too


def cells(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [cell for row in csv.reader(file) for cell in row]


def evaluated(path: Path) -> list[str]:
    """Return the cells that a spreadsheet would evaluate, except numbers."""

    def number(cell: str) -> bool:
        try:
            return bool([float(part) for part in cell.split(" ")])
        except ValueError:
            return False

    return [
        cell
        for cell in cells(path)
        if cell[:1] in {*"=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"} and not number(cell)
    ]


@pytest.mark.parametrize("text", [*NAMES, "\t=1", "plain", "", "'", "- 0.1", "-1", "-0.5 nan 1e-3"])
def test_what_is_written_is_read_again(text: str) -> None:
    assert text_of(cell_of(text)) == text


def test_numbers_remain_numbers() -> None:
    for value in (-1, -0.5, "-1", "-0.5 1e-3", "+3", "nan", None):
        assert cell_of(value) is value


def test_names_of_sites_are_no_formulas_in_any_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (24, 8, 8), np.uint8), np.arange(24) % 3
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    there = InlineGrid(app, len(NAMES))
    for context, name in zip(there.contexts.values(), NAMES, strict=True):
        context.node_config = {"domain": name, "data-dir": str(tmp_path)}
        context.state = RecordDict()
    settings: dict[str, Any] = {"data.name": "npz", "evaluate.by": "clients"}
    settings |= {"num-server-rounds": 1, "train.local-epochs": 1, "output-dir": str(tmp_path / "r")}
    folder = Session(there, RunConfig.from_flat(settings), Console(quiet=True)).run()
    assert evaluated(folder / "history.csv") == []
    run = read_run(folder)
    assert set(run.domains) == set(NAMES)
    assert np.isfinite(run.values).all()

    write_summary([run], tmp_path / "summary.csv")
    assert evaluated(tmp_path / "summary.csv") == []
    (again,) = read_summary(tmp_path / "summary.csv")
    assert again.domains == run.domains
    assert np.allclose(again.values[-1], run.values[-1])

    (tmp_path / "table.csv").write_text(csv_table([run, replace(run, label="=1+1")]))
    assert evaluated(tmp_path / "table.csv") == []


def test_other_files_for_spreadsheets_have_no_formulas(tmp_path: Path) -> None:
    steps, loss = np.linspace(-1, 1, 3), np.zeros((3, 3))
    surfaces = tuple(Surface(name, "train", 5, loss) for name in NAMES)
    Landscape("=1", steps, surfaces).write_csv(tmp_path / "landscape.csv")
    assert evaluated(tmp_path / "landscape.csv") == []
    sharp = ClientSharpness("=1", 0, {name: np.ones(2) for name in NAMES})
    write_csv([sharp], tmp_path / "sharpness.csv")
    assert evaluated(tmp_path / "sharpness.csv") == []


def test_a_ledger_has_no_formulas(tmp_path: Path) -> None:
    row = Row(
        *("sweep", "=1", "@x", 0, "-a=1", "-2-x", "0.5", "0.5", "completed", "+y", "=z", 1.0),
        *("data", "key"),
    )
    Ledger(tmp_path / "results.csv").add(row)
    assert evaluated(tmp_path / "results.csv") == []
    assert Ledger(tmp_path / "results.csv").rows == {"key": row}
