"""Statistics before training: of a folder, and of sites that a run asks."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command import call
from table_sites import grid, numbers, run, site_of

from fairflower.client_app import app
from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, DataError
from fairflower.report.data_statistics import (
    DataStatistics,
    read_statistics,
    statistic_tables,
    statistics_markdown,
)
from fairflower.server.contents import STATISTICS
from fairflower.tables.digests import row_digests
from fairflower.tables.warnings import by_chance, distinct, shared_rows

KEY = "a key of both hospitals"


def write(folder: Path, name: str, **columns: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    size = len(columns["age"])
    frame = pd.DataFrame({**columns, "ill": ["no", "yes"] * (size // 2)})
    frame.to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.fixture
def hospitals(tmp_path: Path) -> list[Path]:
    """Two hospitals that code sex differently and share ten patients."""
    ages = numbers(100)
    north = write(tmp_path / "north", "n", age=ages[:60], sex=["F", "M", "M"] * 20)
    south = write(tmp_path / "south", "s", age=ages[50:], sex=[2, 1] * 25)
    return [north, south]


def test_a_folder_is_described_as_pandas_would(tmp_path: Path) -> None:
    ages = [*numbers(50), None, None, None, None, None, None]
    job = ["clerk"] * 40 + ["nurse"] * 13 + ["pilot"] * 3
    write(tmp_path / "all", "a", age=ages, job=job)
    write(tmp_path / "all", "b", age=numbers(30, 0.5), job=["clerk"] * 30)
    arguments = ["data", "statistics", tmp_path / "all", "-s", "data.target=ill"]
    out = tmp_path / "page"
    printed = call(*arguments, "--format", "csv", "--out", out).rpartition("page:")[0]
    rows = {
        (row["table"], row["row"], row["place"]): (row["value"], row["spread"])
        for row in csv.DictReader(io.StringIO(printed))
    }
    frame = pd.read_csv(tmp_path / "all" / "a.csv")
    trained = frame[frame.groupby("ill").cumcount() % 5 > 0]
    mean, std = trained.age.mean(), trained.age.std(ddof=0)
    assert rows["numbers", "age", "a"] == (f"{mean:.4g}", f"{std:.3g}")
    assert rows["examples", "training", "a"][0] == str(len(trained))
    assert rows["missing cells", "age", "a"][0] == "<5"
    clerks = int((trained.job == "clerk").sum())
    assert rows["levels", "clerk", "a"] == (str(clerks), f"{clerks / len(trained):.1%}")
    assert rows["levels", "other", "a"][0] == "<5"
    assert "pilot" not in printed
    text = (out / "index.html").read_text()
    assert "<svg" in text
    assert re.search("age.* has a mean of .* at b and of .* at a: are the units the same", text)
    assert (out / "tables.md").read_text().count("| ") > 20
    assert not list(out.rglob("*pilot*"))


def test_other_data_have_counts_of_classes(tmp_path: Path) -> None:
    x = np.zeros((20, 4, 4), np.uint8)
    y = np.array([0] * 16 + [1] * 4)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    printed = call("data", "statistics", tmp_path, "--data", "npz")
    assert re.search(r"class 0\s+16", printed)
    assert re.search(r"class 1\s+<5", printed)


def nodes_of(folders: list[Path], **more: Any) -> list[dict[str, Any]]:
    return [{"domain": f.name, "data-dir": str(f)} | more for f in folders]


def ask_sites(nodes: InlineGrid, folder: Path, **changes: Any) -> Path:
    ill = {"data.target": "ill", "data.patient": "", "evaluate.by": "clients", "statistics": True}
    return run(nodes, folder, **ill, **{"data.smallest-group": 5}, **changes)


def test_a_consortium_sees_that_sites_code_sex_differently(
    hospitals: list[Path], tmp_path: Path
) -> None:
    nodes = grid(nodes_of(hospitals, **{"row-digests": KEY}))
    with pytest.raises(Exception, match="'sex' has different kinds: category at north, number at"):
        run(
            nodes,
            tmp_path / "runs",
            **{"data.target": "ill", "data.patient": "", "evaluate.by": "clients"},
        )
    folder = ask_sites(nodes, tmp_path / "runs")
    text = call("data", "statistics", folder, "--format", "md", "--out", tmp_path / "page")
    assert re.search(r"\| sex \| category \| 1\.\d+ ±0\.\d+ \|", text)
    assert re.search(r"\| F \| \d+ \(\d+\.\d%\) \| number \|", text)
    assert "cannot be known" in text
    assert (tmp_path / "page" / "index.html").is_file()
    stored = (folder / STATISTICS).read_text()
    assert str(tmp_path) not in stored
    assert KEY not in stored


def test_a_page_without_a_schema_shows_each_sites_kinds_and_says_what_differs(
    tmp_path: Path,
) -> None:
    ages, days = numbers(60), [f"2020-01-{k % 28 + 1:02}" for k in range(60)]
    people, folder = [f"p{k // 2}" for k in range(60)], tmp_path / "all"
    write(folder, "north", age=ages, sex=["F", "M", "M"] * 20, seen=days, patient=people)
    write(
        folder, "south", age=ages, sex=[2, 1] * 30, seen=days, patient=people, copy=["a", "b"] * 30
    )
    given = ["-s", "data.target=ill", "-s", "data.patient=patient"]
    text = call("data", "statistics", folder, *given, "--format", "md")
    assert "- The column 'sex' has different kinds: category at north, number at south." in text
    assert "| sex | category | 1." in text
    assert "| seen | date | date |" in text
    assert "- The column 'copy' gives the target away" in text
    assert "| training patients | 24 | 24 |" in text
    assert "| most frequent class | 50.0% | 50.0% |" in text
    assert "equal in all 2 columns: 60 at north and south. Chance would give fewer." in text
    assert "digests" not in text
    with pytest.raises(DataError, match=r"'seen' has dates|'sex' has different kinds"):
        prepare(DataConfig(name="table", target="ill", dir=str(folder)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((KEY, KEY), "- 10 rows at north are at south, too"),
        ((KEY, KEY[::-1]), "Whether rows at north, south are at other places, too, cannot be kn"),
        ((KEY, ""), "cannot be known"),
    ],
)
def test_common_rows_are_counted_by_keyed_digests(
    keys: tuple[str, str], said: str, hospitals: list[Path], tmp_path: Path
) -> None:
    nodes = nodes_of(hospitals)
    for node, key in zip(nodes, keys, strict=True):
        node |= {"row-digests": key} if key else {}
    folder = ask_sites(grid(nodes), tmp_path / "runs", **{"data.features": "age"})
    assert said in statistics_markdown(read_statistics(folder))


def test_rows_that_chance_makes_equal_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def drawn(n: int, seed: int) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        cells = {"age": rng.normal(60, 9, n).round(), "lab": rng.normal(5, 1, n).round(1)}
        return pd.DataFrame({**cells, "sex": rng.choice(["F", "M"], n), "ill": [0, 1] * (n // 2)})

    pairs = [(drawn(60, k), drawn(90, k + 99)) for k in range(40)]
    equal = [len(distinct(a) & distinct(b)) for a, b in pairs]
    expected = [by_chance(a, b) for a, b in pairs]
    assert np.mean(expected) == pytest.approx(np.mean(equal), rel=0.2)
    said = [shared_rows({"a": a, "b": b}, 5) for a, b in pairs]
    assert len([*filter(None, said)]) <= 1  # each with a probability below 0.001
    a = drawn(300, 1)
    b = pd.concat([a[:20], drawn(180, 2)])
    for name, frame in {"a": a, "b": b}.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    text = call("data", "statistics", tmp_path, "-s", "data.target=ill", "--format", "md")
    prepare(DataConfig(name="table", target="ill", dir=str(tmp_path)))
    (found,) = shared_rows({"a": a, "b": b}, 5)
    assert "equal in all 4 columns" in found
    assert found in text
    assert found in caplog.text


def test_digests_depend_on_the_key_and_on_numbers_not_on_their_marks(tmp_path: Path) -> None:
    ages = numbers(20)
    write(tmp_path / "dots", "a", age=ages)
    text = (tmp_path / "dots" / "a.csv").read_text()
    (tmp_path / "commas").mkdir()
    other = text.replace(",", ";").replace(".", ",")
    (tmp_path / "commas" / "b.csv").write_text(other, encoding="utf-8-sig")

    def digests(name: str, key: str = KEY) -> tuple[str, list[str]]:
        return row_digests(
            DataConfig(name="table", target="ill", dir=str(tmp_path / name)), name, key
        )

    assert digests("dots") == digests("commas")
    assert len(set(digests("dots")[1])) == 20
    assert not {*digests("dots")[1]} & {*digests("dots", KEY + "!")[1]}


def test_a_site_that_refuses_is_named_on_the_page(hospitals: list[Path], tmp_path: Path) -> None:
    (bad := tmp_path / "bad").mkdir()
    (bad / "x.csv").write_text("age,ill\n")
    folder = ask_sites(grid(nodes_of([*hospitals, bad])), tmp_path / "runs")
    assert "site 'bad'" in statistics_markdown(read_statistics(folder))


def test_a_simulation_has_no_sites_to_ask(tmp_path: Path) -> None:
    none = {"data.name": "uci-digits", "data.target": "", "data.patient": "", "model.name": "cnn"}
    with pytest.raises(ConfigError, match="asks sites with their own data"):
        run(InlineGrid(app, 2), tmp_path, statistics=True, **none)
    with pytest.raises(ConfigError, match="has a share of a common data set, but no data of its"):
        run(InlineGrid(app, 4), tmp_path, statistics=True, **none, **{"evaluate.by": "clients"})


def test_a_short_key_is_refused(hospitals: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row-digests: expected 16 characters or more"):
        ask_sites(grid(nodes_of(hospitals, **{"row-digests": "short"})), tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sites": {"a": {}}, "smallest_group": 5}'])
def test_damaged_statistics_are_called_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / STATISTICS).write_text(text)
    assert "cannot be read" in call("data", "statistics", tmp_path, expect=1)


def test_a_level_that_a_site_does_not_name_is_not_said_to_be_absent(tmp_path: Path) -> None:
    jobs = {"a": ["clerk"] * 46 + ["nurse"] * 4, "b": ["clerk"] * 25 + ["nurse"] * 25}
    jobs["c"] = ["clerk"] * 50
    sites = {k: site_of(tmp_path / k, {"age": numbers(50), "job": v}) for k, v in jobs.items()}
    tables = statistic_tables(DataStatistics(sites, 5, []))
    (levels,) = (table for table in tables if table.title.startswith("Levels"))
    rows = {row.name: [cell.text for cell in row.cells] for row in levels.groups[0].rows}
    assert rows["nurse"] == ["<5", "21", "0"]  # 4 of 25 rows are test rows
    assert rows["other"] == ["<5", "0", "0"]
