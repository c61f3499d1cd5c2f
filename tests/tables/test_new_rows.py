"""A trained model predicts new rows, from the run folder alone and in any order of columns."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command import call
from hospital_tables import write_three

import fairflower
from fairflower.api.final_model import Network
from fairflower.data import DataError
from fairflower.errors import ConfigError, RunFolderError

ROW = {"age": 72.1, "bmi": 31.5, "sex": "M", "smoking": "current"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two rounds, whose tables are gone."""
    folder = write_three(tmp_path_factory.mktemp("hospitals") / "three")
    settings = {"data.name": "table", "data.dir": str(folder), "data.target": "disease"}
    settings |= {"data.patient": "patient", "num-server-rounds": 2, "strategy.name": "fedavg"}
    settings |= {"engine": "inline", "output-dir": str(folder.parent / "runs")}
    result = fairflower.run(settings)
    shutil.rmtree(folder)
    return result


@pytest.fixture(scope="module")
def network(run: Any) -> Network:
    made: Network = run.network()
    return made


def test_a_row_is_encoded_by_what_the_run_learnt(run: Any, network: Network) -> None:
    facts = json.loads((run.path / "run.json").read_text())
    known = json.loads(facts["table"]["federation"]["encoding"])
    column = {entry["name"]: entry for entry in known["columns"]}
    numbers = [(ROW[n] - column[n]["mean"]) / column[n]["std"] for n in ("age", "bmi")]  # type: ignore[operator]
    x = torch.tensor([[*numbers, 0, 0, 1, 1, 0, 0]], dtype=torch.float32)
    shares = network(x).double().softmax(1)[0].tolist()
    found = network.from_row(ROW)
    assert list(found) == ["prediction", "probability of no", "probability of yes"]
    assert [found[f"probability of {name}"] for name in ("no", "yes")] == pytest.approx(shares)
    assert found["prediction"] == ("no", "yes")[int(np.argmax(shares))]


@pytest.mark.parametrize(
    "row",
    [
        dict(reversed(ROW.items())),
        {**ROW, "ward": "W1"},
        {**ROW, "age": "72,1", "bmi": "31.5 kg"},
        {**ROW, "age": np.float64(72.1)},
    ],
)
def test_the_order_and_other_columns_change_nothing(network: Network, row: dict[str, Any]) -> None:
    assert network.from_row(row) == network.from_row(ROW)


def test_what_may_be_missing_is_imputed_and_what_is_unknown_is_said(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    without = {name: value for name, value in ROW.items() if name != "bmi"}
    for empty in (None, "", float("nan"), "NA"):
        assert network.from_row({**ROW, "bmi": empty}) == network.from_row(without)
    network.from_row({**ROW, "smoking": "pipe"})
    assert "smoking: the model does not know the level of row 1: it counts as other" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": None}, "the row: row 1: age is missing"),
        ({"age": "old"}, "age: 1 of 1 cells are no numbers"),
    ],
)
def test_rows_that_lack_something_are_refused(
    network: Network, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        network.from_row({**ROW, **change})
    with pytest.raises(DataError, match="Unknown column 'age'"):
        network.from_row({"bmi": 3})


def test_the_command_predicts_a_file_in_another_form(
    run: Any, network: Network, tmp_path: Path
) -> None:
    rows = tmp_path / "new.csv"
    rows.write_text("smoking;sex;note;bmi;age\ncurrent;M;a;31,5;72,1\nnever;F;b;;45\n")
    out = tmp_path / "out.csv"
    call("predict", str(run.path), str(rows), "--out", str(out))
    first, second = csv.DictReader(io.StringIO(out.read_text()))
    assert first["note"] == "a"
    expected = network.from_row(ROW)
    assert first["probability of yes"] == str(round(expected["probability of yes"], 6))
    assert second["prediction"] in ("no", "yes")


def test_the_command_names_a_column_that_is_missing_and_lines_of_the_file(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "new.csv"
    rows.write_text(
        'age,sex,smoking,note,bmi2\n60,F,never,"a\nb",1\n\n70,M,pipe,,2\n71,M,pipe,,2\n'
    )
    assert "probability of yes" in call("predict", str(run.path), str(rows))
    assert "the column 'bmi', which the model uses, is not there: all its cells" in caplog.text
    assert "the model does not know the level of lines 5, 6" in caplog.text
    rows.write_text(rows.read_text().replace("71,", "NA,"))
    said = call("predict", str(run.path), str(rows), expect=1)
    assert "line 6: age is missing" in " ".join(said.split())


def test_the_encoding_is_in_exported_models(run: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    from fairflower.api.final_model import export

    path = export(run.run, "state-dict", tmp_path / "x.safetensors")
    with safe_open(path, "pt") as file:
        known = json.loads(file.metadata()["encoding"])
    assert [column["name"] for column in known["columns"]] == ["age", "bmi", "sex", "smoking"]


def test_a_damaged_encoding_and_other_data_are_named(run: Any, tmp_path: Path) -> None:
    shutil.copytree(run.path, copy := tmp_path / "run")
    facts = json.loads((copy / "run.json").read_text())
    known = facts["table"]["federation"]
    known["encoding"] = known["encoding"].replace('"std": 1.0', '"std": -1.0')
    (copy / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunFolderError, match=r"std = -1.0"):
        fairflower.read(copy)[0].network().from_row(ROW)
    del known["shape"]
    (copy / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunFolderError, match=r"table.federation cannot be read"):
        fairflower.read(copy)[0].network()
    made = Network(torch.nn.Identity(), fairflower.data.prepare(_heart()))
    with pytest.raises(ConfigError, match="no table"):
        made.from_row(ROW)


def _heart() -> Any:
    from fairflower.config import DataConfig

    return DataConfig(name="heart-disease")


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (
            {"data.time": "days", "data.event": "died", "data.task": "survival:cuts=10;20;30"},
            ["mean time until 30", "probability of an event until 30", "survival at 10"],
        ),
        ({"data.target": "days", "data.drop": "died"}, ["prediction"]),
        ({"data.target": "a,b"}, ["probability of a", "probability of b"]),
    ],
)
def test_other_tasks_predict_in_their_words(
    tmp_path: Path, settings: dict[str, Any], keys: list[str]
) -> None:
    rng = np.random.default_rng(0)
    for name in ("x", "y"):
        frame = pd.DataFrame({"size": rng.normal(5, 1, 40), "days": rng.integers(1, 40, 40)})
        frame = frame.assign(died=rng.integers(0, 2, 40), a=[0, 1] * 20, b=[1, 0, 1, 1] * 10)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    settings = {"data.name": "table", "data.dir": str(tmp_path), **settings}
    settings |= {"num-server-rounds": 1, "engine": "inline", "output-dir": str(tmp_path / "runs")}
    settings |= {"strategy.name": "fedavg", "data.features": "size"}
    found = fairflower.run(settings).network().from_row({"size": "5.5"})
    assert list(found)[: len(keys)] == keys
    assert all(0 <= v <= 1 for k, v in found.items() if "probability" in k or "survival" in k)


def test_differential_privacy_needs_a_schema_that_says_all(tmp_path: Path) -> None:
    folder = write_three(tmp_path / "three")
    settings = {"data.name": "table", "data.dir": str(folder), "data.target": "disease"}
    settings |= {"data.features": "age,sex", "num-server-rounds": 1, "engine": "inline"}
    settings |= {"strategy.name": "uniform", "privacy.noise-multiplier": 0.1}
    settings |= {"output-dir": str(tmp_path / "runs"), "model.name": "mlp"}
    with pytest.raises(ConfigError, match="with sums = false"):
        fairflower.run(settings)
    columns = '[columns.age]\nkind = "number"\nlow = 20\nhigh = 100\n[columns.sex]\n'
    columns += 'kind = "category"\nlevels = ["F", "M"]\n'
    (folder / "schema.toml").write_text(f"sums = false\n{columns}")
    found = fairflower.run(settings).network().from_row({"age": 60, "sex": "F"})
    assert found["prediction"] in ("no", "yes")


def test_a_model_is_tested_on_tables_that_are_encoded_alike(tmp_path: Path) -> None:
    folder = write_three(tmp_path / "three")
    settings = {"data.name": "table", "data.dir": str(folder), "data.target": "disease"}
    settings |= {"data.drop": "patient", "num-server-rounds": 1, "engine": "inline"}
    settings |= {"strategy.name": "fedavg", "output-dir": str(tmp_path / "runs")}
    run = fairflower.run(settings)
    again = fairflower.evaluate(run.path, output_dir=str(tmp_path / "runs"))
    assert again.accuracy == run.accuracy
    (folder / "west.csv").unlink()  # what training rows taught stays, whatever the others are
    fewer = fairflower.evaluate(run.path, output_dir=str(tmp_path / "runs"))
    assert fewer.accuracy == {d: run.accuracy[d] for d in ("north", "south")}
    with pytest.raises(ConfigError, match="clients would encode these rows diff"):
        fairflower.evaluate(run.path, {"evaluate.by": "both"}, output_dir=str(tmp_path / "runs"))
