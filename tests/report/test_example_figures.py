"""Figures of stored test examples, and the scores of each label, from run folders alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import constant, make_run, printed_tables

from fairflower.errors import ConfigError
from fairflower.files import write_arrays
from fairflower.report import read_run, read_summary, write_summary
from fairflower.report.analysis import analyze
from fairflower.report.figures.comparison import plot
from fairflower.report.methods import group_runs
from fairflower.report.pages import markdown_tables
from fairflower.server.examples import EXAMPLES

DICE = {"name": "dice", "better": 1, "title": "Dice"}
RMSE = {"name": "rmse", "better": -1, "unit": "days", "low": 0.0, "title": "RMSE"}


def masks(folder: Path, server_round: int = 6) -> Path:
    """Return a run with two stored images of the domain a, of which some pixels are unknown."""
    facts: dict[str, Any] = {"task": "segmentation", "scores": [DICE]}
    made = make_run(folder, constant(a=0.5, b=0.7), score="dice", classes=["paper", "ink"], **facts)
    true = np.zeros((2, 4, 6), np.uint8)
    true[:, 1], true[:, 3] = 1, 255
    arrays = {"image": np.zeros((2, 3, 4, 6), np.uint8), "true": true, "predicted": true // 255}
    notes = ["worst: 10.0 %", "best: 90.0 %"]
    write_arrays(made / EXAMPLES, arrays, {"round": server_round, "domains": ["a"], "notes": notes})
    return made


def points(folder: Path, width: int, places: int = 2) -> Path:
    """Return a run with stored numbers of some of the domains a, b and c; one is infinite."""
    facts: dict[str, Any] = {"task": "regression", "scores": [RMSE]}
    made = make_run(folder, constant(a=2.0, b=3.0, c=1.0), score="rmse", classes=[], **facts)
    domain = np.arange(places).repeat(5)
    true = np.arange(len(domain) * width, dtype=np.float32).reshape(-1, width)
    predicted = true + 1
    predicted[0] = np.inf
    arrays = {"true": true, "predicted": predicted, "open": domain == 1, "domain": domain}
    domains = ["a", "b", "c"][:places]
    write_arrays(made / EXAMPLES, arrays, {"round": 6, "domains": domains, "notes": ["Days."]})
    return made


def drawn(folder: Path) -> Any:
    (comparison,) = group_runs([read_run(folder)])
    return plot(comparison, "examples-1-fedheal")


def test_masks_are_drawn_below_their_images(tmp_path: Path) -> None:
    figure = drawn(masks(tmp_path / "run"))
    titles = [panel.get_title("left") for panel in figure.axes]
    assert titles == ["worst: 10.0 %", "best: 90.0 %", "", "", "", ""]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "paper",
        "ink",
        "unknown",
    ]
    np.testing.assert_array_equal(figure.axes[2].images[0].get_array()[3], 255)


@pytest.mark.parametrize(("width", "places"), [(1, 2), (2, 3)])
def test_points_have_a_panel_for_each_domain_and_target(
    width: int, places: int, tmp_path: Path
) -> None:
    figure = drawn(points(tmp_path / "run", width, places))
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title("left") for panel in panels] == [
        d for d in "abc"[:places] for _ in range(width)
    ]
    assert panels[0].get_ylabel() == ("predicted" if width == 1 else "predicted 1")
    first = np.arange(5 * width).reshape(-1, width)[1:, 0]  # without the infinite prediction
    filled, circles = (dots.get_offsets() for dots in panels[0].collections)
    np.testing.assert_array_equal(filled, np.stack([first, first + 1], axis=1))
    assert len(circles) == 0
    assert len(panels[width].collections[1].get_offsets()) == 5


def test_figures_are_on_the_page_and_need_no_torch(tmp_path: Path) -> None:
    runs = [str(masks(tmp_path / "masks")), str(points(tmp_path / "points", 1))]
    code = (
        "import sys; from fairflower.report import read_run, write_report\n"
        f"write_report([read_run(path) for path in {runs!r}], {str(tmp_path / 'page')!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "test images of a, its worst domain" in page
    assert "2 of its images in the order of their Dice in %" in page
    assert "Dashed: right predictions. Days. Without 1 domain with better scores" in page
    assert page.count('data-name="1-examples-1-fedheal"') == 1
    assert (tmp_path / "page" / "figures" / "2-examples-1-fedheal.png").exists()


def test_examples_of_another_model_or_damaged_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="examples-1-fedheal"):
        drawn(masks(tmp_path / "earlier", server_round=5))
    assert not caplog.records
    broken = masks(tmp_path / "broken")
    (broken / EXAMPLES).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="examples-1-fedheal"):
        drawn(broken)
    assert f"{EXAMPLES} cannot be read" in caplog.text


def labels(folder: Path, by: str = "server", names: tuple[str, ...] = ("disease", "fever")) -> Path:
    """Return a run with an AUC and an F1 of each label; one AUC of domain b is undefined."""
    scores = [{"name": "auc", "better": 1, "title": "AUC"}, {"name": "macro_f1", "better": 1}]
    of_labels: list[dict[str, Any]] = [
        {
            "name": name,
            "scores": [
                {**scores[0], "name": f"auc_{k}"},
                {**scores[1], "name": f"f1_{k}", "title": "F1"},
            ],
            "counts": {d: {"known": 9 - k, "positive": 4} for d in "ab"} if by == "server" else {},
        }
        for k, name in enumerate(names)
    ]
    facts: dict[str, Any] = {"task": "multilabel", "scores": scores, "labels": of_labels}
    config = f'[evaluate]\nby = "{by}"\n'
    made = make_run(folder, constant(a=0.5, b=0.7), score="auc", config=config, classes=[], **facts)
    rows = [
        f"6,domain,{d},{m}_{k},0.{k + 1}{i}"
        for d in "ab"
        for k in (0, 1)
        for i, m in enumerate(("auc", "f1"))
    ]
    lines = (made / "history.csv").read_text().splitlines()
    rows.remove("6,domain,b,auc_1,0.20")
    (made / "history.csv").write_text("\n".join([*lines[:-1], *rows, lines[-1], ""]))
    return made


def test_each_label_has_its_scores_by_domain_and_its_numbers_of_examples(tmp_path: Path) -> None:
    run = read_run(labels(tmp_path / "run"))
    (table,) = (t for t in analyze([run]).chapters[0].tables if "each label" in t.title)
    assert table.title == "AUC and F1 of each label, last round (6)"
    assert table.columns == ["AUC a", "F1 a", "AUC b", "F1 b"]
    found = {
        (group.heading, row.name): [cell.text for cell in row.cells]
        for group in table.groups
        for row in group.rows
    }
    assert found == {
        ("disease", "known / positive"): ["9 / 4", "", "9 / 4", ""],
        ("disease", "fedheal"): ["10.00", "11.00", "10.00", "11.00"],
        ("fever", "known / positive"): ["8 / 4", "", "8 / 4", ""],
        ("fever", "fedheal"): ["20.00", "21.00", "\N{EN DASH}", "21.00"],
    }
    write_summary([run], tmp_path / "runs.csv")
    assert markdown_tables(read_summary(tmp_path / "runs.csv")) == markdown_tables([run])


def test_labels_that_clients_tested_have_no_numbers_of_examples(tmp_path: Path) -> None:
    text = printed_tables(labels(tmp_path / "run", by="clients"))
    assert "AUC and F1 of each label" in text
    assert "known / positive" not in text
    assert "mean over its clients" in text.partition("each label")[2]


def test_a_single_label_has_no_table_of_its_own(tmp_path: Path) -> None:
    assert "each label" not in printed_tables(labels(tmp_path / "run", names=("disease",)))


def test_labels_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    made = labels(tmp_path / "run")
    facts = json.loads((made / "run.json").read_text())
    facts["labels"][0]["counts"] = {"a": {"known": -1}}
    (made / "run.json").write_text(json.dumps(facts))
    with pytest.raises(Exception, match=r"run\.json: labels\[0\].*-1"):
        read_run(made)
