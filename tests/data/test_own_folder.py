"""Folders of a user's images: bit depths, DICOM, classes that some domains lack, stray files."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fairflower.config import DataConfig
from fairflower.data import Federation, files, own_images, prepare
from fairflower.data.images import eight_bit, read_picture
from fairflower.errors import DataError


def folder(root: Path, classes: dict[str, str], count: int = 6) -> Path:
    """Write images by domain and class, ``{"a": "cat dog"}``; the gray value gives both."""
    for d, (domain, names) in enumerate(classes.items()):
        for name in names.split():
            place = root / domain / name
            place.mkdir(parents=True)
            for number in range(count):
                grey = np.full((4, 4), 20 * d + ord(name[0]) - ord("a"), np.uint8)
                Image.fromarray(grey).save(place / f"{number}.png")
    return root


def config(root: Path, **changes: Any) -> DataConfig:
    settings = {"name": "images", "image_size": 4, "clients_per_domain": 2, **changes}
    return DataConfig(dir=str(root), **settings)


def pixels(federation: Federation, at: int = 0) -> set[tuple[int, int, str]]:
    """Pixel, label and domain of every image, for training or tests."""
    return {
        (int(x[0, at, at]), int(y), client.domain)
        for client in federation.clients
        for split in (federation.train, federation.client_test)
        for x, y in zip(*split(client.client_id), strict=True)
    }


# --- depth ------------------------------------------------------------------------------


RAMP = np.array([[0, 128, 4095], [30000, 65534, 65535]])


@pytest.mark.parametrize(
    ("values", "name", "shown"),
    [
        (RAMP.astype(np.uint16), "a.png", RAMP / 257),
        (RAMP.astype(np.uint16), "a.tif", RAMP / 257),
        (RAMP.astype(np.int32), "a.tif", RAMP / 257),
        (RAMP.astype(np.uint16), "a.pgm", RAMP / 257),
        ((RAMP / 65535).astype(np.float32), "a.tif", RAMP / 257),
        ((RAMP % 256).astype(np.uint8), "a.png", RAMP % 256),
    ],
)
def test_images_of_any_bit_depth_are_scaled_to_8_bits(
    values: NDArray[Any], name: str, shown: NDArray[Any], tmp_path: Path
) -> None:
    Image.fromarray(values).save(tmp_path / name)
    actual = eight_bit(read_picture(tmp_path / name), name)
    assert (actual.dtype, actual.shape) == (np.uint8, (2, 3, 3))
    np.testing.assert_allclose(actual[..., 0], shown, atol=0.51)
    assert (actual == actual[..., :1]).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.array([[-1000, 400]], np.int32),
            "whole numbers from -1000 to 400; expected numbers from 0",
        ),
        (
            np.array([[0, 65536]], np.int32),
            "whole numbers from 0 to 65536; .* 65535 .white.. Scale all images",
        ),
        (np.array([[0, 255]], np.float32), "real numbers from 0 to 255; expected .* to 1 .white."),
        (np.array([[0, np.nan]], np.float32), "real numbers from nan to nan"),
    ],
)
def test_pixels_with_an_unknown_white_value_are_refused(
    values: NDArray[Any], message: str, tmp_path: Path
) -> None:
    root = folder(tmp_path, {"a": "cat dog"})
    for name in ("1.tif", "2.tif"):  # one of them is a training image
        Image.fromarray(values).save(root / "a" / "cat" / name)
    with pytest.raises(DataError, match=rf"cat/\d\.tif: found {message}"):
        prepare(config(root, clients_per_domain=1))


def deep(root: Path, *largest: int) -> Path:
    """Write 16-bit images of two classes per domain, with values up to ``largest``."""
    for domain, value in zip("abc", largest, strict=False):
        for label in ("cat", "dog"):
            (root / domain / label).mkdir(parents=True)
            for number in range(6):
                values = np.array([[0, value // 2], [value, value]], np.uint16)
                Image.fromarray(values).save(root / domain / label / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("largest", "bits"),
    [(0, 16), (255, 8), (1000, 10), (4095, 12), (4096, 14), (16384, 16), (65535, 16)],
)
def test_16_bit_images_that_use_fewer_bits_are_warned_of_once(
    largest: int, bits: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(config(deep(tmp_path, largest, largest), image_size=2))
    named = f"largest value in the 16-bit images is {largest} and white is 65535. If white is "
    named += f"{2**bits - 1}, set data.name = images:bits={bits} (--data images:bits={bits})."
    assert len(caplog.messages) == (bits < 16)
    assert (named in caplog.text) is (bits < 16)


@pytest.mark.parametrize(("bits", "white"), [(12, 255), (14, 64), (16, 16)])
def test_the_bit_depth_of_images_can_be_set(
    bits: int, white: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_config = config(deep(tmp_path, 4095), image_size=2, name=f"images:bits={bits}")
    assert {pixel for pixel, *_ in pixels(prepare(data_config), 1)} == {white}
    assert not caplog.messages


def test_pixels_above_the_set_bit_depth_are_refused(tmp_path: Path) -> None:
    data_config = config(deep(tmp_path, 4095, 5000), image_size=2, name="images:bits=12")
    with pytest.raises(DataError, match=r"b/.*png: found whole numbers from 0 to 5000; .* 4095"):
        prepare(data_config)


def dicom(path: Path, values: NDArray[Any], **header: Any) -> Path:
    """Write a DICOM file with these stored values, as a scanner does."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    data_set = pydicom.Dataset()
    data_set.file_meta = pydicom.dataset.FileMetaDataset()
    data_set.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data_set.file_meta.MediaStorageSOPClassUID = data_set.SOPClassUID = CTImageStorage
    data_set.file_meta.MediaStorageSOPInstanceUID = data_set.SOPInstanceUID = generate_uid()
    data_set.Rows, data_set.Columns = values.shape[:2]
    bits = 8 * values.dtype.itemsize
    data_set.BitsAllocated, data_set.BitsStored, data_set.HighBit = bits, bits, bits - 1
    data_set.PixelRepresentation = int(values.dtype.kind == "i")
    data_set.SamplesPerPixel = 3 if values.shape[-1] == 3 and values.ndim == 3 else 1
    data_set.PhotometricInterpretation = "RGB" if data_set.SamplesPerPixel == 3 else "MONOCHROME2"
    if data_set.SamplesPerPixel == 3:
        data_set.PlanarConfiguration = 0
    data_set.PixelData = values.tobytes()
    for name, value in header.items():
        setattr(data_set, name, value)
    data_set.HighBit = data_set.BitsStored - 1
    data_set.save_as(path, enforce_file_format=True)
    return path


STORED = np.array([[0, 1000, 1040, 1080, 4000]], np.uint16)
HOUNSFIELD = STORED[0].astype(float) - 1024


def windowed(center: float, width: float) -> NDArray[np.float64]:
    """The linear function of DICOM's standard, PS3.3 C.11.2.1.2, to 0 ... 255."""
    place = (HOUNSFIELD - (center - 0.5)) / (width - 1) + 0.5
    return 255 * place.clip(0, 1)


@pytest.mark.parametrize(
    ("header", "shown"),
    [
        ({"BitsStored": 12}, STORED[0] / 4095 * 255),
        ({}, STORED[0] / 257),
        ({"PhotometricInterpretation": "MONOCHROME1", "BitsStored": 12}, 255 - STORED[0] / 16.0588),
        ({"RescaleSlope": 2, "RescaleIntercept": -1024, "BitsStored": 12}, STORED[0] / 16.0588),
        (
            {
                "RescaleSlope": 1,
                "RescaleIntercept": -1024,
                "WindowCenter": 40,
                "WindowWidth": 80,
                "BitsStored": 12,
            },
            windowed(40, 80),
        ),
        (
            {
                "RescaleSlope": 1,
                "RescaleIntercept": -1024,
                "WindowCenter": [40, 600],
                "WindowWidth": [80, 2000],
            },
            windowed(40, 80),
        ),
        (  # a negative slope does not invert the windowed image: HU = 1024 - stored
            {
                "RescaleSlope": -1,
                "RescaleIntercept": 1024,
                "WindowCenter": -40,
                "WindowWidth": 80,
                "BitsStored": 12,
            },
            255 * ((-HOUNSFIELD + 40.5) / 79 + 0.5).clip(0, 1),
        ),
        (
            {"RescaleSlope": -1, "RescaleIntercept": 4095, "BitsStored": 12},
            255 - STORED[0] / 16.0588,
        ),
        ({"WindowCenter": None, "WindowWidth": None, "BitsStored": 12}, STORED[0] / 16.0588),
    ],
)
def test_dicom_is_rescaled_and_windowed(
    header: dict[str, Any], shown: NDArray[Any], tmp_path: Path
) -> None:
    path = dicom(tmp_path / "a.dcm", STORED, **header)
    actual = eight_bit(read_picture(path), "a")
    np.testing.assert_allclose(actual[0, :, 1], shown, atol=0.51)


def test_signed_and_color_dicom_files_are_read_and_several_frames_refused(tmp_path: Path) -> None:
    signed = np.array([[-2048, 0, 2047]], np.int16)
    path = dicom(tmp_path / "a.dcm", signed, BitsStored=12)
    assert np.asarray(read_picture(path)).tolist() == [[0, 128, 255]]
    colour = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(read_picture(dicom(tmp_path / "b.dcm", colour)), colour)
    frames = np.zeros((4, 2, 2), np.uint16)
    path = dicom(tmp_path / "c.dcm", frames, NumberOfFrames=4, Rows=2, Columns=2)
    with pytest.raises(DataError, match=r"c\.dcm: found MONOCHROME2 of shape \[4, 2, 2\]"):
        read_picture(path)


def test_a_folder_of_dicom_files_is_read_or_names_the_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label, stored in (("healthy", 0), ("ill", 4095)):
        (tmp_path / "north" / label).mkdir(parents=True)
        for number in range(6):
            values = np.full((4, 4), stored, np.uint16)
            dicom(tmp_path / "north" / label / f"{number}.dcm", values, BitsStored=12)
    federation = prepare(config(tmp_path))
    assert pixels(federation) == {(0, 0, "north"), (255, 1, "north")}
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r"\d\.dcm is a DICOM file.*'fairflower\[medical\]'\.$"):
        prepare(config(tmp_path, image_size=8))


def scans(folder: Path, patients: list[str]) -> DataConfig:
    """Write a DICOM file of each of these patients, in turn of two classes, and a config."""
    for number, patient in enumerate(patients):
        place = folder / "north" / ("healthy", "ill")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        values = np.full((4, 4), number, np.uint8)
        dicom(place / f"{number:02}.dcm", values, PatientID=patient)
    return config(folder, clients_per_domain=1)


def test_patients_of_dicom_files_are_counted_in_a_warning_and_kept_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patients = [f"MEIER{number // 3}" for number in range(36)]
    plain = prepare(scans(tmp_path, patients))
    (warning,) = caplog.messages
    split = {s: {int(x[0, 0, 0]) // 3 for x in plain.test("north", s).x} for s in ("train", "test")}
    both = len(split["train"] & split["test"])
    assert f"north: {both} of 12 patients (PatientID in DICOM files) have training and" in warning
    assert warning.endswith("Set data.patient = PatientID to keep patients together.")
    caplog.clear()
    whole = prepare(config(tmp_path, clients_per_domain=3, patient="PatientID"))
    held = [
        {int(x[0, 0, 0]) // 3 for x in part.x}
        for client in range(3)
        for part in whole.splits(client, "train", "test")
    ]
    assert sum(map(len, held)) == len(set().union(*held)) == 12
    drawn = prepare(config(tmp_path, clients_per_domain=1, patient="PatientID", redraw="rows"))
    train, test = (
        {int(x[0, 0, 0]) // 3 for x in part.x} for part in drawn.splits(0, "train", "test")
    )
    assert not train & test
    assert not [text for text in caplog.messages if "MEIER" in text]
    for path in (whole.folder / "meta.json", *whole.folder.iterdir()):
        assert b"MEIER" not in path.read_bytes()


@pytest.mark.parametrize("patients", [["a"] * 12, [f"p{k}" for k in range(12)], ["", "a"] * 6])
def test_patients_who_are_in_one_split_or_unknown_are_not_warned_of(
    patients: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(scans(tmp_path, patients))
    assert not caplog.messages


def test_a_missing_patient_of_a_dicom_file_is_an_error(tmp_path: Path) -> None:
    scans(tmp_path, ["", "a", "b", "c"] * 3)
    with pytest.raises(
        DataError, match=r"PatientID.: 3 of 12 images are no DICOM .*00\.dcm"
    ) as caught:
        prepare(config(tmp_path, patient="PatientID"))
    assert ".dcm" not in str(caught.value.public)
    assert "3 of 12" in str(caught.value.public)


# --- classes and folders ----------------------------------------------------------------


def test_the_classes_are_the_union_over_domains(tmp_path: Path) -> None:
    federation = prepare(config(folder(tmp_path, {"x": "bear cat", "y": "cat dog", "z": "ape"})))
    assert federation.class_names == ("ape", "bear", "cat", "dog")
    assert federation.num_classes == 4
    assert pixels(federation) == {
        (1, 1, "x"),
        (2, 2, "x"),
        (22, 2, "y"),
        (23, 3, "y"),
        (40, 0, "z"),
    }


@pytest.mark.parametrize(
    ("one", "two"),
    [("Stripe", "stripe"), ("stripe", "stripe "), (" stripe", "Stripe"), ("cafe\u0301", "caf\xe9")],
)
def test_class_names_that_differ_only_in_case_or_spaces_are_refused(
    one: str, two: str, tmp_path: Path
) -> None:
    root = folder(tmp_path, {"a": "x dot", "b": "x dot"})
    (root / "a" / "x").rename(root / "a" / one)
    (root / "b" / "x").rename(root / "b" / two)
    message = (
        f"the classes {one!r} (in a), {two!r} (in b) differ only in case, spaces or code points. "
        "Rename"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        prepare(config(root))
    (root / "b" / two).rename(root / "b" / one)
    assert prepare(config(root)).classes == tuple(sorted(("dot", one)))


def test_class_names_that_differ_in_case_within_one_domain_are_distinct(tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    if (tmp_path / "PROBE").exists():
        pytest.skip("This disk does not tell small letters from large ones.")
    root = folder(tmp_path / "root", {"letters": "x a b", "few": "x b"})
    for domain in ("letters", "few"):
        (root / domain / "x").rename(root / domain / "A")
    assert prepare(config(root, clients_per_domain=1)).classes == ("A", "a", "b")
    (root / "few" / "A").rename(root / "letters" / "a ")
    with pytest.raises(DataError, match=r"'A' \(in letters\), 'a' .*, 'a ' \(in letters\) differ"):
        prepare(config(root, clients_per_domain=1))


def test_hidden_files_and_files_of_macos_are_ignored(tmp_path: Path) -> None:
    classes = {"a": "cat dog", "b": "cat dog"}
    clean = prepare(config(folder(tmp_path / "clean", classes)))
    root = folder(tmp_path / "zip", classes | {"__MACOSX": "cat", ".thumbs": "cat"}, 6)
    for stray in ("__MACOSX", ".cache"):
        folder(root / "a", {stray: "old"})
        folder(root / "b" / "cat", {stray: "small"})
    (root / "a" / "cat" / "._0.png").write_bytes(b"resource fork")
    (root / "notes.txt").write_text("ours")
    federation = prepare(config(root))
    assert (federation.domains, federation.classes) == (("a", "b"), ("cat", "dog"))
    assert federation.clients == clean.clients


def test_images_of_every_extension_are_read_and_other_files_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder(tmp_path, {"a": "cat dog"}, 12)
    first = prepare(config(root))
    assert not caplog.messages
    for number, suffix in enumerate(("GIF", "jfif", "jpe", "pnm")):
        kind = {"GIF": "GIF", "pnm": "PPM"}.get(suffix, "JPEG")
        Image.new("L", (4, 4), 200 + number).save(root / "a" / "cat" / f"x.{suffix}", kind)
    (root / "a" / "dog" / "Thumbs.db").touch()
    for stray in ("7.heic", "notes.txt"):
        (root / "a" / "dog" / stray).touch()
    second = prepare(config(root))
    assert {(grey, 0, "a") for grey in range(200, 204)} == pixels(second) - pixels(first)
    (warning,) = caplog.messages
    assert "/a: 2 files have no image extension and are skipped, for example " in warning
    assert "7.heic. Images have .jpg" in warning


def test_images_larger_than_the_memory_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder(tmp_path, {"a": "cat dog"})
    monkeypatch.setattr(files, "free_memory", lambda: 10**6)
    monkeypatch.setattr(own_images, "read_picture", lambda _: pytest.fail("decoded"))
    with pytest.raises(DataError, match=r"/a: 8 images of 1024x1024 pixels take .*image-size"):
        prepare(config(root, image_size=1024))


@pytest.mark.posix
def test_new_images_in_linked_folders_are_prepared_again(tmp_path: Path) -> None:
    root = folder(tmp_path / "root", {"a": "cat dog", "b": "cat dog"})
    for name in ("cat", "dog"):
        (root / "a" / name).rename(tmp_path / name)
        (root / "a" / name).symlink_to(tmp_path / name)
    first = prepare(config(root))
    Image.new("L", (4, 4), 200).save(tmp_path / "dog" / "9.png")
    second = prepare(config(root))
    assert second.folder != first.folder
    assert (200, 1, "a") in pixels(second)


def test_images_in_too_deep_folders_are_named(tmp_path: Path) -> None:
    root = folder(tmp_path / "root", {"a": "cat dog", "b": "cat dog"})
    (root / "a/cat/patient-7").mkdir()
    Image.new("L", (4, 4)).save(root / "a/cat/patient-7/0.png")
    with pytest.raises(DataError, match=r"7.0\.png is too deep: .*root must contain <domain>/<cl"):
        prepare(config(root))
    with pytest.raises(DataError, match=r"7.0\.png is too deep: .*/a must contain <class>/<image>"):
        prepare(config(root / "a"))


def test_a_stray_image_is_named_and_not_the_good_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = folder(tmp_path / "root", {"a": "cat dog", "b": "cat dog"})
    stray = root / "b" / "readme.png"
    Image.new("L", (4, 4)).save(stray)
    with pytest.raises(DataError, match=r"/b/readme\.png is not in the folder of a class: .*root"):
        prepare(config(root))
    stray.rename(root / "readme.png")
    federation = prepare(config(root))
    assert (federation.domains, federation.classes) == (("a", "b"), ("cat", "dog"))
    (warning,) = caplog.messages
    assert warning.endswith("/readme.png is not in the folder of a class and is skipped.")


def test_folders_named_like_splits_are_not_domains(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train": "cat dog", "Val": "cat dog", "test": "cat dog"})
    with pytest.raises(DataError, match="Val, test, train are not domains"):
        prepare(config(root))
    assert prepare(config(root, domains="train")).domains == ("train",)


def test_a_domain_without_images_is_named(tmp_path: Path) -> None:
    root = folder(tmp_path, {"a": "cat dog"})
    (root / "b").mkdir()
    with pytest.raises(DataError, match=r"/b has no images. Expected <domain>/<class>/<image>"):
        prepare(config(root))


@pytest.mark.parametrize("place", ["domain", "class", "npz"])
def test_names_that_are_not_utf8_are_refused(place: str, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    root = folder(tmp_path, {"a": "cat dog"})
    paths = {"domain": root / odd / "cat", "class": root / "a" / odd, "npz": root / f"{odd}.npz"}
    paths[place].mkdir(parents=True)
    name = "npz" if place == "npz" else "images"
    with pytest.raises(DataError, match=r"caf\\udce9.*Rename it"):
        prepare(DataConfig(name=name, dir=str(root), image_size=4))


# --- labels -----------------------------------------------------------------------------


def npz(root: Path, train: list[int], test: list[int]) -> DataConfig:
    x = np.zeros((1, 4, 4), np.uint8)
    np.savez(
        root / "a.npz",
        x_train=x.repeat(len(train), 0),
        y_train=train,
        x_test=x.repeat(len(test), 0),
        y_test=test,
    )
    return DataConfig(name="npz", dir=str(root), clients_per_domain=1)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            [1, 2, 3],
            [1, 2, 3],
            "npz: out of 4 classes, these have no examples: ['0']. Number labels from 0",
        ),
        ([0, 1, 3], [0], "out of 4 classes, these have no examples: ['2']."),
        ([0, 1], [0, 2], "these classes have test examples, but no training examples: ['2']"),
        ([0, 1, 2], [0, 1], ""),
    ],
)
def test_classes_without_images_are_warned_of(
    train: list[int],
    test: list[int],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = npz(tmp_path, train, test)
    with caplog.at_level(logging.WARNING):
        prepare(config)
    assert message in caplog.text
    assert bool(caplog.text) is bool(message)


@pytest.mark.parametrize("label", [3_000_000_000, 5_000_000, 65_536])
def test_labels_above_the_largest_class_number_are_refused(label: int, tmp_path: Path) -> None:
    config = npz(tmp_path, [0, label], [0])
    (tmp_path / "._a.npz").write_bytes(b"a resource fork of macOS")
    with pytest.raises(DataError, match=rf"labels from 0 to {label}; expected 0 to 65535"):
        prepare(config)


def test_more_clients_than_images_are_refused(tmp_path: Path) -> None:
    config_of_many = config(folder(tmp_path, {"a": "cat dog"}), clients_per_domain=100_000)
    with pytest.raises(
        DataError, match=r"'a' has too few training examples: 8 for 100000 clients. Lower"
    ):
        prepare(config_of_many)
