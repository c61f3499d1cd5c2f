"""HAM10000, ISIC 2019 and RSNA ICH on made-up copies of their public layouts."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pictures

from fairflower.config import DataConfig
from fairflower.data import Augment, Federation, prepare
from fairflower.data.partition import Units, client_groups
from fairflower.errors import DataError
from fairflower.published import image_sets
from fairflower.published.image_sets import HAM10000, ISIC2019, RSNAICH

IMAGENET = (0.485, 0.456, 0.406)


@pytest.fixture
def ham_dir() -> str:
    folder = os.environ.get("FAIRFLOWER_DATA", "")
    if not any(Path(folder, name).is_file() for name in ("ham10000.npz", "ham10000_28.npz")):
        pytest.skip("FAIRFLOWER_DATA does not name a folder with HAM10000")
    return folder


def save(path: Path, label: int, number: int) -> None:
    """Save an image of one color, (10 * class, number, 9), which JPEG nearly keeps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((8, 8, 3), (10 * label, number, 9), np.uint8)
    Pictures.fromarray(pixels).save(path, quality=100, subsampling=0)


def write_table(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def pixels_of(federation: Federation, domain: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The first pixel of every image of a domain, and the labels."""
    take = federation.train if split == "train" else federation.client_test
    parts = [take(client) for client in federation.clients_of(domain)]
    return np.concatenate([x[:, :, 0, 0] for x, _ in parts]), np.concatenate([y for _, y in parts])


# --- ISIC 2019 --------------------------------------------------------------------------

ISIC_HEADER = ["image", *ISIC2019.classes, "UNK"]


def isic(folder: Path, **changes: Any) -> DataConfig:
    config = {"name": "isic2019", "dir": str(folder), "image_size": 8, "clients_per_domain": 4}
    return DataConfig(**{**config, **changes})


def write_isic(root: Path, count: int = 10) -> list[list[Any]]:
    """Write ``count`` images per class, and a row without any of the classes."""
    rows: list[list[Any]] = [["ISIC_unknown", *[0.0] * 8, 1.0]]
    for number in range(count):
        for label in range(8):
            name = f"ISIC_{number:04d}{label}"
            save(root / "ISIC_2019_Training_Input" / f"{name}.jpg", label, 5 * number)
            rows.append([name, *(float(label == c) for c in range(8)), 0.0])
    write_table(root / "ISIC_2019_Training_GroundTruth.csv", ISIC_HEADER, rows)
    return rows


def test_isic_class_counts_match_the_paper() -> None:
    totals = [4522, 12875, 3323, 867, 2624, 239, 253, 628]
    labels = np.repeat(np.arange(8), totals)
    test = ISIC2019(DataConfig(name="isic2019")).is_test(labels)
    assert np.bincount(labels[~test]).tolist() == [3617, 10300, 2658, 693, 2099, 191, 202, 502]
    assert test.sum() == 5069


def test_isic_images_keep_their_labels_and_splits_are_disjoint(tmp_path: Path) -> None:
    write_isic(tmp_path)
    federation = prepare(isic(tmp_path))
    assert (federation.domains, federation.num_classes) == (("isic2019",), 8)
    assert federation.sources == (str(tmp_path),)
    seen = {}
    for split, each in (("train", 8), ("test", 2)):
        colours, labels = pixels_of(federation, "isic2019", split)
        assert np.bincount(labels).tolist() == [each] * 8
        assert abs(colours[:, 0].astype(int) - 10 * labels).max() <= 2
        numbers = np.rint(colours[:, 1] / 5).astype(int)
        seen[split] = set(zip(labels.tolist(), numbers.tolist(), strict=True))
    assert len(seen["train"]) == 64
    assert not seen["train"] & seen["test"]


def test_the_isic_test_split_does_not_depend_on_the_partition_seed(tmp_path: Path) -> None:
    write_isic(tmp_path)
    one, other = (prepare(isic(tmp_path, seed=seed)) for seed in (0, 1))
    test = [np.unique(f.test("isic2019").x.reshape(16, -1), axis=0) for f in (one, other)]
    np.testing.assert_array_equal(*test)
    assert (one.train(0).x != other.train(0).x).any()


def test_isic_settings_match_fedism(tmp_path: Path) -> None:
    write_isic(tmp_path / "ISIC_2019", 5)
    federation = prepare(isic(tmp_path, image_size=0, test_examples=4))
    assert federation.shape == (3, 224, 224)
    assert federation.mean == IMAGENET
    assert federation.augment == Augment(crop_padding=4, horizontal_flip=True)
    assert federation.sources == (str(tmp_path / "ISIC_2019"),)


def test_isic_is_divided_into_clean_and_corrupted_clients(tmp_path: Path) -> None:
    write_isic(tmp_path, 30)
    config = isic(tmp_path, clients_per_domain=5, corrupted_clients=1, dirichlet_alpha=1.0)
    federation = prepare(config)
    assert federation.domains == ("clean", "corrupted")
    counts = np.array([client.class_counts for client in federation.clients])
    assert counts[:4].sum(axis=0).tolist() == [round(0.8 * 24)] * 8
    assert counts[4].tolist() == [24 - round(0.8 * 24)] * 8
    assert federation.test("clean").x.std(axis=(2, 3)).max() < 3
    assert federation.test("corrupted").x.std(axis=(2, 3)).min() > 10


def test_changed_isic_files_are_prepared_again(tmp_path: Path) -> None:
    rows = write_isic(tmp_path)
    first = prepare(isic(tmp_path)).folder
    assert prepare(isic(tmp_path)).folder == first
    save(tmp_path / "ISIC_2019_Training_Input" / "new.jpg", 0, 1)
    second = prepare(isic(tmp_path)).folder
    rows.append(["new", 1.0, *[0.0] * 8])
    write_table(tmp_path / ISIC2019.table, ISIC_HEADER, rows)
    assert len({first, second, prepare(isic(tmp_path)).folder}) == 3


def test_invalid_isic_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ISIC 2019 is not on the Hugging Face Hub. Set data.dir"):
        prepare(DataConfig(name="isic2019"))
    with pytest.raises(DataError, match=r"a folder that has ISIC_2019_Training_GroundTruth.csv an"):
        prepare(isic(tmp_path))
    rows = write_isic(tmp_path)
    table = tmp_path / ISIC2019.table
    for header, changed, message in (
        (
            ["image", "MEL", "NV"],
            [],
            r"found the columns image, MEL, NV; missing: BCC, AK, .*. Add",
        ),
        (ISIC_HEADER, [["x", 1, 1, *[0] * 7]], r"x has the classes \[1.0, 1.0, .*exactly one 1"),
        (ISIC_HEADER, [["x", "yes", *[0] * 8]], "found 'yes'; expected a number"),
        (
            ISIC_HEADER,
            [["x", 1]],
            r"GroundTruth.csv: line 83 has no NV. Add the value",
        ),
        (ISIC_HEADER, [["gone", 1, *[0] * 8]], r"has no file .gone.jpg.. Add it"),
    ):
        write_table(table, header, rows + changed if changed else [])
        with pytest.raises(DataError, match=message):
            prepare(isic(tmp_path))
    write_table(table, ISIC_HEADER, [row for row in rows if row[8] != 1.0])
    with pytest.raises(DataError, match="has no images of SCC"):
        prepare(isic(tmp_path))


# --- RSNA ICH ---------------------------------------------------------------------------

KINDS = RSNAICH.classes


def ich(folder: Path, **changes: Any) -> DataConfig:
    config = {"name": "rsna-ich", "dir": str(folder), "image_size": 8, "clients_per_domain": 2}
    return DataConfig(**{**config, **changes})


def write_ich(root: Path, found: dict[str, list[int]], exported: set[str] | None = None) -> None:
    """Write a table of slices and kinds; images are colored by the first kind."""
    rows = []
    for number, (name, kinds) in enumerate(found.items()):
        for c, kind in enumerate(KINDS):
            rows.append([f"ID_{name}_{kind}", int(c in kinds)])
        rows.append([f"ID_{name}_any", int(bool(kinds))])
        if exported is None or name in exported:
            suffix = ("png", "jpg")[number % 2]
            save(root / "stage_2_train" / f"ID_{name}.{suffix}", kinds[0] if kinds else 9, number)
    write_table(root / "stage_2_train.csv", ["ID", "Label"], rows)


def singles(count: int = 10) -> dict[str, list[int]]:
    return {f"{label}a{number}": [label] for number in range(count) for label in range(5)}


def test_ich_uses_only_slices_of_exactly_one_kind(tmp_path: Path) -> None:
    write_ich(tmp_path, {**singles(), "none": [], "two": [0, 3], "all": [0, 1, 2, 3, 4]})
    federation = prepare(ich(tmp_path))
    for split, each in (("train", 8), ("test", 2)):
        colours, labels = pixels_of(federation, "rsna-ich", split)
        assert np.bincount(labels).tolist() == [each] * 5
        assert abs(colours[:, 0].astype(int) - 10 * labels).max() <= 2


def test_ich_ignores_slices_that_were_not_exported(tmp_path: Path) -> None:
    exported = {name for name in singles() if not name.endswith("9")}
    write_ich(tmp_path, singles(), exported)
    data = RSNAICH(ich(tmp_path))
    splits = [data.labels("rsna-ich", split) for split in ("train", "test")]
    assert [np.bincount(labels).tolist() for labels in splits] == [[7] * 5, [2] * 5]
    write_ich(tmp_path / "few", singles(), {"0a0", "1a0"})
    with pytest.raises(DataError, match="no images of intraventricular, subarachnoid, subdural"):
        prepare(ich(tmp_path / "few"))


def test_ich_draws_the_same_slices_for_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ich(tmp_path, singles(20))
    monkeypatch.setattr(image_sets, "SLICES", 60)
    chosen = [RSNAICH(ich(tmp_path, seed=seed)).records(tmp_path) for seed in (0, 1)]
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 60
    # The draw is over all slices: classes keep their shares roughly, not exactly.
    counts = np.bincount([label for label, _ in chosen[0]], minlength=5)
    assert counts.min() >= 5
    assert len(set(counts)) > 1


# --- HAM10000 ---------------------------------------------------------------------------


def ham(folder: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(
        **{"name": "ham10000", "dir": str(folder), "clients_per_domain": 2, **changes}
    )


@pytest.mark.parametrize("name", ["ham10000.npz", "ham10000_28.npz"])
def test_ham_is_read_from_an_npz_file(tmp_path: Path, name: str) -> None:
    x = np.random.default_rng(0).integers(0, 256, (14, 28, 28, 3), np.uint8)
    y = np.arange(14) % 7
    np.savez(tmp_path / name, x_train=x, y_train=y, x_test=x[:7], y_test=y[:7])
    federation = prepare(ham(tmp_path))
    assert (federation.domains, federation.num_classes) == (("ham10000",), 7)
    assert (federation.shape, federation.mean) == ((3, 28, 28), IMAGENET)
    assert federation.sources == (str(tmp_path / name),)


def hub_of_ham() -> tuple[DatasetDict, list[tuple[str, str, int]]]:
    """70 images of 35 lesions; the splits overlap as they do on the Hub."""
    long = (
        *("actinic_keratoses", "basal_cell_carcinoma", "benign_keratosis-like_lesions"),
        *("dermatofibroma", "melanoma", "melanocytic_Nevi", "vascular_lesions"),
    )
    images = [(f"ISIC_{i}", f"HAM_{i // 2}", i // 10) for i in range(70)]
    features = Features(
        {k: Value("string") for k in ("image_id", "lesion_id", "dx")} | {"image": Image()}
    )

    def part(rows: list[int]) -> Dataset:
        chosen = [images[i] for i in rows]
        return Dataset.from_dict(
            {
                "image": [
                    Pictures.fromarray(np.full((12, 16, 3), int(name[5:]), np.uint8))
                    for name, _, _ in chosen
                ],
                "image_id": [name for name, _, _ in chosen],
                "lesion_id": [lesion for _, lesion, _ in chosen],
                "dx": [long[label] for _, _, label in chosen],
            },
            features=features,
        )

    train, rest = list(range(0, 60)), list(range(40, 70))
    splits = {"train": part(train), "validation": part(rest[:20]), "test": part(rest[5:])}
    return DatasetDict(splits), images


def test_ham_from_the_hub_is_split_by_lesion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, images = hub_of_ham()
    for split, part in data.items():
        part.to_parquet(str(tmp_path / "hub" / f"{split}.parquet"))
    monkeypatch.setattr(HAM10000, "hub", {"ham10000": (str(tmp_path / "hub"), None)})
    federation = prepare(replace(ham(""), dir="", image_size=4))
    data.save_to_disk(str(tmp_path / "saved" / "ham10000"))
    saved = prepare(ham(tmp_path / "saved", image_size=4))
    lesions = {}
    for split, count in (("train", 56), ("test", 14)):
        colours, labels = pixels_of(federation, "ham10000", split)
        numbers = colours[:, 0].tolist()
        assert len(set(numbers)) == len(numbers) == count
        assert [images[i][2] for i in numbers] == labels.tolist()
        lesions[split] = {images[i][1] for i in numbers}
        assert pixels_of(saved, "ham10000", split)[0][:, 0].tolist() == numbers
    assert not lesions["train"] & lesions["test"]
    assert len(lesions["test"]) == round(0.2 * 35)


def test_invalid_ham_data_sets_are_refused(tmp_path: Path) -> None:
    data, _ = hub_of_ham()
    for number, (change, message) in enumerate(
        (
            (lambda row: {"dx": "cold"}, "found the diagnosis 'cold'; expected akiec, bcc, bkl"),
            (None, "found the columns image, image_id, dx; missing: label, or lesion_id. Add"),
        )
    ):
        changed = data.map(change) if change else data.remove_columns("lesion_id")
        changed.save_to_disk(str(tmp_path / str(number) / "ham10000"))
        with pytest.raises(DataError, match=message):
            prepare(ham(tmp_path / str(number)))


@pytest.mark.slow
def test_real_ham_is_divided_as_in_fedism(ham_dir: str) -> None:
    """A fifth of every class is corrupted; the test set appears twice."""
    config = ham(ham_dir, clients_per_domain=20, corrupted_clients=4, dirichlet_alpha=1.0)
    federation = prepare(config)
    assert HAM10000.classes == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    counts = np.array([client.class_counts for client in federation.clients])
    totals = np.array([267, 419, 862, 82, 895, 5374, 104])
    clean = np.array([round(0.8 * total) for total in totals])
    np.testing.assert_array_equal(counts[:16].sum(axis=0), clean)
    np.testing.assert_array_equal(counts[16:].sum(axis=0), totals - clean)
    assert federation.test_sizes == (2012, 2012)
    np.testing.assert_array_equal(
        np.bincount(federation.test("corrupted").y), [60, 95, 237, 33, 218, 1331, 38]
    )
    # Each channel of a pixel moves by about 0.18 of its range, less where it is clipped.
    even = prepare(replace(config, dirichlet_alpha=0.0))  # both groups in the same order
    difference = even.test("corrupted").x / 255 - even.test("clean").x / 255
    assert 0.15 < difference.std() < 0.18


@cache
def mean_colors(ham_dir: str) -> np.ndarray:
    """Mean color of every training image, shape (N, 3)."""
    data = HAM10000(ham(ham_dir))
    rows = np.arange(len(data.labels("ham10000", "train")))
    return data.images("ham10000", "train", rows).mean(axis=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_corruption_of_real_ham_does_not_depend_on_the_source(ham_dir: str, seed: int) -> None:
    """Clean and corrupted nevi have the same color: means of 4,299 and of 1,075 images.

    If their standard deviation is s, that of the difference of the means is 0.034 s. In order
    of id, as images are stored, the last fifth differs by 0.3 s to 1.0 s.
    """
    data = HAM10000(ham(ham_dir, clients_per_domain=5, corrupted_clients=1, seed=seed))
    labels = data.labels("ham10000", "train")
    nevi = labels == HAM10000.classes.index("nv")
    colour = mean_colors(ham_dir)
    parts = client_groups(data, {"ham10000": Units.single(labels)})
    colours = [colour[part.rows[nevi[part.rows]]] for part in parts]
    assert [len(own) for own in colours] == [4299, 1075]
    difference = colours[1].mean(axis=0) - colours[0].mean(axis=0)
    assert (np.abs(difference) < 4 * 0.034 * np.concatenate(colours).std(axis=0)).all()
