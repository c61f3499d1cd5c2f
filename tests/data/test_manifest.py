"""A table that lists a user's images: manifest.csv."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fairflower.config import DataConfig
from fairflower.data import DataError, Federation, prepare
from fairflower.data.cache import make_data_set
from fairflower.data.folders import forget_stamps
from fairflower.data.own_images import DomainImageFolder, MaskFolder
from fairflower.testing import check_data

ROWS = [
    {
        "file": f"scans/day {k % 3}/{k:02}.png",
        "label": "ill" if k % 4 == 0 else "healthy",
        "domain": "north" if k < 24 else "south",
        "patient": f"p{k // 3}",
        "sex": "f" if k % 2 else "m",
        "age": f"{30 + k}.5",
        "edema": "" if k == 5 else str(k % 2),
        "rales": str(k % 3 // 2),
        "time": str(10 + k),
        "event": str(int(k % 5 > 0)),
        "mask": f"drawn/{k}.png",
    }
    for k in range(40)
]


def write(folder: Path, rows: list[dict[str, str]] = ROWS, **columns: list[str]) -> Path:
    """Write images whose gray value is their number, masks, and the manifest."""
    for k, row in enumerate(rows if not folder.exists() or not any(folder.iterdir()) else ()):
        for name, image in (("file", np.full((4, 6), k)), ("mask", np.eye(4, 6) * (k % 2))):
            (folder / row[name]).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.astype(np.uint8)).save(folder / row[name])
    listed = [row | {name: of[k] for name, of in columns.items()} for k, row in enumerate(rows)]
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
    return folder


def config(folder: Path, name: str = "images", **changes: Any) -> DataConfig:
    return DataConfig(name, dir=str(folder), image_size=4, **changes)


def numbers(federation: Federation, domain: str, split: str = "test") -> list[int]:
    """The images of a domain's split by their numbers, sorted."""
    return sorted(federation.test(domain, split).x[:, 0, 0, 0].tolist())


def test_a_manifest_lists_images_classes_and_domains(tmp_path: Path) -> None:
    federation = prepare(config(write(tmp_path)))
    assert federation.domains == ("north", "south")
    assert federation.classes == ("healthy", "ill")
    # In each class of a domain, the first image and every fifth after it.
    ill = [k for k in range(24) if k % 4 == 0]
    healthy = [k for k in range(24) if k % 4]
    assert numbers(federation, "north") == sorted(ill[::5] + healthy[::5])
    for domain, of in (("north", range(24)), ("south", range(24, 40))):
        both = [*federation.test(domain), *federation.test(domain, "train")]
        for x, y in (both[:2], both[2:]):
            assert [k % 4 == 0 for k in x[:, 0, 0, 0].tolist()] == (y == 1).tolist()
        assert sorted(numbers(federation, domain) + numbers(federation, domain, "train")) == [*of]
    check_data(DomainImageFolder, config(tmp_path, groups="sex", patient="patient"))


def test_a_manifest_of_a_folder_of_classes_gives_the_same_examples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for domain in ("a", "b"):
        for label in ("cat", "dog"):
            for k in range(9):
                path = tmp_path / domain / label / f"{k}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (5, 5), np.uint8)).save(path)
                rows.append(f"{path.relative_to(tmp_path)},{label},{domain}")
    folders = prepare(config(tmp_path, clients_per_domain=2))
    (tmp_path / "manifest.csv").write_text("\n".join(["file,label,domain", *rows]))
    listed = prepare(config(tmp_path, clients_per_domain=2))
    assert listed.folder != folders.folder
    assert (listed.fingerprint, listed.division) == (folders.fingerprint, folders.division)


def test_a_column_says_the_split_and_another_the_group(tmp_path: Path) -> None:
    split = ["test" if k >= 30 or k < 6 else "train" for k in range(40)]
    federation = prepare(config(write(tmp_path, split=split), groups="sex"))
    assert numbers(federation, "north") == [*range(6)]
    assert numbers(federation, "south") == [*range(30, 40)]
    assert federation.group_names == ("f", "m")
    (groups,) = federation.test_groups("north")
    x = federation.test("north").x[:, 0, 0, 0]
    assert [("m", "f")[k % 2] for k in x.tolist()] == [federation.group_names[g] for g in groups]
    assert not make_data_set(config(tmp_path)).redrawable
    found = r"2 of 14 patients|[0-9] of [0-9]+ patients have training and test examples"
    with pytest.raises(DataError, match=found) as caught:
        prepare(config(write(tmp_path, split=["test", "train"] * 20), patient="patient"))
    assert "p3" not in str(caught.value)


def test_patients_of_a_manifest_are_in_one_split(tmp_path: Path) -> None:
    federation = prepare(config(write(tmp_path), patient="patient"))
    for domain in federation.domains:
        train, test = ({k // 3 for k in numbers(federation, domain, s)} for s in ("train", "test"))
        assert test
        assert not train & test


def test_without_a_column_of_domains_there_is_one(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "domain"} for row in ROWS]
    assert prepare(config(write(tmp_path / "clinic", rows))).domains == ("clinic",)


@pytest.mark.parametrize(
    ("task", "target", "columns", "names"),
    [
        ("regression", "age", ("age",), ("age",)),
        ("regression", "age;time", ("age", "time"), ("age", "time")),
        ("multilabel", "edema;rales", ("edema", "rales"), ("edema", "rales")),
        ("survival:cuts=20;30", "time;event", ("time", "event"), ()),
    ],
)
def test_numbers_are_targets_of_other_tasks(
    task: str, target: str, columns: tuple[str, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    federation = prepare(config(write(tmp_path), f"images:target={target}", task=task))
    assert federation.classes == names
    for domain in federation.domains:
        x, y = federation.test(domain)
        rows = [ROWS[k] for k in x[:, 0, 0, 0].tolist()]
        expected = [[float(row[name] or "nan") for name in columns] for row in rows]
        np.testing.assert_array_equal(y.reshape(len(y), -1), np.float32(expected))


def test_a_manifest_lists_masks(tmp_path: Path) -> None:
    federation = prepare(config(write(tmp_path), "masks", patient="patient"))
    assert federation.domains == ("north", "south")
    for domain in federation.domains:
        x, y = federation.test(domain)
        assert (y.any(axis=(1, 2)) == (x[:, 0, 0, 0] % 2 == 1)).all()
    check_data(MaskFolder, config(tmp_path, "masks"))
    Image.fromarray(np.eye(5, 6, dtype=np.uint8)).save(tmp_path / ROWS[7]["mask"])
    forget_stamps()
    with pytest.raises(DataError, match=r"drawn/7.png: the mask has 6x5 pixels; expected 6x4"):
        prepare(config(tmp_path, "masks"))


def test_changed_manifests_are_prepared_again(tmp_path: Path) -> None:
    first = prepare(config(write(tmp_path)))
    assert prepare(config(tmp_path)).folder == first.folder
    write(tmp_path, label=["ill", "healthy"] * 20)
    forget_stamps()
    assert prepare(config(tmp_path)).folder != first.folder


def changed(row: int, **values: str) -> dict[str, list[str]]:
    """Columns in which one row has other values."""
    return {
        name: [value if k == row else r[name] for k, r in enumerate(ROWS)]
        for name, value in values.items()
    }


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        (changed(2, file="scans/none.png"), {}, r"line 4: file 'scans/none.png' is not a file in"),
        (changed(2, file="../a.png"), {}, r"line 4: file '../a.png' is outside the folder"),
        (changed(2, file="/a.png"), {}, r"line 4: file '/a.png' is outside the folder"),
        (changed(2, file="manifest.csv"), {}, r"line 4: file .* has no extension of images \(.jpg"),
        (changed(2, file="scans/day 1/./01.png"), {}, r"line 4: file .* is also in line 3. Remove"),
        (changed(2, file=""), {}, r"manifest.csv: line 4 has no file. Add the value"),
        (changed(2, label=""), {}, r"line 4 has no label"),
        (changed(2, patient=""), {"patient": "patient"}, r"line 4 has no patient \(data.patient\)"),
        (changed(2, domain=""), {}, r"line 4 has no domain"),
        ({"split": ["dev"] * 40}, {}, r"line 2: found the split 'dev'; expected train or test"),
        ({}, {"patient": "ward"}, r"found the columns .*; missing: ward"),
        ({}, {"groups": "race"}, r"missing: race"),
        ({}, {"name": "images:target=grade"}, r"missing: grade"),
        ({}, {"name": "images:target=age;time"}, r"found 2 target columns for classification"),
        (
            changed(2, age="31,5"),
            {"name": "images:target=age", "task": "regression"},
            r"line 4: age: found '31,5'; expected a number, such as 1.5",
        ),
        (
            changed(2, age=""),
            {"name": "images:target=age", "task": "regression"},
            r"found nan for example \d+; expected finite numbers",
        ),
        (
            changed(2, edema="2"),
            {"name": "images:target=edema;rales", "task": "multilabel"},
            r"found 2.0; expected 0, 1 or NaN",
        ),
        (changed(2, mask="no.png"), {"name": "masks"}, r"line 4: mask 'no.png' is not a file"),
        (
            {"label": ["Ill", "x"] * 12 + ["ill", "x"] * 8},
            {},
            r"the classes 'Ill' .* Change the labels",
        ),
        ({"domain": ["train", "test"] * 20}, {}, "test, train are not domains"),
        (
            {"patient": ["p"] * 40},
            {"patient": "patient"},
            r"north.* has too few patients: the first",
        ),
        ({}, {"patient": "PatientID"}, r"24 of 24 images are no DICOM files with a PatientID"),
    ],
)
def test_wrong_manifests_are_named(
    columns: dict[str, list[str]], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    write(tmp_path, **columns)
    with pytest.raises(DataError, match=message):
        prepare(config(tmp_path, **settings))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file,label\n", "manifest.csv has no rows. List an image in each row"),
        ("", "found the columns ; missing: file, label"),
        ("file,label,file\na.png,x,b.png\n", "found several columns named file"),
        ('file,label\n"a.png,x\n', "cannot be read as a CSV file"),
        ("file,label\na.png,x,y\n", "line 2 has more values than the header"),
    ],
)
def test_damaged_manifests_are_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        prepare(config(tmp_path))


@pytest.mark.posix
def test_a_manifest_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.csv")
    with pytest.raises(DataError, match=r"manifest.csv is not a regular file"):
        prepare(config(tmp_path))


def test_a_folder_without_a_manifest_has_no_columns(tmp_path: Path) -> None:
    for label in ("a", "b"):
        for k in range(6):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.fromarray(np.full((4, 4), k, np.uint8)).save(tmp_path / label / f"{k}.png")
    for settings, message in (
        ({"patient": "patient"}, "data.patient = 'patient': images has no such column. List the"),
        (
            {"groups": "sex"},
            r"data.groups = 'sex': images has no such column. List .* manifest.csv",
        ),
        ({"name": "images:target=age"}, r"found 1 target columns .* expected one, in .*csv"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(config(tmp_path, **settings))
