"""The participation table: how often each domain's clients took part, beside its accuracy."""

from __future__ import annotations

from pathlib import Path

from resuming import config, session
from run_folders import tables_of

from fairflower.report import read_run


def test_the_participation_table_matches_the_availability_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("round,client\n1,0\n1,1\n2,0\n3,0\n3,2\n")
    settings = {"participation.availability": str(file), "fraction-train": 1.0}
    folder = session(config(tmp_path, **settings)).run()
    row = tables_of(folder).table("Participation")["fedheal federation 0"]
    assert [row[key] for key in row if key.endswith(": rounds")] == [
        *("100.00", "33.33", "33.33", "0.00")
    ]
    actual = [f"{100 * value:.2f}" for value in read_run(folder).final()]
    assert [row[key] for key in row if key.endswith(": accuracy")] == actual


def test_a_run_without_absences_has_no_participation_table(tmp_path: Path) -> None:
    folder = session(config(tmp_path, **{"fraction-train": 1.0})).run()
    assert "Participation" not in tables_of(folder).text
