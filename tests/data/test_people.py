"""Groups of people by a sensitive attribute: in embedded tables, in files and at sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from runs import run
from test_sites import grid

from fairflower.client_app import _data
from fairflower.config import DataConfig, RunConfig
from fairflower.data import Federation, prepare
from fairflower.errors import DataError
from fairflower.published.tables import HeartDisease, RandHIE
from fairflower.report import read_run
from fairflower.server.session import Session
from fairflower.testing import check_data


def everybody(name: str, groups: str, **changes: Any) -> tuple[Federation, Any, Any]:
    """A federation, and the features and the group of every person in it."""
    federation = prepare(DataConfig(name=name, groups=groups, clients_per_domain=1, **changes))
    splits = [
        (client.client_id, split) for client in federation.clients for split in ("train", "test")
    ]
    x = [split.x for k, s in splits for split in federation.splits(k, s)]
    return federation, np.concatenate(x), np.concatenate([federation.groups_of(*s) for s in splits])


def test_groups_of_patients_match_their_sex_and_age_features() -> None:
    federation, x, sex = everybody("heart-disease", "sex")
    assert federation.group_names == ("female", "male")
    np.testing.assert_array_equal(sex, x[:, HeartDisease.feature_names.index("male")])
    assert np.bincount(sex).tolist() == [174, 566]
    federation, x, age = everybody("heart-disease", "age")
    assert federation.group_names == ("under 55", "55 or older")
    np.testing.assert_array_equal(age, x[:, HeartDisease.feature_names.index("age")] >= 55)


def test_groups_of_the_insured_match_their_sex_feature_and_health_domain() -> None:
    federation, x, sex = everybody("randhie", "sex")
    assert federation.group_names == ("male", "female")
    np.testing.assert_array_equal(sex, x[:, RandHIE.feature_names.index("female")])
    by_health = prepare(DataConfig(name="randhie", groups="health", clients_per_domain=1))
    for client in by_health.clients:
        (own,) = set(by_health.groups_of(client.client_id).tolist())
        assert by_health.group_names[own] == client.domain
    by_site, _, health = everybody("randhie:groups=site", "health")
    sizes = [sum(c.num_examples for c in by_health.clients if c.domain == d) for d in ("poor",)]
    assert np.bincount(health)[3] == sizes[0] + by_health.test_sizes[3]
    assert len(by_site.domains) == 6


def test_groups_do_not_change_the_examples_of_clients() -> None:
    plain, grouped = (
        prepare(DataConfig(name="heart-disease", groups=groups, validation_fraction=0.2))
        for groups in ("", "sex")
    )
    assert plain.clients == grouped.clients
    assert plain.digest != grouped.digest
    for client in range(len(plain.clients)):
        names = ("train", "test", "validation")
        for a, b in zip(plain.splits(client, *names), grouped.splits(client, *names), strict=True):
            np.testing.assert_array_equal(a.x, b.x)
        for name, split in zip(names, grouped.splits(client, *names), strict=True):
            male = split.x[:, HeartDisease.feature_names.index("male")]
            np.testing.assert_array_equal(grouped.groups_of(client, name), male)
    data = _data(grouped, 0)
    assert data.num_groups == 2
    np.testing.assert_array_equal(
        data.tested_on("validation").groups["test"], data.groups["validation"]
    )
    np.testing.assert_array_equal(data.tested_on("train").groups["test"], data.groups["train"])


def test_a_held_out_domain_has_groups() -> None:
    config = DataConfig(name="heart-disease", groups="sex", held_out="hungary")
    federation = prepare(config)
    (groups,) = federation.test_groups("hungary")
    male = federation.test("hungary").x[:, HeartDisease.feature_names.index("male")]
    np.testing.assert_array_equal(groups, male)


@pytest.mark.parametrize(
    ("made_by", "groups"),
    [(RandHIE, "sex"), (RandHIE, "health"), (HeartDisease, "sex"), (HeartDisease, "age")],
)
def test_the_embedded_tables_with_groups_pass_check_data(made_by: Any, groups: str) -> None:
    check_data(made_by, DataConfig(groups=groups))


# --- files ---------------------------------------------------------------------------------


RNG = np.random.default_rng(0)


def npz(path: Path, train: Any, test: Any, name: str = "sex", classes: int = 2) -> None:
    """Write gray images of two classes, with the groups of people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}_train": np.array(train), f"{name}_test": np.array(test)}
    for split, groups in (("train", train), ("test", test)):
        y = np.arange(len(groups)) // 2 % classes
        arrays[f"y_{split}"] = y
        noise = RNG.integers(0, 40, (len(groups), 8, 8))
        arrays[f"x_{split}"] = (noise + 150 * y[:, None, None]).astype(np.uint8)
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("women", "men", "names"),
    [("female", "male", ("female", "male")), (1, 0, ("0", "1"))],
    ids=["texts", "numbers"],
)
def test_groups_are_read_from_an_array_of_an_npz_file(
    tmp_path: Path, women: Any, men: Any, names: tuple[str, ...]
) -> None:
    npz(tmp_path / "a.npz", [women, men] * 6, [men, women, women, men])
    npz(tmp_path / "b.npz", [men] * 8, [men] * 4)
    config = DataConfig(name="npz", dir=str(tmp_path), groups="sex", clients_per_domain=1)
    federation = prepare(config)
    assert federation.group_names == names
    counts = [np.bincount(federation.groups_of(k, "train"), minlength=2) for k in range(2)]
    assert [sum(c) for c in counts] == [12, 8]
    assert sorted(counts[1].tolist()) == [0, 8]  # the second client has only men


def test_groups_are_read_from_a_column_of_a_csv_file(tmp_path: Path) -> None:
    rows = [
        f"text {k},{'good' if k % 2 else 'bad'},{'young' if k < 15 else 'old'}" for k in range(30)
    ]
    for domain in ("books", "films"):
        text = "\n".join(["text,label,age group", *rows])
        (tmp_path / f"{domain}.csv").write_text(text)
    config = DataConfig(name="texts", dir=str(tmp_path), groups="age group", clients_per_domain=2)
    federation = prepare(config)
    assert federation.group_names == ("old", "young")
    counts = sum(np.bincount(federation.groups_of(k, "train"), minlength=2) for k in range(4))
    tested = sum(np.bincount(federation.groups_of(k), minlength=2) for k in range(4))
    assert (counts + tested).tolist() == [30, 30]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda f: npz(f / "b.npz", [0] * 8, [0] * 4, name="age"),
            r"b\.npz: sex_train: found only",
        ),
        (lambda f: npz(f / "b.npz", [0.5] * 8, [1] * 4), r"b\.npz: sex_train: found float64 \[8\]"),
        (lambda f: npz(f / "b.npz", range(200), range(200)), "found 202 different values"),
        (lambda f: npz(f / "b.npz", ["male", ""] * 4, ["male"] * 4), "an empty text for example 1"),
        (
            lambda f: npz(f / "b.npz", ["Male", "female"] * 4, ["female"] * 4),
            r"'sex': the groups 'Male' \(in b\), 'male' \(in a\) differ only in case",
        ),
        (lambda f: npz(f / "b.npz", [0] * 9, [1] * 6, classes=3), "but npz has 3"),
    ],
    ids=["missing", "fractions", "no groups but numbers", "empty", "twins", "three classes"],
)
def test_a_file_without_usable_groups_is_named(tmp_path: Path, write: Any, message: str) -> None:
    npz(tmp_path / "a.npz", ["female", "male"] * 6, ["male", "female"] * 2)
    write(tmp_path)
    with pytest.raises(DataError, match=message):
        prepare(DataConfig(name="npz", dir=str(tmp_path), groups="sex", clients_per_domain=1))


def test_a_row_without_a_group_and_a_missing_column_are_named(tmp_path: Path) -> None:
    path = tmp_path / "books.csv"
    config = DataConfig(name="texts", dir=str(tmp_path), groups="sex", clients_per_domain=1)
    path.write_text("text,label,sex\nfine,good,f\npoor,bad,\n")
    with pytest.raises(DataError, match=r"books\.csv: line 3 has no sex"):
        prepare(config)
    path.write_text("text,label\nfine,good\npoor,bad\n")
    with pytest.raises(DataError, match=r"books\.csv: .*missing: sex"):
        prepare(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(name="heart-disease", groups="race"), r"no such attribute \(sex, age\)"),
        (DataConfig(name="uci-digits", groups="sex"), r"no such attribute \(it has none\)"),
    ],
)
def test_an_unknown_attribute_is_named(config: DataConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(config)


# --- sites ---------------------------------------------------------------------------------


def at_sites(tmp_path: Path, nodes: list[dict[str, Any]], **changes: Any) -> Path:
    config = RunConfig.from_flat(
        {
            "num-server-rounds": 2,
            "train.local-epochs": 1,
            "data.name": "npz",
            "data.groups": "sex",
            "evaluate.by": "clients",
            "output-dir": str(tmp_path / "runs"),
            "data.smallest-group": 1,
            **changes,
        }
    )
    few = [node | {"smallest-group": 1} for node in nodes]
    return Session(grid(few), config, Console(quiet=True)).run()


def test_sites_with_different_groups_use_common_group_numbers(tmp_path: Path) -> None:
    """A site with only men, and a site with both groups."""
    npz(tmp_path / "all" / "a.npz", ["male"] * 8, ["male"] * 4)
    npz(tmp_path / "all" / "b.npz", ["male", "female"] * 4, ["female", "male"] * 2)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / "all" / f"{name}.npz").rename(tmp_path / name / f"{name}.npz")
    nodes = [{"domain": name, "data-dir": tmp_path / name} for name in "ba"]
    actual = read_run(at_sites(tmp_path, nodes))
    (tmp_path / "both").mkdir()
    for name in "ab":
        (tmp_path / name / f"{name}.npz").rename(tmp_path / "both" / f"{name}.npz")
    settings = {
        "num-server-rounds": 2,
        "train.local-epochs": 1,
        "data.name": "npz",
        "data.dir": str(tmp_path / "both"),
        "data.groups": "sex",
        "data.clients-per-domain": 1,
        "output-dir": str(tmp_path / "runs"),
    }
    expected = read_run(run(RunConfig.from_flat(settings), nodes=2))
    assert actual.info["groups"] == expected.info["groups"] == {"sex": ["female", "male"]}
    for metric, tests in actual.group_metrics.items():
        whole = expected.group_metrics[metric].values[1:]  # sites do not test round 0
        np.testing.assert_allclose(tests.values, whole, equal_nan=True)
    assert "client 0 of a" in actual.info["undefined_metrics"]


def test_a_site_without_groups_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    npz(tmp_path / "a" / "a.npz", [0, 1] * 4, [0, 1] * 2)
    npz(tmp_path / "b" / "b.npz", [0, 1] * 4, [0, 1] * 2, name="age")
    nodes = [{"domain": name, "data-dir": tmp_path / name} for name in "ab"]
    run = at_sites(tmp_path, nodes, **{"min-clients": 1})
    assert read_run(run).domains == ("a",)
    assert any("site 'b': sex_train in an .npz file is missing" in m for m in caplog.messages)


def test_a_single_group_is_refused(tmp_path: Path) -> None:
    npz(tmp_path / "a.npz", ["male"] * 8, ["male"] * 4)
    config = DataConfig(name="npz", dir=str(tmp_path), groups="sex", clients_per_domain=1)
    with pytest.raises(DataError, match="found only the group male"):
        prepare(config)
