"""Folders of images by domain and class, saved data sets, the Hub; every class on each client."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    Value,
    concatenate_datasets,
)
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pictures

from fairflower.config import DataConfig
from fairflower.data import Augment, Federation, prepare, with_absolute_dir
from fairflower.data.folders import ClassFolders, _digest
from fairflower.data.partition import cover_every_class, divide
from fairflower.errors import DataError
from fairflower.published.image_sets import PACS, DomainNet, OfficeCaltech

RNG = np.random.default_rng(0)
DATA_SETS: dict[str, type[ClassFolders]] = {
    "office-caltech": OfficeCaltech,
    "pacs": PACS,
    "domainnet": DomainNet,
}


@pytest.fixture
def office_dir() -> str:
    folder = os.environ.get("FAIRFLOWER_DATA", "")
    if not any(Path(folder, name, "dslr").is_dir() for name in ("", *OfficeCaltech.subfolders)):
        pytest.skip("FAIRFLOWER_DATA does not name a folder with Office-Caltech-10")
    return folder


def small(name: str, folder: Path | str, **changes: Any) -> DataConfig:
    """Two domains of 4x4 pixels, two clients each that get a third of the images."""
    chosen = {"domains": ",".join(DATA_SETS[name].domain_names[:2]), "clients_per_domain": 2}
    return DataConfig(
        **{"name": name, "dir": str(folder), "image_size": 4, "fraction": 0.3, **chosen, **changes}
    )


def write(folder: Path, name: str, count: int = 10) -> None:
    """``count`` images per class; pixel [0, 0] is (class, number, domain)."""
    for d, domain in enumerate(DATA_SETS[name].domain_names[:2]):
        for c, label in enumerate(DATA_SETS[name].classes):
            place = folder / domain / label
            place.mkdir(parents=True)
            for number in range(count):
                Pictures.fromarray(picture(c, number, d)).save(place / f"{number:03d}.png")


def picture(label: int, number: int, domain: int) -> np.ndarray:
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[:] = (label, number, domain)
    return pixels


def rows(name: str, count: int = 10) -> dict[str, list[Any]]:
    """What ``write`` writes, as the columns of a data set; not in order of class."""
    names = DATA_SETS[name]
    numbers = [
        (c, number, d)
        for d in range(2)
        for number in range(count)
        for c in reversed(range(len(names.classes)))
    ]
    return {
        "image": [Pictures.fromarray(picture(*n)) for n in numbers],
        "domain": [names.domain_names[d] for _, _, d in numbers],
        "label": [c for c, _, _ in numbers],
    }


def data_set(name: str, label: Any = None, values: list[Any] | None = None) -> Dataset:
    """``rows``, with labels of the feature type ``label``: the classes unless given."""
    label = label or ClassLabel(names=list(DATA_SETS[name].classes))
    features = Features({"image": Image(), "domain": Value("string"), "label": label})
    columns = rows(name)
    return Dataset.from_dict({**columns, "label": values or columns["label"]}, features=features)


def contents(federation: Federation) -> list[np.ndarray]:
    clients = [client.client_id for client in federation.clients]
    splits = [split(i) for i in clients for split in (federation.train, federation.client_test)]
    return [array for split in splits for array in split]


def assert_same(one: Federation, other: Federation) -> None:
    assert one.clients == other.clients
    for mine, yours in zip(contents(one), contents(other), strict=True):
        np.testing.assert_array_equal(mine, yours)


# --- every class on every client --------------------------------------------------------


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_cover_every_class_gives_each_client_all_classes_and_shares_only_rare_ones(
    counts: list[int], seed: int, data: st.DataObject
) -> None:
    total, kinds = sum(counts), len(counts)
    clients = data.draw(st.integers(1, min(6, total // kinds)), label="clients")
    each = st.integers(kinds, total // clients)
    sizes = data.draw(st.lists(each, min_size=clients, max_size=clients), label="sizes")
    values = np.repeat(np.arange(kinds), counts)
    before = np.random.default_rng(seed).permutation(total)
    after = cover_every_class(before, values, sizes, np.random.default_rng(seed))

    def parts(order: np.ndarray) -> list[np.ndarray]:
        return np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])

    assert set(after) == set(range(total))
    for part, size in zip(parts(after), sizes, strict=True):
        assert len(set(part)) == size
        assert set(values[part]) == set(range(kinds))
    for kind, count in enumerate(counts):
        held = np.concatenate([part[values[part] == kind] for part in parts(after)])
        if count >= clients:
            assert len(set(held)) == len(held)
        else:
            assert len(held) == clients
            assert set(held) == set(np.flatnonzero(values == kind))
    again = cover_every_class(before, values, sizes, np.random.default_rng(seed))
    np.testing.assert_array_equal(after, again)
    if all(set(values[part]) == set(range(kinds)) for part in parts(before)):
        np.testing.assert_array_equal(after, before)


def test_a_missing_class_is_taken_from_unassigned_examples() -> None:
    values = np.array([0, 1, 0, 0, 1, 1])
    after = cover_every_class(np.arange(6), values, [2, 2], np.random.default_rng(0))
    assert after[:2].tolist() == [0, 1]
    assert sorted(values[after[2:4]]) == [0, 1]
    assert after[4:].tolist() in ([2, 5], [4, 2], [3, 5], [4, 3])


def test_every_client_holds_every_class_with_the_option() -> None:
    labels = np.repeat(range(4), (1, 2, 1, 8))
    every = divide("b", labels, [4] * 3, 5, every_class=True)
    for part in every:
        assert sorted(labels[part].tolist()) == [0, 1, 2, 3]
    again = divide("b", labels, [4] * 3, 5, every_class=True)
    assert [part.tolist() for part in again] == [part.tolist() for part in every]
    plain = divide("b", labels, [4] * 3, 5)
    assert [part.tolist() for part in plain] != [part.tolist() for part in every]


def test_the_option_changes_nothing_if_all_clients_already_hold_every_class() -> None:
    labels = np.repeat(range(3), 10)
    every = divide("a", labels, [10] * 3, 5, every_class=True)
    plain = divide("a", labels, [10] * 3, 5)
    assert [part.tolist() for part in every] == [part.tolist() for part in plain]


def test_fewer_examples_per_client_than_classes_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"domain 'a' needs examples of all 3 classes, but gets only 2"
    ):
        divide("a", np.array([0, 1, 2] * 2), [2, 2], 0, every_class=True)


# --- the papers' settings ---------------------------------------------------------------


def test_office_caltech_settings_match_the_paper(tmp_path: Path) -> None:
    write(tmp_path, "office-caltech", 3)
    federation = prepare(small("office-caltech", tmp_path, image_size=0, fraction=0.45))
    assert (federation.shape, federation.num_classes) == ((3, 192, 192), 10)
    assert federation.mean == (0.485, 0.456, 0.406)
    assert federation.std == (0.229, 0.224, 0.225)
    assert federation.augment == Augment(crop_padding=0, horizontal_flip=True)
    assert OfficeCaltech.fraction == 0.1
    assert federation.sources == (str(tmp_path / "amazon"), str(tmp_path / "caltech"))


def test_pacs_settings_match_the_paper(tmp_path: Path) -> None:
    write(tmp_path, "pacs", 5)
    federation = prepare(small("pacs", tmp_path, image_size=0))
    assert federation.domains == ("photo", "art_painting")
    assert (federation.shape, federation.num_classes) == ((3, 128, 128), 7)
    assert federation.augment == Augment(crop_padding=0, horizontal_flip=True)
    assert PACS.fraction == 0.1


def test_domainnet_settings_match_fedgcr(tmp_path: Path) -> None:
    write(tmp_path, "domainnet", 5)
    federation = prepare(small("domainnet", tmp_path, image_size=0))
    assert federation.domains == ("clipart", "real")
    assert (federation.shape, federation.num_classes) == ((3, 224, 224), 10)
    assert (federation.mean, federation.std) == ((0.0,) * 3, (1.0,) * 3)
    assert federation.augment == Augment(horizontal_flip=True)
    assert DomainNet.domain_names[2:] == ("painting", "sketch", "quickdraw", "infograph")


def test_domainnet_ignores_its_other_classes(tmp_path: Path) -> None:
    write(tmp_path / "files", "domainnet")
    ten = prepare(small("domainnet", tmp_path / "files"))
    for domain in ("clipart", "real"):
        other = tmp_path / "files" / domain / "aircraft_carrier"
        other.mkdir()
        Pictures.fromarray(picture(99, 0, 0)).save(other / "000.png")
    assert_same(ten, prepare(small("domainnet", tmp_path / "files")))
    numbers = rows("domainnet")["label"]
    names = ["aircraft_carrier", *DomainNet.classes]
    more = data_set("domainnet", ClassLabel(names=names), [c + 1 for c in numbers])
    other_rows = more.select(range(3)).map(lambda row: {"label": 0})
    concatenate_datasets([other_rows, more]).save_to_disk(str(tmp_path / "saved"))
    assert_same(ten, prepare(small("domainnet", tmp_path / "saved")))


def test_office_caltech_splits_by_index_in_torchvisions_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    transforms = pytest.importorskip("torchvision.transforms")
    for label in OfficeCaltech.classes:
        place = tmp_path / "dslr" / ("back_pack" if label == "backpack" else label)
        place.mkdir(parents=True)
        for name in ("10.jpg", "9.JPG", "b.png", "B.bmp", "a.jpeg"):
            Pictures.fromarray(RNG.integers(0, 256, (9, 13, 3), np.uint8)).save(place / name)
        (place / "notes.txt").write_text("no image")
    config = small("office-caltech", tmp_path, domains="dslr", image_size=8)
    ours = OfficeCaltech(config)
    theirs = datasets.ImageFolder(str(tmp_path / "dslr"), transforms.Resize((8, 8)))
    for split, rest in (("train", range(8)), ("test", (8, 9))):
        expected = [theirs[i] for i in range(50) if i % 10 in rest]
        labels = ours.labels("dslr", split)
        assert labels.tolist() == [label for _, label in expected]
        pixels = ours.images("dslr", split, np.arange(len(labels)))
        np.testing.assert_array_equal(
            pixels, np.stack([np.asarray(image) for image, _ in expected])
        )


def test_pacs_test_sets_have_the_papers_sizes() -> None:
    published = {
        "photo": ((189, 202, 182, 186, 199, 280, 432), 337),
        "art_painting": ((379, 255, 285, 184, 201, 295, 449), 411),
        "cartoon": ((389, 457, 346, 135, 324, 288, 405), 471),
        "sketch": ((772, 740, 753, 608, 816, 80, 160), 788),
    }
    data = PACS(DataConfig(name="pacs"))
    clients = []
    for counts, test_size in published.values():
        labels = np.repeat(np.arange(7), counts)
        test = data.is_test(labels)
        assert test.sum() == test_size
        assert np.bincount(labels[test]).tolist() == [-(-count // 5) for count in counts]
        clients.append(data.train_size("photo", int((~test).sum()), 5) // 5)
    assert clients == [133, 163, 187, 314]


@pytest.mark.slow
def test_real_office_caltech_has_the_papers_sizes(office_dir: str) -> None:
    config = DataConfig(name="office-caltech", dir=office_dir, image_size=8)
    data = OfficeCaltech(config)
    train = {domain: data.labels(domain, "train") for domain in data.domains}
    sizes = {"amazon": 768, "caltech": 899, "dslr": 127, "webcam": 237}
    assert {domain: len(labels) for domain, labels in train.items()} == sizes
    real = prepare(config)
    assert dict(zip(real.domains, real.test_sizes, strict=True)) == {
        "amazon": 190,
        "caltech": 224,
        "dslr": 30,
        "webcam": 58,
    }
    expected = [76] * 5 + [89] * 5 + [12] * 5 + [23] * 5
    assert [client.num_examples for client in real.clients] == expected
    assert min(min(client.class_counts) for client in real.clients) == 1
    assert real.train(0).x.std() > 30


@pytest.mark.parametrize("seed", range(5))
def test_real_office_caltech_clients_are_disjoint(office_dir: str, seed: int) -> None:
    data = OfficeCaltech(DataConfig(name="office-caltech", dir=office_dir))
    labels = data.labels("dslr", "train")
    held = np.concatenate(divide("dslr", labels, [12] * 5, seed, every_class=True))
    assert len(set(held.tolist())) == 60


# --- the folder -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("office-caltech", "office_caltech10"),
        ("office-caltech", "office_caltech_10"),
        ("pacs", "pacs"),
        ("pacs", "kfold"),
        ("pacs", "PACS/kfold"),
    ],
)
def test_the_domains_may_be_in_a_subfolder(tmp_path: Path, name: str, place: str) -> None:
    write(tmp_path / "flat", name)
    write(tmp_path / "deep" / place, name)
    deep = prepare(small(name, tmp_path / "deep"))
    assert_same(prepare(small(name, tmp_path / "flat")), deep)
    assert deep.sources[0] == str(tmp_path / "deep" / place / deep.domains[0])


@pytest.mark.parametrize("name", DATA_SETS)
def test_images_keep_their_labels_and_splits_are_disjoint(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    federation = prepare(small(name, tmp_path))
    for d, domain in enumerate(federation.domains):
        seen = {}
        for split in ("train", "test"):
            parts = [
                federation.train(i) if split == "train" else federation.client_test(i)
                for i in federation.clients_of(domain)
            ]
            for x, y in parts:
                np.testing.assert_array_equal(x[:, 0, 0, 0], y)
                assert set(x[:, 2, 0, 0]) == {d}
            ids = [tuple(image[:, 0, 0]) for x, _ in parts for image in x]
            assert len(set(ids)) == len(ids)
            seen[split] = set(ids)
        assert not seen["train"] & seen["test"]
        assert len(seen["test"]) == len(DATA_SETS[name].classes) * 2


def test_only_chosen_images_are_decoded(tmp_path: Path) -> None:
    write(tmp_path, "domainnet")
    config = small("domainnet", tmp_path, domains="clipart", test_examples=2)
    good = prepare(config)
    kept = {tuple(image[:2, 0, 0]) for x in contents(good)[::2] for image in x}
    spoiled = 0
    for path in (tmp_path / "clipart").rglob("*.png"):
        if (DomainNet.classes.index(path.parent.name), int(path.stem)) not in kept:
            path.write_bytes(b"broken")
            spoiled += 1
    assert spoiled == 100 - 2 * 24 - 2
    _digest.cache_clear()  # as in another process
    again = prepare(config)
    assert again.folder != good.folder
    assert_same(good, again)
    with pytest.raises(
        DataError,
        match=r"\.png cannot be read as an image: found an unknown format; expected .*Replace",
    ):
        prepare(replace(config, test_examples=0))


def test_grayscale_and_palette_images_become_rgb(tmp_path: Path) -> None:
    write(tmp_path, "pacs")
    grey = Pictures.fromarray(np.full((4, 4), 77, np.uint8))
    for path in (tmp_path / "photo" / "dog").iterdir():
        grey.convert("P" if path.stem == "001" else "L").save(path)
    federation = prepare(small("pacs", tmp_path, domains="photo"))
    x, y = federation.test("photo")
    assert (x[y == 0] == 77).all()


def test_added_and_changed_files_are_prepared_again(tmp_path: Path) -> None:
    write(tmp_path, "pacs")
    config = small("pacs", tmp_path)
    folders = [prepare(config).folder]
    assert prepare(config).folder == folders[0]
    extra = tmp_path / "photo" / "dog" / "extra.png"
    Pictures.fromarray(picture(0, 99, 0)).save(extra)
    folders.append(prepare(config).folder)
    Pictures.fromarray(picture(0, 100, 0)).resize((9, 9)).save(extra)
    _digest.cache_clear()  # as in another process
    folders.append(prepare(config).folder)
    assert len(set(folders)) == 3


def test_a_class_folder_is_listed_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "pacs")
    listed: Counter[str] = Counter()
    of_folder = Path.iterdir

    def counted(path: Path) -> Iterator[Path]:
        listed[str(path)] += 1
        return of_folder(path)

    pacs = PACS(small("pacs", tmp_path))
    monkeypatch.setattr(Path, "iterdir", counted)
    pacs.labels("photo", "train")
    assert {listed[str(tmp_path / "photo" / name)] for name in PACS.classes} == {1}


def test_a_resolved_config_needs_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "pacs")
    monkeypatch.setenv("FAIRFLOWER_DATA", str(tmp_path))
    config = replace(small("pacs", ""), dir="")
    here = prepare(config)
    resolved = with_absolute_dir(config)
    monkeypatch.delenv("FAIRFLOWER_DATA")
    assert prepare(resolved) == here


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Office-Caltech-10 is not on the .*Hub. Set data.dir"):
        prepare(DataConfig(name="office-caltech"))
    config = small("office-caltech", tmp_path)
    with pytest.raises(
        DataError, match=r"is neither in .* subfolders office_caltech10, .*save_to_disk"
    ):
        prepare(config)
    with pytest.raises(
        DataError, match=r"PACS is neither in .* unset both to download flwrlabs/pacs"
    ):
        prepare(small("pacs", tmp_path))
    write(tmp_path, "office-caltech", 5)
    with pytest.raises(DataError, match=r"Unknown domain 'photo'. "):
        prepare(replace(config, domains="photo"))
    (tmp_path / "amazon" / "mug").rename(tmp_path / "amazon" / "cup")
    with pytest.raises(DataError, match=r"amazon: found the class 'cup'; expected backpack, bike"):
        prepare(config)
    (tmp_path / "amazon" / "cup").rename(tmp_path / "cup")
    with pytest.raises(DataError, match=r"amazon has no images of mug. Add the missing"):
        prepare(config)


# --- Hugging Face -----------------------------------------------------------------------


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_saved_data_set_equals_the_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path / "files", name)
    files = prepare(small(name, tmp_path / "files"))
    whole = data_set(name)
    whole.save_to_disk(str(tmp_path / "whole"))
    DatasetDict(train=whole).save_to_disk(str(tmp_path / "dict" / DATA_SETS[name].subfolders[0]))
    for d, domain in enumerate(files.domains):
        half = whole.select(range(d * len(whole) // 2, (d + 1) * len(whole) // 2))
        half.remove_columns("domain").save_to_disk(str(tmp_path / "apart" / domain))
    for place in ("whole", "dict", "apart"):
        saved = prepare(small(name, tmp_path / place))
        assert_same(files, saved)
        assert saved.sources[1].startswith(str(tmp_path / place))


def test_pacs_does_not_depend_on_the_order_or_the_names_of_its_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "files", "pacs")
    files = prepare(small("pacs", tmp_path / "files"))
    shuffled = data_set("pacs").shuffle(seed=1)
    shuffled.save_to_disk(str(tmp_path / "rows"))
    named = [
        {"path": str(path), "bytes": None}
        for row in shuffled
        for path in [
            Path(tmp_path, "files", row["domain"], PACS.classes[row["label"]])
            / f"{np.asarray(row['image'])[0, 0, 1]:03d}.png"
        ]
    ]
    where = shuffled.remove_columns("image").add_column("image", named)
    where.cast_column("image", Image()).save_to_disk(str(tmp_path / "paths"))
    for place in ("rows", "paths"):
        assert_same(files, prepare(small("pacs", tmp_path / place)))
    shuffled.to_parquet(str(tmp_path / "hub" / "train.parquet"))
    monkeypatch.setattr(PACS, "hub", str(tmp_path / "hub"))
    assert_same(files, prepare(replace(small("pacs", ""), dir="")))
    shutil.copytree(tmp_path / "files", tmp_path / "renamed")
    for number, path in enumerate(sorted((tmp_path / "renamed").rglob("*.png"))):
        path.rename(path.with_name(f"{number * 37 % 101:03d}-{number}.png"))
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: reversed(list(listed(path))))
    assert_same(files, prepare(small("pacs", tmp_path / "renamed")))


@pytest.mark.parametrize("kind", ["numbers", "words", "another order"])
def test_labels_of_saved_data_sets_are_matched_by_class_name(tmp_path: Path, kind: str) -> None:
    names = list(PACS.classes)
    numbers = rows("pacs")["label"]
    label, column = {
        "numbers": (Value("int64"), numbers),
        "words": (Value("string"), [names[c] for c in numbers]),
        "another order": (ClassLabel(names=names[::-1]), [6 - c for c in numbers]),
    }[kind]
    data = data_set("pacs", label, column)
    data.save_to_disk(str(tmp_path))
    x, y = prepare(small("pacs", tmp_path)).train(0)
    np.testing.assert_array_equal(x[:, 0, 0, 0], y)


def test_hub_data_are_loaded_by_flwr_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set("pacs").to_parquet(str(tmp_path / "hub" / "train.parquet"))
    monkeypatch.setattr(PACS, "hub", str(tmp_path / "hub"))
    hub = prepare(replace(small("pacs", ""), dir=""))
    assert hub.sources == (f"Hugging Face {tmp_path / 'hub'}",) * 2
    write(tmp_path / "files", "pacs")
    assert_same(hub, prepare(small("pacs", tmp_path / "files")))


def test_a_failed_download_from_the_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**_: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("flwr_datasets.FederatedDataset", offline)
    with pytest.raises(
        DataError, match=r"flwrlabs/pacs cannot be downloaded .*no network.*Set data.d"
    ):
        prepare(DataConfig(name="pacs"))


def test_invalid_hugging_face_data_sets_are_refused(tmp_path: Path) -> None:
    good = data_set("pacs")
    for number, (data, message) in enumerate(
        (
            (DatasetDict(train=good, test=good), "found the splits train, test; expected a single"),
            (
                good.remove_columns("domain"),
                "found the columns image, label; missing: domain. Add",
            ),
            (good.select(range(70)), "art_painting has no images of dog, elephant"),
            (
                good.cast_column("label", Value("int64")).map(lambda row: {"label": 7}),
                "label: found labels from 7 to 7; expected 0 to 6",
            ),
            (
                good.cast_column("label", ClassLabel(names=[*PACS.classes[:6], "cow"])),
                "found the class 'cow'; expected dog, elephant",
            ),
            (
                good.remove_columns("image").map(lambda row: {"image": row["label"]}),
                r"row \d+: image: found int; expected a column of the feature type datasets.Image",
            ),
        )
    ):
        folder = tmp_path / str(number)
        data.save_to_disk(str(folder))
        with pytest.raises(DataError, match=message) as caught:
            prepare(small("pacs", folder))
        assert str(folder) in str(caught.value)
    (tmp_path / "pacs").mkdir()
    (tmp_path / "pacs" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="pacs is not a Hugging Face data set written with save"):
        prepare(small("pacs", tmp_path))
