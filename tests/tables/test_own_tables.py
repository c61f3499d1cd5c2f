"""The data set `table`: hospitals' files, splits by patient, schemas, targets and warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command import call
from hospital_tables import write_three
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from table_sites import SETTINGS

from fairflower.client_app import app
from fairflower.config import DataConfig, RunConfig
from fairflower.data import DataError, prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError
from fairflower.server.contents import read_facts
from fairflower.server.session import Session
from fairflower.tables.columns import Schema
from fairflower.tables.data_set import TableFolder
from fairflower.tables.encoding import Encoding
from fairflower.tables.folder import TableFiles
from fairflower.tables.new_rows import new_features
from fairflower.tables.schema import proposed
from fairflower.tasks import task_of
from fairflower.testing import check_data


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return write_three(tmp_path / "three")


def config_of(folder: Path, **settings: Any) -> DataConfig:
    return DataConfig(**{"name": "table", "dir": str(folder), "target": "disease"} | settings)


def write(folder: Path, **tables: dict[str, list[Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, columns in tables.items():
        pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
    return folder


def table(n: int = 40, **columns: list[Any]) -> dict[str, list[Any]]:
    rng = np.random.default_rng(n)
    sizes = [round(x, 3) for x in rng.normal(50, 9, n).tolist()]
    return {"size": sizes, "disease": [("no", "yes")[k % 3 > 0] for k in range(n)], **columns}


def test_three_hospitals_pass_check_data_and_are_encoded_alike(
    three: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(three, patient="patient")
    check_data(TableFolder, config)
    federation = prepare(config)
    assert federation.classes == ("no", "yes")
    assert "'ward' is ignored, because north, west lack it" in caplog.text
    encoding = Encoding.from_json(federation.encoding)
    assert encoding.features == [
        *("age", "bmi", "bmi: missing", "sex: F", "sex: M"),
        *("smoking: current", "smoking: former", "smoking: never"),
    ]
    x = federation.train_of_all().x
    np.testing.assert_allclose(x[:, 0].mean(dtype=np.float64), 0, atol=1e-6)
    np.testing.assert_allclose(x[:, 0].std(dtype=np.float64), 1, atol=1e-6)
    # Independently, from the files: the mean BMI of the training rows of all hospitals.
    sizes = []
    for name, mark in (("north", ";"), ("south", ","), ("west", "\t")):
        frame = pd.read_csv(three / f"{name}.csv", sep=mark, decimal="," if mark == ";" else ".")
        first = frame.groupby("patient", sort=False).disease.first()
        place = first.groupby(first).cumcount()
        trained = ~frame.patient.isin(place[place % 5 == 0].index)
        sizes += frame.bmi[trained].dropna().tolist()
    (bmi,) = (column for column in encoding.columns if column.name == "bmi")
    assert bmi.mean == pytest.approx(np.mean(sizes), rel=1e-9)
    assert bmi.std == pytest.approx(np.std(sizes), rel=1e-9)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=40))
def test_no_patient_is_on_two_sides(rows: list[tuple[int, bool]]) -> None:
    frame = pd.DataFrame({"who": [f"p{k}" for k, _ in rows], "y": [str(y) for _, y in rows]})
    made = TableFolder.__new__(TableFolder)
    made.config, made.task = DataConfig(name="table", target="y", patient="who"), "classification"
    test = made._tested("here", frame, frame.y.to_numpy())
    sides = {side: set(frame.who[test == side]) for side in (True, False)}
    assert not sides[True] & sides[False]
    firsts = frame.drop_duplicates("who")
    for label in set(firsts.y):  # by brute force: every fifth patient of a class, in order
        people = firsts.who[firsts.y == label].tolist()
        assert sides[True] & set(people) == set(people[::5])


def test_one_file_with_a_domain_column_is_the_same_as_a_file_for_each(tmp_path: Path) -> None:
    one, two = table(40), table(60)
    apart = write(tmp_path / "apart", a=one, b=two)
    joined = {k: one[k] + two[k] for k in one} | {"site": ["a"] * 40 + ["b"] * 60}
    together = write(tmp_path / "together", all=joined)
    first, second = (
        prepare(config_of(apart)),
        prepare(config_of(together, domain_column="site")),
    )
    assert (second.domains, second.digest) == (("a", "b"), first.digest)
    write(together, all=joined | {"site": ["1.0"] * 40 + ["2,0"] * 60})
    assert prepare(config_of(together, domain_column="site")).domains == ("1", "2")
    with pytest.raises(DataError, match="Unknown column 'place'"):
        prepare(config_of(together, domain_column="place"))
    with pytest.raises(DataError, match=r"expected a single file, because data.domain-column"):
        prepare(config_of(apart, domain_column="site"))


def test_the_order_of_columns_does_not_change_the_data(tmp_path: Path) -> None:
    columns = table(40, sex=["F", "M"] * 20)
    first = prepare(config_of(write(tmp_path / "1", a=columns, b=table(50, sex=["M"] * 50))))
    turned = dict(reversed(columns.items()))
    second = prepare(config_of(write(tmp_path / "2", a=turned, b=table(50, sex=["M"] * 50))))
    assert (first.digest, first.encoding) == (second.digest, second.encoding)


def test_validation_and_test_rows_teach_nothing(tmp_path: Path) -> None:
    columns = table(50) | {"part": ["test"] + ["train"] * 49}
    folder = write(tmp_path / "t", a=columns)
    plain = prepare(config_of(folder, split="part"))
    columns["size"][0] = 1e6
    write(folder, a=columns)
    assert prepare(config_of(folder, split="part")).encoding == plain.encoding
    part = prepare(config_of(folder, split="part", validation_fraction=0.2))
    (size,) = Encoding.from_json(part.encoding).columns
    x = part.train(0).x.astype(np.float64) * size.std + size.mean
    assert size.mean == pytest.approx(x.mean(), rel=1e-6)
    np.testing.assert_allclose(part.train(0).x.mean(dtype=np.float64), 0, atol=1e-6)


def test_redrawn_patients_stay_together(three: Path) -> None:
    drawn = [prepare(config_of(three, redraw="patient", seed=seed)) for seed in (0, 1)]
    assert drawn[0].division != drawn[1].division
    for federation in drawn:
        np.testing.assert_allclose(federation.train_of_all().x[:, 0].mean(), 0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "columns", "task", "classes"),
    [
        ({}, {}, "classification", ("no", "yes")),
        ({"target": "size", "drop": "disease"}, {"z": [1, 2] * 20}, "regression:center", ("size",)),
        (
            {"target": "one,two"},
            {"one": [0, 1, "", 1] * 10, "two": ["yes", "no"] * 20},
            "multilabel",
            ("one", "two"),
        ),
        (
            {"target": "", "time": "days", "event": "died", "task": "survival:cuts=10;20"},
            {"days": list(range(1, 41)), "died": [0, 1] * 20},
            "survival",
            (),
        ),
    ],
)
def test_targets_of_every_kind(
    tmp_path: Path, settings: Any, columns: Any, task: str, classes: Any
) -> None:
    federation = prepare(config_of(write(tmp_path / "t", a=table(40, **columns)), **settings))
    assert federation.task.startswith(task)
    assert federation.classes == classes
    targets = federation.train(0).y
    if task == "multilabel":
        assert np.isnan(targets[:, 0]).any()
        assert set(targets[:, 1]) == {0, 1}
    if task.startswith("regression"):
        learns: Any = task_of(federation.task)
        assert learns.center == pytest.approx(targets.mean(dtype=np.float64), rel=1e-5)
        assert learns.scale == pytest.approx(targets.std(dtype=np.float64), rel=1e-5)


def test_a_schema_is_proposed_and_used(tmp_path: Path) -> None:
    columns = table(40, sex=["F", "M"] * 20, seen=["2020-01-02", "2020-03-01"] * 20)
    folder = write(tmp_path / "t", a=columns, b=table(50, sex=["F"] * 50, seen=["2021-05-05"] * 50))
    with pytest.raises(DataError, match="'seen' has dates"):
        prepare(config_of(folder))
    tables = TableFiles(config_of(folder), Schema())
    frames = {domain: tables.frame(domain) for domain in "ab"}
    text = proposed(frames, ["disease"])
    assert 'levels = ["F", "M"]' in text
    assert 'kind = "target"' in text
    text = text.replace('since = ""  # for example "2000-01-01"', 'since = "2020-01-01"')
    (folder / "schema.toml").write_text(text.replace('unit = ""', 'unit = "mm"'))
    federation = prepare(config_of(folder, target=""))
    seen, _, size = Encoding.from_json(federation.encoding).columns
    assert (size.name, size.unit) == ("size", "mm")
    assert (seen.kind, seen.format) == ("date", "%Y-%m-%d")
    days = [1.0, 60.0] * 20, [490.0] * 50
    trained = np.concatenate(
        [np.array(d)[~_every_fifth(n)] for d, n in zip(days, (40, 50), strict=True)]
    )
    assert seen.mean == pytest.approx(trained.mean())
    (folder / "schema.toml").write_text(text.replace('kind = "number"', 'kind = "nummer"'))
    with pytest.raises(DataError, match=r"columns.size.kind = 'nummer': expected one of number"):
        prepare(config_of(folder))


def test_the_format_of_dates_is_kept_for_new_rows(tmp_path: Path) -> None:
    days = {"a": ["13/02/2020", "01/03/2020"] * 20, "b": ["2020-02-13", "2020-03-01"] * 25}
    schema = '[columns.seen]\nkind = "date"\nsince = "2020-01-01"\n'
    encodings = []
    for names in ("a", "ab"):
        tables = {name: table(len(days[name]), seen=days[name]) for name in names}
        folder = write(tmp_path / names, **tables)
        (folder / "schema.toml").write_text(schema)
        encodings.append(Encoding.from_json(prepare(config_of(folder)).encoding))
    assert [each.columns[0].format for each in encodings] == ["%d/%m/%Y", ""]
    new = pd.DataFrame({"seen": ["03/04/2020"]}, dtype=object)
    (column,) = encodings[0].columns
    x = new_features(encodings[0], new, "new")[0, 0]
    assert x * column.std + column.mean == pytest.approx(93)  # the third of April
    with pytest.raises(DataError, match="days and months may be exchanged"):
        new_features(encodings[1], new, "new")


def _every_fifth(n: int) -> Any:
    labels = np.array([k % 3 > 0 for k in range(n)])
    test = np.zeros(n, bool)
    for label in (True, False):
        test[np.flatnonzero(labels == label)[::5]] = True
    return test


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({}, {"target": "illness"}, "Unknown column 'illness'"),
        ({}, {"target": ""}, "needs data.target"),
        ({}, {"features": "sice"}, "Did you mean 'size'|Unknown column 'sice'"),
        ({}, {"features": "disease"}, "data.features names 'disease'"),
        ({}, {"target": "", "time": "size", "event": "disease"}, "needs data.task = survival"),
        ({"who": ["a"] * 39 + [""]}, {"patient": "who"}, "1 rows have no patient"),
        (
            {"who": ["a", "b"] * 20, "part": ["train"] * 20 + ["test"] * 20},
            {"patient": "who", "split": "part"},
            "2 of 2 patients have training and test examples",
        ),
        ({"part": ["train"] * 39 + ["tset"]}, {"split": "part"}, "1 rows have another split"),
        ({"seen": ["1.2.2020"] * 40}, {}, "'seen' has dates"),
        ({"dose": ["5"] * 38 + ["<5", ">9"]}, {}, "dose: 1 of 31 cells are no numbers"),
        ({"old": list(range(40))}, {"groups": "size"}, "has .* numbers. Store ranges"),
        (
            {"dose": [f"{k} mg" for k in range(39)] + ["none"]},
            {"target": "dose"},
            "40 different texts",
        ),
        ({"name": [f"x{k}" for k in range(40)]}, {"target": "name"}, "40 different texts"),
        ({}, {"schema": "../x.toml"}, "expected the name of a file in data.dir"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, columns: Any, settings: Any, message: str
) -> None:
    folder = write(tmp_path / "t", a=table(40, **columns), b=table(40, **columns))
    with pytest.raises((DataError, ConfigError), match=message):
        prepare(config_of(folder, **settings))


def test_kinds_that_differ_between_domains_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", a=table(40, sex=["F", "M"] * 20), b=table(40, sex=[1, 2] * 20))
    with pytest.raises(DataError, match="'sex' has different kinds: category at a, number at b"):
        prepare(config_of(folder))


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ({"code": ["F", "M"] * 20}, {"code": ["w", "m2"] * 25}, "no level in common at a and b"),
        ({"dose": [5.5, 6.5] * 20}, {"dose": [99.0, 117.0] * 25}, "are the units the same"),
        ({"dose": ["5 g"] * 40}, {"dose": ["6 mg"] * 50}, "different units: g at a, mg at b"),
        (
            {"ill": ["0", "1", "1"] * 13 + ["0"]},
            {"ill": [0, 1, 1] * 16 + [0, 1]},
            "gives the target",
        ),
        (
            {"ill": [9.0 * (k % 3 > 0) + k % 7 for k in range(40)]},
            {"ill": [9.0 * (k % 3 > 0) + k % 5 for k in range(50)]},
            "'ill' gives the target",
        ),
        ({"name": [f"x{k}" for k in range(40)]}, {"name": ["y"] * 50}, "'name' is ignored"),
        ({"row": list(range(40))}, {"row": list(range(50))}, "'row' is ignored"),
        ({"more": [1, 2] * 20}, {}, "'more' is ignored, because b lacks it"),
    ],
)
def test_what_is_suspicious_is_said(
    tmp_path: Path, one: Any, two: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(config_of(write(tmp_path / "t", a=table(40, **one), b=table(50, **two))))
    assert message in caplog.text


def test_a_proposed_schema_lists_a_second_coding_as_codes(tmp_path: Path) -> None:
    one = table(40, disease=["no", "yes"] * 20, sex=["F", "M"] * 20)
    two = table(50, disease=["no", "yes"] * 25, sex=[2, 1] * 25)
    folder = write(tmp_path / "t", a=one, b=two)
    text = call("data", "schema", str(folder), "-s", "data.target=disease")
    assert 'levels = ["1", "2", "F", "M"]' in text
    mended = text.replace('1", "2", "F', "F").replace('# codes = ["1", "2"]', 'codes = ["2", "1"]')
    (folder / "schema.toml").write_text(mended)
    features = Encoding.from_json(prepare(config_of(folder)).encoding).features
    assert [name for name in features if "sex" in name] == ["sex: F", "sex: M"]


def test_a_target_in_two_codings_is_refused_until_the_schema_has_the_codes(tmp_path: Path) -> None:
    one = table(40, disease=["no", "yes"] * 20, sex=["F", "M"] * 20)
    two = table(50, disease=["0", "1.0"] * 25, sex=[2, 1] * 25)
    folder = write(tmp_path / "t", a=one, b=two)
    schema = folder / "schema.toml"
    text = '[columns.size]\nkind = "number"\n[columns.sex]\nkind = "category"\n'
    text += 'levels = ["F", "M"]\ncodes = ["2", "1"]\n[columns.disease]\nkind = "target"\n'
    schema.write_text(text)
    message = r"classes no, yes at a, and 0, 1 at b.*levels = \['no', 'yes'\], codes = \['0', '1'\]"
    with pytest.raises(DataError, match=message):
        prepare(config_of(folder))
    schema.write_text(text + 'levels = ["no", "yes"]\ncodes = ["0", "1"]\n')
    federation = prepare(config_of(folder))
    assert federation.classes == ("no", "yes")
    assert [client.class_counts for client in federation.clients] == [(16, 16), (20, 20)]
    assert Encoding.from_json(federation.encoding).features[:2] == ["sex: F", "sex: M"]
    schema.write_text(text + 'levels = ["no", "yes"]\ncodes = ["0"]\n')
    with pytest.raises(DataError, match="codes has to name another text for each of the levels"):
        prepare(config_of(folder))


def test_rows_at_two_domains_and_single_classes_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = table(40)
    again["size"][7:] = [x + 1 for x in again["size"][7:]]
    again["disease"] = ["yes"] * 40
    same = {k: [*v] for k, v in again.items()}
    prepare(config_of(write(tmp_path / "t", a=again, b=same, c=table(40))))
    said = "Rows without missing cells are equal in all 2 columns: 40 at a and b. Chance would"
    assert said in caplog.text
    assert "All training rows at a have the same class" in caplog.text


def test_groups_are_a_column(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", a=table(40, sex=["F", "M"] * 20))
    assert prepare(config_of(folder, groups="sex")).group_names == ("F", "M")


def test_settings_of_tables_need_a_table_and_change_no_other_hash() -> None:
    with pytest.raises(ConfigError, match=r"data.domain-column: this setting applies to tables"):
        RunConfig.from_flat({"data.name": "lung", "data.domain-column": "site"})
    assert "encoding" not in prepare(DataConfig(name="heart-disease")).to_json()


def test_what_files_hold_is_in_every_runs_folder_and_said_once(
    three: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of a site says how it was read; warnings are facts of a run, too."""
    for seed in (0, 1):
        settings = SETTINGS | {"data.dir": str(three), "output-dir": str(tmp_path), "seed": seed}
        done = Session(InlineGrid(app, 3), RunConfig.from_flat(settings), Console(quiet=True)).run()
        log = (done / "log.txt").read_text()
        frame = pd.read_csv(three / "north.csv", sep=";", encoding="utf-8-sig")
        first = frame.groupby("patient", sort=False).disease.first()
        tested = first.groupby(first).cumcount() % 5 == 0
        rows = frame[frame.patient.isin(tested.index[tested])]
        share = rows.disease.value_counts(normalize=True).max()
        line = f"north.csv: semicolon between values, utf-8, 6 columns; {len(rows)} of 200 rows "
        assert f"{line}are for tests, {share:.1%} of one class; 100 patients.\n" in log
        assert "decimal commas in age, bmi" in log
        assert "; ignored: ward.\n" in log
        warning = "The column 'ward' is ignored, because north, west lack it."
        assert f"WARNING {warning}" in log
        assert read_facts(done)["data_warnings"] == [warning]
        assert ",domain,west,auc," in (done / "history.csv").read_text()  # as of any two classes
    assert caplog.text.count(warning) == 1
    assert f"- Note: {warning}" in call("report", tmp_path, "--format", "md")


def test_the_command_proposes_a_schema_beside_an_empty_one(three: Path) -> None:
    """The shell has made schema.toml when the command begins."""
    (three / "schema.toml").touch()
    text = call("data", "schema", str(three), "-s", "data.target=disease")
    (three / "schema.toml").write_text(text)
    assert "# Not at north, west." in text
    federation = prepare(config_of(three, target="", patient="patient"))
    columns = {c.name: c for c in Encoding.from_json(federation.encoding).columns}
    assert [*columns] == ["age", "bmi", "sex", "smoking"]
    assert columns["sex"].levels == ("F", "M")


def test_marks_of_missing_cells_and_ranges_are_those_of_the_schema(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "t", a=table(40, dose=[5, 999, 7, 70] * 10))
    lines = ["[columns.dose]", 'kind = "number"', "high = 10", "missing = [999]"]
    (folder / "schema.toml").write_text("\n".join(lines))
    (dose,) = Encoding.from_json(prepare(config_of(folder)).encoding).columns
    assert dose.may_miss
    assert dose.mean < 10
    assert "10 numbers are outside of the schema's range" in caplog.text


def test_a_proposed_range_holds_the_numbers_of_every_domain_and_another_unit_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"a": ["50,5", "71,25"] * 20, "b": ["48.5", "109.75"] * 20}
    folder = tmp_path / "t"
    folder.mkdir()
    for domain, held in weights.items():
        rows = [f"{w};{'yes' if k // 2 % 2 else 'no'}" for k, w in enumerate(held)]
        (folder / f"{domain}.csv").write_text("\n".join(["weight;ill", *rows]))
    target = ["-s", "data.target=ill"]
    (folder / "schema.toml").write_text(call("data", "schema", folder, *target))
    prepare(DataConfig("table", dir=str(folder), target="ill"))
    assert "clipped" not in caplog.text
    grams = (folder / "b.csv").read_text().replace("48.5", "48500").replace("109.75", "109750")
    (folder / "b.csv").write_text(grams)
    with pytest.raises(DataError, match=r"weight: \d+ of \d+ numbers are outside"):
        prepare(DataConfig("table", dir=str(folder), target="ill"))
    assert "Did you mean 'ill'?" in call("data", "schema", folder, "-s", "data.target=il", expect=2)
