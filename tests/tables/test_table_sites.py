"""Tables of real sites: sums, the encoding that they make, and what never leaves a site."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord
from hospital_tables import write_three
from table_sites import grid, numbers, run, separate, site_of

from fairflower.client_app import app
from fairflower.config import DataConfig, RunConfig
from fairflower.data.federation import Federation
from fairflower.data.sites import fits, open_site
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, DataError
from fairflower.server.contents import read_facts
from fairflower.server.registration import NodeDiscovery
from fairflower.tables.encoding import Encoding
from fairflower.tables.sites import SiteTable, check_own, merge_sites, said_of, tables_of

NODE = {"smallest-group": 1}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["disease", "bmi"])
def test_sites_with_tables_train_the_same_model_as_domains_of_one_folder(
    target: str, tmp_path: Path
) -> None:
    three = write_three(tmp_path / "three")
    changes = {"data.target": target}
    expected = run(InlineGrid(app, 3), tmp_path / "runs", **changes, **{"data.dir": str(three)})
    nodes = [node | NODE for node in separate(three)]
    actual = run(grid(nodes), tmp_path / "runs", **changes, **{"evaluate.by": "clients"})
    models = [(path / "model.safetensors").read_bytes() for path in (expected, actual)]
    assert models[0] == models[1]
    facts, of_sites = map(read_facts, (expected, actual))
    for key in ("clients", "classes", "shape"):
        assert facts[key] == of_sites[key]
    encodings = [f["federation"]["encoding"] for f in (facts["table"], of_sites["sites"])]
    assert encodings[0] == encodings[1]
    assert facts.get("task") == of_sites.get("task")
    assert str(tmp_path / "site") not in json.dumps(of_sites["sites"])

    # The model is tested at the sites again, and at a new one that has fewer levels.
    tested = {"evaluate.model": str(actual), "evaluate.by": "clients"}
    again = run(grid(nodes), tmp_path / "tests", **changes, **tested)
    assert read_facts(again)["sites"]["federation"]["encoding"] == encodings[0]
    losses = []
    for path in (actual, again):
        history = pd.read_csv(path / "history.csv").query("metric == 'loss' and level == 'domain'")
        losses.append(history[history["round"] == 2].set_index("name").value)
    assert len(losses[0]) == 3
    pd.testing.assert_series_equal(*losses)


def test_sums_of_sites_are_those_of_the_pooled_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tables = [
        {"age": numbers(n, seed=n), "sex": rng.choice(["F", "M", "D"], n).tolist()}
        for n in (40, 70, 100)
    ]
    sites = [site_of(tmp_path / f"s{k}", table) for k, table in enumerate(tables)]
    encoding = Encoding.from_json(merge_sites(sites).encoding)
    frames = [pd.DataFrame(t | {"y": ["no", "yes"] * (len(t["age"]) // 2)}) for t in tables]
    trained = pd.concat([f[f.groupby("y").cumcount() % 5 > 0] for f in frames])
    age, sex = encoding.columns
    assert age.mean == pytest.approx(trained.age.mean(), rel=1e-9)
    assert age.std == pytest.approx(trained.age.std(ddof=0), rel=1e-9)
    assert sex.levels == ("D", "F", "M")
    assert sex.mode == max(sex.levels, key=lambda v: ((trained.sex == v).sum(), v))
    assert merge_sites(sites[::-1]).encoding == merge_sites(sites).encoding


def test_sums_of_few_rows_and_rare_levels_stay_at_the_site(tmp_path: Path) -> None:
    columns = {
        "age": numbers(50),
        "dose": ["" if k % 25 else "7.25" for k in range(50)],
        "job": ["clerk"] * 40 + ["nurse"] * 7 + ["astronaut"] * 3,
    }
    site = site_of(tmp_path / "s", columns)
    assert "astronaut" not in site.encoding
    assert "7.25" not in site.encoding
    sums = SiteTable.from_json(site.encoding).sums
    assert (sums["dose"].known, sums["dose"].missing) == (0, 40)
    assert set(sums["job"].counts) == {"clerk", "nurse"}
    other = site_of(tmp_path / "t", columns | {"dose": numbers(50)})
    encoding = Encoding.from_json(merge_sites([site, other]).encoding)
    assert [column.name for column in encoding.columns] == ["age", "dose", "job"]
    assert "job: other" in encoding.features


def test_a_site_encodes_a_column_that_only_others_have_values_of(tmp_path: Path) -> None:
    full = site_of(tmp_path / "full", {"age": numbers(40), "dose": numbers(40, seed=1)})
    bare = site_of(tmp_path / "bare", {"age": numbers(40), "dose": [""] * 40})
    whole = merge_sites([full, bare])
    assert fits(bare, whole)
    config = DataConfig(name="table", target="y", dir=str(tmp_path / "bare"))
    x = open_site(config, "bare", whole.encoding).train(0).x
    features = Encoding.from_json(whole.encoding).features
    assert features == ["age", "dose", "dose: missing"]
    np.testing.assert_array_equal(x[:, 1:], [[0, 1]] * len(x))


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"size": numbers(40, 1.7)}, "'size' has a mean of .* at s1 and of .* at s0: are the unit"),
        ({"sex": ["X", "Y"] * 20}, "'sex' has no level in common at s0 and s1: is it coded diff"),
        ({"more": numbers(40)}, "'more' is ignored, because s0 lacks it"),
    ],
)
def test_the_server_warns_of_columns_that_differ(
    theirs: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"size": numbers(40, 170), "sex": ["F", "M", "M", "F"] * 10}
    sites = [site_of(tmp_path / "s0", columns), site_of(tmp_path / "s1", columns | theirs)]
    caplog.clear()
    merge_sites(sites)
    assert re.search(said, caplog.text)


def test_a_target_coded_otherwise_at_a_site_is_refused(tmp_path: Path) -> None:
    columns = {"size": numbers(40)}
    other = site_of(tmp_path / "south", {**columns, "y": ["0", "1"] * 20})
    with pytest.raises(DataError, match="the classes no, yes at north, and 0, 1 at south"):
        merge_sites([site_of(tmp_path / "north", columns), other])


def test_columns_of_different_kinds_are_refused_with_the_sites(tmp_path: Path) -> None:
    columns = {"size": numbers(40), "sex": ["F", "M", "M", "F"] * 10}
    coded = columns | {"sex": [1, 2, 2, 1] * 10}
    sites = [site_of(tmp_path / "north", columns), site_of(tmp_path / "south", coded)]
    text = "The column 'sex' has different kinds: category at north, number at south."
    assert said_of(tables_of(sites)) == [text]
    with pytest.raises(DataError, match=text[:-1]):
        merge_sites(sites)
    assert list(tables_of([sites[0], sites[0]])) == ["north (site 0)", "north (site 1)"]


def test_a_schema_without_sums_sends_none_and_has_to_be_the_same(tmp_path: Path) -> None:
    def declared(name: str, high: int) -> Federation:
        (folder := tmp_path / name).mkdir()
        text = f'sums = false\n[columns.age]\nkind = "number"\nlow = 0\nhigh = {high}\n'
        (folder / "schema.toml").write_text(text)
        table = {"y": ["no", "yes"] * 20, "age": numbers(40)}
        pd.DataFrame(table).to_csv(folder / "t.csv", index=False)
        site = open_site(DataConfig(name="table", target="y", dir=str(folder)), name)
        sent = SiteTable.from_json(site.encoding).to_send(5)
        assert not sent.sums
        assert not sent.targets
        return replace(site, encoding=sent.to_json())

    a, b, c = declared("a", 100), declared("b", 100), declared("c", 120)
    (column,) = Encoding.from_json(merge_sites([a, b]).encoding).columns
    assert column.mean == 50
    with pytest.raises(DataError, match="declare different columns, ranges"):
        merge_sites([a, c])


def test_a_site_answers_no_encoding_of_other_columns(tmp_path: Path) -> None:
    columns = {"age": numbers(40), "name": [f"patient {k}" for k in range(40)]}
    site = site_of(tmp_path / "s", columns)
    assert "patient 3" not in site.encoding
    encoding = Encoding.from_json(merge_sites([site, site]).encoding)
    check_own(encoding.to_json(), site)
    (age,) = encoding.columns
    for column in (replace(age, name="y"), replace(age, name="name", kind="category")):
        asked = replace(encoding, columns=(age, column)).to_json()
        with pytest.raises(ConfigError, match="by columns that this site did not describe"):
            check_own(asked, site)


def problem(folder: Path, node: Mapping[str, Any] | None = None, **changes: Any) -> str:
    """Return why a site takes no part in a run."""
    flat = {"data.name": "table", "data.target": "y", "evaluate.by": "clients"} | changes
    settings = ConfigRecord(dict(RunConfig.from_flat(flat).to_flat()))
    config = {"domain": folder.name, "data-dir": str(folder)} | dict(node or {})
    discovery = NodeDiscovery(grid([config]), 60, threading.Event(), settings)
    discovery.ask()
    (text,) = discovery.problems.values()
    return text


@pytest.mark.parametrize("by", ["run", "node"])
def test_sums_that_are_not_masked_do_not_leave_a_site_that_masks_its_models(
    by: str, tmp_path: Path
) -> None:
    site_of(tmp_path / "s", {"age": numbers(40)})
    node = {"secure-aggregation": True} if by == "node" else {}
    changes = {"secure-aggregation": True, "strategy.name": "fedavg"} if by == "run" else {}
    text = problem(tmp_path / "s", node, **changes)
    assert "with masks or sums = false, the schema must declare a range or levels of 'age'" in text


def test_a_site_that_lacks_a_column_says_which(tmp_path: Path) -> None:
    site_of(tmp_path / "s", {"age": numbers(40)})
    text = problem(tmp_path / "s", **{"data.features": "age,dose"})
    assert "site 's': a table lacks the column 'dose' (data.features)" in text


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{}", "no JSON", '{"sums": {}}', '{"sums": {}, "targets": {}, "patients": -1}'),
        '{"sums": 1, "targets": {}, "declared": ""}',
        '{"sums": {"x": {}}, "targets": {}, "declared": ""}',
        '{"sums": {}, "targets": {}, "declared": "{}"}',
        '{"sums": {}, "targets": {}, "others": {}}',
    ],
)
def test_a_damaged_description_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        SiteTable.from_json(text)


@pytest.mark.slow
def test_sites_that_declare_their_encoding_train_masked(tmp_path: Path) -> None:
    nodes = separate(write_three(tmp_path / "three"))
    schema = "sums = false\n"
    for name, ends in (("age", (20, 100)), ("bmi", (10, 50))):
        schema += f'[columns.{name}]\nkind = "number"\nlow = {ends[0]}\nhigh = {ends[1]}\n'
    schema += '[columns.sex]\nkind = "category"\nlevels = ["F", "M"]\n'
    for node in nodes:
        Path(node["data-dir"], "schema.toml").write_text(schema)
    changes = {"secure-aggregation": True, "strategy.name": "fedavg", "evaluate.by": "clients"}
    done = run(grid(nodes), tmp_path / "runs", **changes, **{"data.smallest-group": 5})
    (age, *_) = json.loads(read_facts(done)["sites"]["federation"]["encoding"])["columns"]
    assert age["mean"] == 60
    assert "halted_rounds" not in read_facts(done)
