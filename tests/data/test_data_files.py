"""Reading npz files and Hugging Face data sets on disk and on the Hub; their errors."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pictures

from fairflower.config import DataConfig
from fairflower.data import Augment, files, prepare, with_absolute_dir
from fairflower.data.images import to_chw
from fairflower.errors import DataError
from fairflower.published.image_sets import Digits

Arrays = dict[str, Any]
RNG = np.random.default_rng(0)


def arrays(train: int = 12, test: int = 6, shape: tuple[int, ...] = (8, 8)) -> Arrays:
    return {
        "x_train": RNG.integers(0, 256, (train, *shape), np.uint8),
        "y_train": np.arange(train) % 10,
        "x_test": RNG.integers(0, 256, (test, *shape), np.uint8),
        "y_test": np.arange(test) % 10,
    }


def npz(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(name="npz", dir=str(folder), clients_per_domain=2, **changes)


def all_digits(folder: Path, **changes: Any) -> DataConfig:
    return DataConfig(name="digits", dir=str(folder), clients_per_domain=2, **changes)


# --- a folder of npz files --------------------------------------------------------------


def test_an_npz_folder_gives_domains_shape_and_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "grey.npz", **arrays())
    np.savez(tmp_path / "colour.npz", **arrays(shape=(8, 8, 3)))
    federation = prepare(npz(tmp_path))
    assert federation.domains == ("colour", "grey")
    assert (federation.shape, federation.num_classes) == ((3, 8, 8), 10)
    assert (federation.mean, federation.std) == ((0.5,) * 3, (0.5,) * 3)
    assert federation.augment == Augment()
    assert federation.sources == (str(tmp_path / "colour.npz"), str(tmp_path / "grey.npz"))
    grey = federation.train(2).x
    np.testing.assert_array_equal(grey[:, 0], grey[:, 1])


def test_pixels_of_npz_files_are_unchanged(tmp_path: Path) -> None:
    source = arrays(shape=(5, 7, 3))
    source["y_train"] = np.arange(12)
    np.savez(tmp_path / "a.npz", **source)
    federation = prepare(npz(tmp_path))
    assert federation.shape == (3, 5, 7)
    for client in range(2):
        x, y = federation.train(client)
        np.testing.assert_array_equal(x.transpose(0, 2, 3, 1), source["x_train"][y])


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1)])
def test_grayscale_npz_files_stay_grayscale(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.savez_compressed(tmp_path / "a.npz", **arrays(shape=shape))
    federation = prepare(npz(tmp_path))
    assert (federation.shape, federation.mean) == ((1, 8, 8), (0.5,))


def test_npz_files_of_different_sizes_need_an_image_size(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    np.savez(tmp_path / "b.npz", **arrays(shape=(9, 8)))
    with pytest.raises(DataError, match=r"differ in size \(a 8x8, b 9x8\). Set data.image-size"):
        prepare(npz(tmp_path))
    assert prepare(npz(tmp_path, image_size=6)).shape == (1, 6, 6)


def test_images_that_exceed_memory_after_resizing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    monkeypatch.setattr(files, "free_memory", lambda: 10**7)
    with pytest.raises(DataError, match=r"^12 images of 1024x1024 pixels take .*image-size"):
        prepare(npz(tmp_path, image_size=1024))


def without(key: str) -> Callable[[Arrays], Arrays]:
    return lambda a: {k: v for k, v in a.items() if k != key}


def with_(**changes: Any) -> Callable[[Arrays], Arrays]:
    return lambda a: {**a, **changes}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("y_test"), r"y_test: found only x_train, y_train, x_test; expected x_train, "),
        (without("x_train"), r"x_train: found only .*; expected x_train, x_test \(uint8 images"),
        (with_(x_train=np.zeros((12, 8, 8))), r"x_train: found float64 \[12, 8, 8\]; .* uint8"),
        (with_(x_test=np.zeros((6, 64), np.uint8)), r"x_test: found uint8 \[6, 64\]; .*N, H, W"),
        (with_(x_train=np.zeros((12, 3, 8, 8), np.uint8)), r"\[12, 3, 8, 8\]; .*\[N, H, W, 3\]"),
        (with_(x_train=np.zeros((12, 0, 8), np.uint8)), r"found uint8 \[12, 0, 8\]"),
        (with_(x_train=np.zeros((11, 8, 8), np.uint8)), r"found 11 images; expected 12, the"),
        (with_(y_train=np.zeros(12)), r"y_train: found float64 \[12\]; expected whole-number"),
        (with_(y_train=np.zeros((12, 1), int)), r"y_train: found int64 \[12, 1\]; expected whole"),
        (with_(y_test=np.full(6, -1)), r"y_test: found labels from -1 to -1; expected 0 to 65535"),
        (with_(y_test=np.zeros(0, int)), r"y_test: found no labels; expected at least one"),
        (with_(y_train=np.array([{}] * 12)), r"y_train cannot be read .*without Python objects"),
    ],
)
def test_invalid_npz_arrays_are_reported_with_their_file(
    tmp_path: Path, spoil: Callable[[Arrays], Arrays], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **spoil(arrays()))
    with pytest.raises(DataError, match=message) as caught:
        prepare(npz(tmp_path))
    assert str(tmp_path / "a.npz") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_file_that_is_not_an_npz_archive_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz is not an .npz file. Expected"):
        prepare(npz(tmp_path))


def test_a_damaged_array_in_an_npz_archive_is_named(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", **arrays(train=400))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        start = archive.getinfo("x_train.npy").header_offset
    content[start + 500 : start + 900] = bytes(400)
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz: x_train cannot be read"):
        prepare(npz(tmp_path))


def test_a_missing_or_empty_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"'npz' needs a folder. Set data.dir"):
        prepare(DataConfig(name="npz"))
    with pytest.raises(DataError, match=r"data.dir = .*: the folder .*nowhere does not exist"):
        prepare(npz(tmp_path / "nowhere"))
    with pytest.raises(
        DataError, match=r"has no .npz file. Expected an .npz file per domain with x_train"
    ):
        prepare(npz(tmp_path))
    monkeypatch.setenv("FAIRFLOWER_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"FAIRFLOWER_DATA = .*: the folder .* does not exist"):
        prepare(DataConfig(name="npz"))


def test_a_resolved_config_needs_neither_environment_nor_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", **arrays())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRFLOWER_DATA", ".")
    config = with_absolute_dir(DataConfig(name="npz", clients_per_domain=2))
    assert config.dir == str(tmp_path)
    assert config == with_absolute_dir(npz(Path()))
    here = prepare(DataConfig(name="npz", clients_per_domain=2))
    monkeypatch.chdir("/")
    monkeypatch.delenv("FAIRFLOWER_DATA")
    assert prepare(config) == here
    assert with_absolute_dir(DataConfig()) == DataConfig()


# --- resizing ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(28, 28), (16, 16), (40, 40, 3), (32, 32, 3)])
def test_resizing_matches_torchvision(shape: tuple[int, ...]) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    images = RNG.integers(0, 256, (3, *shape), np.uint8)
    ours = to_chw(images, 3, 32, 32)
    assert ours.flags.c_contiguous
    for image, result in zip(images, ours, strict=True):
        theirs = transforms.Resize((32, 32))(Pictures.fromarray(image).convert("RGB"))
        np.testing.assert_array_equal(result.transpose(1, 2, 0), np.asarray(theirs))


# --- Digits -----------------------------------------------------------------------------


def test_digits_settings_match_the_paper(tmp_path: Path) -> None:
    for domain in ("mnist", "usps", "svhn", "syn"):
        np.savez(tmp_path / f"{domain}.npz", **arrays(shape=(16, 16)))
    federation = prepare(all_digits(tmp_path, examples_per_client=6))
    assert federation.domains == ("mnist", "usps", "svhn", "syn")
    assert (federation.shape, federation.num_classes) == ((3, 32, 32), 10)
    assert federation.mean == (0.485, 0.456, 0.406)
    assert federation.std == (0.229, 0.224, 0.225)
    assert federation.augment == Augment(crop_padding=4, horizontal_flip=False)


def test_the_fraction_of_digits_is_relative_to_the_published_size(tmp_path: Path) -> None:
    np.savez(tmp_path / "usps.npz", **arrays(train=200))
    federation = prepare(all_digits(tmp_path, domains="usps"))
    assert [client.num_examples for client in federation.clients] == [72, 72]
    np.savez(tmp_path / "usps.npz", **arrays(train=143))
    with pytest.raises(
        DataError, match=r"'usps' has 143 training .* 2 clients x 72 examples = 144"
    ):
        prepare(all_digits(tmp_path, domains="usps"))


def test_a_stand_in_for_syn_is_named_in_the_sources(tmp_path: Path) -> None:
    np.savez(tmp_path / "synlike.npz", **arrays())
    config = all_digits(tmp_path, domains="syn", examples_per_client=2)
    assert prepare(config).sources == (f"{tmp_path / 'synlike.npz'} (a stand-in for SYN)",)
    np.savez(tmp_path / "syn.npz", **arrays())
    assert prepare(config).sources == (str(tmp_path / "syn.npz"),)


def test_digit_five_settings_match_fedgcr(tmp_path: Path) -> None:
    for domain in ("mnist", "usps", "synlike", "mnistm", "svhn"):
        np.savez(tmp_path / f"{domain}.npz", **arrays(shape=(16, 16)))
    federation = prepare(DataConfig(name="digit-five", dir=str(tmp_path), clients_per_domain=2))
    assert federation.domains == ("mnist", "usps", "syn", "mnistm", "svhn")
    assert (federation.shape, federation.num_classes) == ((3, 32, 32), 10)
    assert (federation.mean, federation.std) == ((0.5,) * 3, (0.5,) * 3)
    assert federation.augment == Augment()
    assert [client.num_examples for client in federation.clients] == [6] * 10
    assert federation.sources[2].endswith("synlike.npz (a stand-in for SYN)")


def test_digit_five_uses_at_most_as_many_examples_of_a_domain_as_fedgcr(tmp_path: Path) -> None:
    large = {
        **arrays(),
        "x_train": np.zeros((4000, 4, 4), np.uint8),
        "y_train": np.zeros(4000, int),
    }
    np.savez(tmp_path / "mnist.npz", **large)
    np.savez(tmp_path / "usps.npz", **arrays())
    config = DataConfig(name="digit-five", dir=str(tmp_path), domains="mnist,usps")
    sizes = [client.num_examples for client in prepare(config).clients]
    assert sizes == [2975 // 5] * 5 + [12 // 5] * 5


def test_invalid_digits_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither .*mnist.npz nor .*mnist exists. Set data.dir"):
        prepare(all_digits(tmp_path))
    with pytest.raises(DataError, match=r"Unknown domain 'mnsit'. Did you mean 'mnist'?"):
        prepare(all_digits(tmp_path, domains="mnsit"))
    np.savez(tmp_path / "mnist.npz", **{**arrays(), "y_train": np.arange(1, 13)})
    with pytest.raises(DataError, match="y_train: found labels from 1 to 12; expected 0 to 9"):
        prepare(all_digits(tmp_path, domains="mnist"))


@pytest.mark.slow
def test_real_digits_have_the_papers_sizes(digits_dir: str) -> None:
    real = prepare(DataConfig(name="digits", dir=digits_dir))
    sizes = [client.num_examples for client in real.clients]
    assert sizes == [600] * 5 + [72] * 5 + [732] * 5 + [100] * 5
    for client in real.clients:
        x, y = real.train(client.client_id)
        assert x.shape == (client.num_examples, 3, 32, 32)
        assert set(y) <= set(range(10))
    for domain in real.domains:
        train = [image.tobytes() for i in real.clients_of(domain) for image in real.train(i).x]
        assert len(set(train)) == len(train)


# --- Hugging Face -----------------------------------------------------------------------


def hugging_face(source: Arrays) -> DatasetDict:
    features = Features({"image": Image(), "label": Value("int64")})
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {
                    "image": [Pictures.fromarray(image) for image in source[f"x_{split}"]],
                    "label": source[f"y_{split}"],
                },
                features=features,
            )
            for split in ("train", "test")
        }
    )


def test_a_saved_hugging_face_data_set_equals_npz_files(tmp_path: Path) -> None:
    source = arrays()
    (tmp_path / "files").mkdir()
    np.savez(tmp_path / "files" / "mnist.npz", **source)
    hugging_face(source).save_to_disk(str(tmp_path / "saved" / "mnist"))
    first, second = (
        prepare(all_digits(tmp_path / folder, domains="mnist", examples_per_client=6))
        for folder in ("files", "saved")
    )
    for client in range(2):
        for one, other in zip(first.train(client), second.train(client), strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(first.test("mnist").x, second.test("mnist").x)
    again = prepare(all_digits(tmp_path / "saved", domains="mnist", examples_per_client=6))
    assert again.folder == second.folder


def test_invalid_hugging_face_data_sets_are_refused(tmp_path: Path) -> None:
    config = all_digits(tmp_path, domains="mnist", examples_per_client=6)
    good = hugging_face(arrays())
    for number, (data, message) in enumerate(
        (
            (good["train"], "mnist: found a single split; expected a DatasetDict"),
            (DatasetDict(train=good["train"]), "found the splits train; expected train and test"),
            (
                good.rename_column("label", "digit"),
                "columns image, digit; missing: label. Add",
            ),
            (hugging_face({**arrays(), "y_train": [11] * 12}), "train: label: found labels fr"),
            (
                good.remove_columns("image").map(lambda row: {"image": row["label"]}),
                r"train: row \d+: image: found int; expected a column of the feature type dat",
            ),
        )
    ):
        folder = tmp_path / str(number)
        data.save_to_disk(str(folder / "mnist"))
        with pytest.raises(DataError, match=message):
            prepare(DataConfig(**{**vars(config), "dir": str(folder)}))
    (tmp_path / "mnist").mkdir()
    with pytest.raises(DataError, match="mnist is not a Hugging Face data set written with save"):
        prepare(config)


def test_hub_data_are_loaded_by_flwr_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = arrays()
    for split, data in hugging_face(source).items():
        data.to_parquet(str(tmp_path / "hub" / f"{split}.parquet"))
    monkeypatch.setattr(Digits, "hub", {"mnist": (str(tmp_path / "hub"), None)})
    np.savez(tmp_path / "mnist.npz", **source)
    config = DataConfig(name="digits", domains="mnist", clients_per_domain=2, examples_per_client=6)
    hub = prepare(config)
    assert hub.sources == (f"Hugging Face {tmp_path / 'hub'}",)
    files = prepare(all_digits(tmp_path, domains="mnist", examples_per_client=6))
    np.testing.assert_array_equal(hub.train(1).x, files.train(1).x)


def test_domains_missing_on_the_hub_and_failed_downloads_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(**_: Any) -> None:
        raise ConnectionError("no network")

    with pytest.raises(DataError, match=r"'syn' is not on the .*Hub. Set data.dir .*mnist,usps,sv"):
        prepare(DataConfig(name="digits"))
    monkeypatch.setattr("flwr_datasets.FederatedDataset", offline)
    with pytest.raises(
        DataError, match=r"ylecun/mnist cannot be downloaded .*no network.*Set data.d"
    ):
        prepare(DataConfig(name="digits", domains="mnist"))
