"""Labels, intervals and verdicts follow what was drawn, and not how the runs were asked for."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import constant, make_run
from scipy import stats

from fairflower.report import analyze, read_run, read_summary, write_report, write_summary
from fairflower.report.analysis import Analysis
from fairflower.report.cells import GUIDE
from fairflower.report.pages import latex, markdown_tables

GAINS = (0.03, 0.05, 0.04, 0.06, 0.035, 0.045)


def runs(folder: Path, divisions: list[str], **redraw: float) -> list[Path]:
    """FedAvg and FedHEAL on federations 0, 1, ...; ``divisions`` are what was drawn for each."""
    made = []
    for seed, division in enumerate(divisions):
        facts: dict[str, Any] = {"division": division, "redraw": redraw} if division else {}
        if "train" not in redraw:
            facts = {"redraw": redraw}
        for label, gain in (("fedavg", 0.0), ("fedheal", GAINS[seed])):
            accuracies = constant(a=0.8, b=0.7 + gain)
            config = f"[data]\nseed = {seed}\n"
            run = make_run(folder / f"{label}-{seed}", accuracies, label=label, seed=seed, **facts)
            text = (run / "config.toml").read_text("utf-8")
            (run / "config.toml").write_text(text.replace("[data]\n", config), "utf-8")
            made.append(run)
    return made


def verdict_of(folders: list[Path]) -> str:
    (chapter,) = analyze([read_run(folder) for folder in folders]).chapters
    return str(chapter.verdicts[""][-1])


def test_federations_that_are_one_division_are_seeds(tmp_path: Path) -> None:
    folders = runs(tmp_path, ["x"] * 6, train=1.0, test=1.0)
    analysis = analyze([read_run(folder) for folder in folders])
    (chapter,) = analysis.chapters
    assert chapter.comparison.replicates == "seeds"
    assert "(6 seeds of federation 0)" in verdict_of(folders)
    note = "Federations 0, 1, 2, 3, 4 and 5 are the same division of the data"
    page = write_report(analysis, tmp_path / "report")
    written = [page.read_text("utf-8"), markdown_tables(analysis), latex(analysis)]
    assert all(note in text and "are seeds on one federation" in text for text in written)
    assert all("6 federations" not in text for text in written)
    write_summary(analysis.runs, tmp_path / "s.csv")
    assert markdown_tables(read_summary(tmp_path / "s.csv")) == markdown_tables(analysis)


def test_divisions_that_repeat_are_counted(tmp_path: Path) -> None:
    folders = runs(tmp_path, ["x", "y", "x", "y", "x", "z"], train=0.5, test=1.0)
    assert "(6 runs on 3 federations)" in verdict_of(folders)


@pytest.mark.parametrize("divisions", [list("uvwxyz"), [""] * 6])
def test_other_divisions_and_runs_that_recorded_none_are_federations(
    tmp_path: Path, divisions: list[str]
) -> None:
    folders = runs(tmp_path, divisions, train=0.2, test=1.0)
    assert "(6 federations)" in verdict_of(folders)
    text = markdown_tables([read_run(folder) for folder in folders])
    shared = "share on average 20 % of their training examples and 100 % of their test examples"
    assert (shared in text) == bool(divisions[0])


@pytest.mark.parametrize("divisions", ["uvwxyz", "uvwxyu"])  # few patients: a draw may repeat
def test_redrawn_tests_widen_intervals_as_nadeau_and_bengio(tmp_path: Path, divisions: str) -> None:
    ratio = {"tests per training example": 0.25}
    folders = runs(tmp_path, list(divisions), train=0.8, test=0.2, **ratio)
    analysis = analyze([read_run(folder) for folder in folders])
    (chapter,) = analysis.chapters
    contrast = chapter.contrasts[0].against_baselines["fedheal"]["FedAvg"]
    one = contrast["MIN"].difference
    points = 100 * np.array(GAINS)
    error = points.std(ddof=1) * math.sqrt(1 / 6 + 0.25)
    width = stats.t.ppf(1 - 0.05 / 3 / 2, 5) * error  # three metrics of one method
    assert (one.low, one.high) == pytest.approx((points.mean() - width, points.mean() + width))
    write_summary(analysis.runs, tmp_path / "s.csv")
    for text in (markdown_tables(analysis), markdown_tables(read_summary(tmp_path / "s.csv"))):
        assert "Nadeau and Bengio's factor, 1/n + 0.25 instead of 1/n" in text


def test_sites_that_draw_their_tests_anew_are_told_of_the_wider_intervals(tmp_path: Path) -> None:
    """The server of sites knows how many examples they have, and not which."""
    folders = runs(tmp_path, [""] * 6, **{"tests per training example": 0.25})
    text = markdown_tables([read_run(folder) for folder in folders])
    assert "Nadeau and Bengio's factor, 1/n + 0.25 instead of 1/n" in text
    assert "Two federations share" not in text


def test_intervals_beyond_the_range_of_accuracies_are_too_few_pairs(tmp_path: Path) -> None:
    folders = runs(tmp_path, ["u", "v"], train=0.2, test=1.0)
    wild = make_run(tmp_path / "fedheal-9", constant(a=0.1, b=0.9), label="fedheal", seed=9)
    other = make_run(tmp_path / "fedavg-9", constant(a=0.9, b=0.2), label="fedavg", seed=9)
    for run in (wild, other):
        text = (run / "config.toml").read_text("utf-8")
        (run / "config.toml").write_text(text.replace("[data]\n", "[data]\nseed = 9\n"), "utf-8")
    text = markdown_tables([read_run(folder) for folder in (*folders[:2], wild, other)])
    _, differences = text.split("**Difference from the baselines", 1)
    row = next(line for line in differences.splitlines() if line.startswith("| fedheal (2 fed"))
    assert "too few pairs" in row
    numbers = map(float, re.findall(r"\d+\.\d+", row))
    assert max(numbers) <= 100


def test_a_table_by_name_a_pdf_of_each_figure_and_a_page_that_explains(tmp_path: Path) -> None:
    folders = runs(tmp_path, list("uvwxyz"), train=0.2, test=1.0)
    named = Analysis(tuple(read_run(folder) for folder in folders), table="difference")
    for text in (latex(named), markdown_tables(named)):
        assert "Difference from the baselines" in text
        assert "Accuracy per domain" not in text
        assert "Note: " not in text
    page = write_report(list(named.runs), tmp_path / "report", pdf=True)
    kinds = [{p.stem for p in (page.parent / "figures").glob(f"*.{k}")} for k in ("pdf", "png")]
    assert kinds[0] == kinds[1] != set()
    text = page.read_text("utf-8")
    assert GUIDE not in text
    assert "docs/report.md" not in text
    assert '<a href="#how-to-read">' in text
    assert '<details id="how-to-read">' in text
    write_report(list(named.runs), tmp_path / "report")
    assert not list((page.parent / "figures").glob("*.pdf"))  # they would be of earlier runs
