"""Malicious files in a folder of data: each is refused by name, and none blocks the reader."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Value
from PIL import EpsImagePlugin, ImageFile, PngImagePlugin
from PIL import Image as Pictures

from fairflower.config import DataConfig
from fairflower.data import files, prepare
from fairflower.data.files import read_csv
from fairflower.data.images import FORMATS, MAX_PIXELS, eight_bit, picture_in, read_picture
from fairflower.errors import DataError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 30, 3), np.uint8)


def encoded(name: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Pictures.fromarray(PIXELS).save(stream, name, **options)
    return stream.getvalue()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A class folder in which the image 1.png is missing."""
    for label in ("cat", "dog"):
        (tmp_path / "a" / label).mkdir(parents=True)
        for number in range(6):
            Pictures.fromarray(PIXELS).save(tmp_path / "a" / label / f"{number}.png")
    (tmp_path / "a" / "cat" / "1.png").unlink()
    return tmp_path / "a" / "cat"


def refused(place: Path, message: str, root: int = 1) -> None:
    """Assert that the folder is refused with an error that matches ``message``."""
    config = DataConfig(
        name="images", dir=str(place.parents[root]), image_size=4, clients_per_domain=1
    )
    with pytest.raises(DataError, match=message):
        prepare(config)


# --- images -----------------------------------------------------------------------------


@pytest.fixture
def ghostscript(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a stand-in for Ghostscript, the only program on PATH, writes when started."""
    place = tmp_path_factory.mktemp("bin")
    (place / "gs").write_text(f"#!/bin/sh\necho started >> {place / 'started'}\n")
    (place / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return place / "started"


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.posix
def test_an_eps_file_named_png_starts_no_program(place: Path, ghostscript: Path) -> None:
    (place / "1.png").write_bytes(EPS)
    refused(place, r"1\.png cannot be read as an image: found EPS; expected JPEG, PNG, .*DICOM")
    with pytest.raises(DataError, match=r"row 3 cannot be read as an image: found EPS"):
        picture_in({"bytes": EPS, "path": None}, "row 3")
    assert not ghostscript.exists()
    with pytest.raises(OSError), Pictures.open(place / "1.png") as picture:  # noqa: PT011
        picture.load()
    assert ghostscript.exists()  # Pillow alone starts the program


@pytest.mark.parametrize("name", ["ICO", "PCX", "TGA", "JPEG2000", "DDS", "SGI", "PDF"])
def test_unsupported_formats_are_refused_regardless_of_the_file_name(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(name))
    with pytest.raises(DataError, match=r"a\.jpg cannot be read as an image: found .*; expected"):
        read_picture(tmp_path / "a.jpg")


@pytest.mark.parametrize("name", FORMATS)
def test_supported_formats_are_read_regardless_of_the_file_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(name))
    expected = np.asarray(Pictures.open(io.BytesIO(encoded(name))).convert("RGB"))
    actual = eight_bit(read_picture(tmp_path / "a.png"), "a")
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM"])
def test_truncated_images_are_refused(name: str, part: float, tmp_path: Path) -> None:
    content = encoded(name)
    (tmp_path / "a.png").write_bytes(content[: int(part * len(content))])
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image.*(Replace|convert)"):
        read_picture(tmp_path / "a.png")


def chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def tiff(side: int) -> bytes:
    tags = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: side, 279: side}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4)


def bmp(side: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    return struct.pack("<2sIHHI", b"BM", 54, 0, 0, 54) + header


def jpeg(side: int) -> bytes:
    at = (content := encoded("JPEG")).index(b"\xff\xc0") + 5
    return content[:at] + struct.pack(">HH", side, side) + content[at + 4 :]


def webp(side: int) -> bytes:
    """A black image of this side, which compresses to a small file."""
    empty = Pictures.new("RGB", (side, side))
    stream = io.BytesIO()
    empty.save(stream, "WEBP", lossless=True, quality=0, method=0)
    return stream.getvalue()


LARGE: dict[str, Callable[[int], bytes]] = {
    "PNG": lambda side: (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(10**6)))
        + chunk(b"IEND", b"")
    ),
    "GIF": lambda side: b"GIF89a" + struct.pack("<HH", side, side) + encoded("GIF")[10:],
    "PPM": lambda side: b"P6 %d %d 255\n" % (side, side),
    "TIFF": tiff,
    "BMP": bmp,
    "JPEG": jpeg,
}


@pytest.mark.parametrize("side", [12_000, 60_000])
@pytest.mark.parametrize("name", LARGE)
def test_images_that_are_too_large_are_refused_by_their_headers(
    name: str, side: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "1.png").write_bytes(LARGE[name](side))
    decoded = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda self: decoded.append(self.size) or load(self)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(place, rf"1\.png (has {side}x{side} pixels|cannot be read .*DecompressionBomb)")
    assert (side, side) not in decoded


def test_a_webp_image_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.webp").write_bytes(webp(9_500))
    with pytest.raises(
        DataError, match=r"a\.webp has 9500x9500 pixels; expected at most 89,478,485"
    ):
        read_picture(tmp_path / "a.webp")


def test_large_compressed_texts_in_an_image_are_refused(tmp_path: Path) -> None:
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**27)))
    at = (content := encoded("PNG")).index(b"IDAT") - 4
    (tmp_path / "a.png").write_bytes(content[:at] + bomb + content[at:])
    assert PngImagePlugin.MAX_TEXT_CHUNK == 2**20
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image .*too large"):
        read_picture(tmp_path / "a.png")


def test_a_file_above_the_size_limit_is_refused(tmp_path: Path) -> None:
    for name in ("a.webp", "b.dcm"):
        (tmp_path / name).write_bytes(encoded("WEBP"))
        os.truncate(tmp_path / name, 2**40)  # sparse
        with pytest.raises(DataError, match=rf"{name}: found 1,099.5 GB; expected at most 1.1 GB"):
            read_picture(tmp_path / name)


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animated_images_are_refused(name: str, tmp_path: Path) -> None:
    others = [Pictures.fromarray(255 - PIXELS)]
    (tmp_path / "a.png").write_bytes(encoded(name, save_all=True, append_images=others))
    with pytest.raises(DataError, match=r"a\.png has several frames; expected a single frame"):
        read_picture(tmp_path / "a.png")


def test_the_first_photo_of_a_multi_picture_jpeg_is_read(tmp_path: Path) -> None:
    others = [Pictures.fromarray(255 - PIXELS)]
    (tmp_path / "a.jpg").write_bytes(encoded("MPO", save_all=True, append_images=others))
    image = read_picture(tmp_path / "a.jpg")
    assert image.format == "MPO"
    assert abs(np.asarray(image).astype(int) - PIXELS).mean() < 64


def pipe(path: Path) -> None:
    os.mkfifo(path)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, "is not a regular file. Remove or replace it"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "folder": (Path.mkdir, "is not a regular file"),
    "loop": (lambda path: path.symlink_to(path), "cannot be read as an image .*symbolic links"),
    "nothing": (lambda path: path.symlink_to("/nowhere"), "cannot be read as an image .*No such"),
    "empty": (Path.touch, "cannot be read as an image: found an unknown format"),
}


@pytest.mark.posix
@pytest.mark.parametrize("suffix", ["png", "dcm"])
@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_read_as_images(kind: str, suffix: str, place: Path) -> None:
    make, message = ODD[kind]
    make(place / f"1.{suffix}")
    if (kind, suffix) == ("empty", "dcm"):
        message = "cannot be read as an image"
    refused(place, rf"1\.{suffix} {message}")


@pytest.mark.posix
def test_only_regular_files_are_hashed_for_their_order(tmp_path: Path) -> None:
    from fairflower.published.image_sets import PACS

    for label in PACS.classes:
        (tmp_path / "photo" / label).mkdir(parents=True)
        Pictures.fromarray(PIXELS).save(tmp_path / "photo" / label / "1.png")
    pipe(tmp_path / "photo" / "dog" / "2.png")
    with pytest.raises(DataError, match=r"dog/2\.png is not a regular file"):
        prepare(DataConfig(name="pacs", domains="photo", dir=str(tmp_path)))


@pytest.mark.posix
def test_symbolic_links_to_a_parent_folder_are_refused(place: Path) -> None:
    (place / "1.png").write_bytes(encoded("PNG"))
    (place / "back").symlink_to(place.parents[1])
    config = DataConfig(
        name="images", dir=str(place.parents[1]), image_size=4, clients_per_domain=1
    )
    with pytest.raises(DataError, match=r"cat/back/a/.*png is too deep"):
        prepare(config)


# --- data sets of Hugging Face ----------------------------------------------------------


def saved(folder: Path, rows: list[Any]) -> DataConfig:
    """Save these rows as train and test splits, without opening their files."""
    features = Features({"image": Image(decode=False), "label": Value("int64")})
    data = Dataset.from_dict({"image": rows, "label": [0] * len(rows)}, features=features)
    data = data.cast_column("image", Image())
    DatasetDict(train=data, test=data).save_to_disk(str(folder / "mnist"))
    return config_of(folder)


def config_of(folder: Path) -> DataConfig:
    chosen = {"domains": "mnist", "clients_per_domain": 1, "examples_per_client": 4}
    return DataConfig(name="digits", dir=str(folder), **chosen)  # type: ignore[arg-type]


def of_path(path: Path) -> dict[str, Any]:
    return {"bytes": None, "path": str(path)}


@pytest.mark.posix
def test_images_of_saved_data_sets_are_checked_like_files(
    tmp_path: Path, ghostscript: Path
) -> None:
    pipe(tmp_path / "pipe.png")
    good = {"bytes": encoded("PNG"), "path": None}
    for number, (row, message) in enumerate(
        (
            ({"bytes": EPS, "path": "a.png"}, "cannot be read as an image: found EPS"),
            ({"bytes": LARGE["PNG"](12_000), "path": None}, "has 12000x12000 pixels"),
            (None, "found NoneType; expected a column"),
        )
    ):
        config = saved(tmp_path / str(number), [row] + 3 * [good])
        with pytest.raises(DataError, match=rf"mnist: (train|test): row 0:? .*{message}"):
            prepare(config)
    with pytest.raises(DataError, match=r"row 3 cannot be read as an image .*No such file"):
        picture_in(of_path(tmp_path / "nowhere.png"), "row 3")
    with pytest.raises(DataError, match=r"pipe\.png is not a regular file"):
        picture_in(of_path(tmp_path / "pipe.png"), "row 3")
    pipe(tmp_path / "0" / "mnist" / "train" / "data-00001-of-00001.arrow")
    with pytest.raises(DataError, match=r"data-00001-of-00001\.arrow is not a regular file"):
        prepare(config_of(tmp_path / "0"))
    assert not ghostscript.exists()


@pytest.mark.parametrize("mode", [None, "L"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_images_are_decoded_as_by_the_datasets_library(
    orientation: int | None, mode: str | None, tmp_path: Path
) -> None:
    exif = Pictures.Exif()
    if orientation:
        exif[0x0112] = orientation
    value = {"bytes": encoded("JPEG", exif=exif), "path": None}
    expected = Image(mode=mode).decode_example(value)
    image = picture_in(value, "row 0", mode)
    assert image.mode == expected.mode
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    (tmp_path / "1.jpg").write_bytes(value["bytes"])
    if mode is None:  # photos in folders are rotated alike
        np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "1.jpg")), image)


def test_damaged_exif_data_do_not_change_an_image(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(encoded("PNG", exif=b"no TIFF file"))
    np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "1.png")), PIXELS)


# --- npz --------------------------------------------------------------------------------


def arrays(**changes: Any) -> dict[str, Any]:
    x = np.zeros((6, 4, 4), np.uint8)
    y = np.arange(6) % 2
    return {"x_train": x, "y_train": y, "x_test": x, "y_test": y, **changes}


def npz(folder: Path) -> DataConfig:
    return DataConfig(name="npz", dir=str(folder), clients_per_domain=1)


def claiming(path: Path, key: str, shape: str, dtype: str = "|u1") -> None:
    """Write an .npz file whose array ``key`` declares this shape, but has 96 bytes."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(96)
    np.savez(path, **{name: a for name, a in arrays().items() if name != key})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_LZMA) as archive:
        archive.writestr(f"{key}.npy", content)


@pytest.mark.parametrize("key", ["x_train", "y_train", "x_test", "y_test"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (f"({10**6}, {10**6}, {10**6})", r"data for uint8 \[1000000, .* 1000000000000000000 bytes"),
        (f"({2**62}, 4, 4)", "found 96 bytes of data for .*; expected"),
        (f"({2**63},)", "found 96 bytes of data for .*; expected|cannot be read"),
        ("(-1, 4, 4)", "found 96 bytes of data for|cannot be read"),
        ("(6, 4, 5)", r"found 96 bytes of data for uint8 \[6, 4, 5\]; expected 120"),
        ("'abc'", "cannot be read"),
        ("(6, 4, 4" + " " * 20_000 + ")", "cannot be read"),
    ],
)
def test_arrays_with_a_false_shape_in_their_header_are_refused(
    key: str, shape: str, message: str, tmp_path: Path
) -> None:
    claiming(tmp_path / "a.npz", key, shape)
    with pytest.raises(DataError, match=rf"a\.npz: {key}:? .*({message})"):
        prepare(npz(tmp_path))


def test_arrays_that_exceed_memory_are_not_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "a.npz", **arrays(x_train=np.zeros((6, 4000, 4000), np.uint8)))
    assert (tmp_path / "a.npz").stat().st_size < 10**6
    monkeypatch.setattr(files, "free_memory", lambda: 5 * 10**7)
    with pytest.raises(
        DataError, match=r"x_train: found uint8 \[6, 4000, 4000\], 0.1 GB; expected .* 0.1 GB\."
    ):
        prepare(npz(tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"x_train": np.zeros((7, 4, 4), np.uint8)},
        {"x_train": np.zeros((6, 4, 4))},
        {"x_train": np.zeros((6, 16), np.uint8)},
    ],
)
def test_images_of_a_wrong_type_or_shape_are_refused_before_they_are_read(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", **arrays(**wrong))
    read, seen = np.lib.format.read_array, []

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(read(*args, **options))
        return seen[-1]

    monkeypatch.setattr(np.lib.format, "read_array", watched)
    with pytest.raises(DataError, match="x_train: found"):
        prepare(npz(tmp_path))
    assert {array.ndim for array in seen} == {1}


def test_npz_members_that_are_not_arrays_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("y_train", b"bytes")
    with pytest.raises(DataError, match=r"a\.npz: y_train cannot be read"):
        prepare(npz(tmp_path))


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["npz", "digits"])
def test_only_regular_files_are_read_as_npz(name: str, kind: str, tmp_path: Path) -> None:
    make, message = ODD[kind]
    make(tmp_path / "mnist.npz")
    with pytest.raises(DataError, match=rf"mnist\.npz {message}"):
        prepare(DataConfig(name=name, domains="mnist", dir=str(tmp_path), clients_per_domain=1))


# --- DICOM and tables -------------------------------------------------------------------


def dicom(path: Path, **header: Any) -> Path:
    from tests.data.test_own_folder import dicom

    return dicom(path, np.full((4, 4), 7, np.uint16), **header)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"Rows": 60_000, "Columns": 60_000}, "found MONOCHROME2 of 60000x60000 pixels; expected"),
        ({"NumberOfFrames": 10**9}, r"of shape \[1000000000, 4, 4\]; expected a single frame"),
        ({"Rows": 0}, "cannot be read as an image"),
        ({"Rows": 400}, "cannot be read as an image"),
        ({"BitsStored": 60_000}, "cannot be read as an image"),
        ({"RescaleSlope": 1e308, "RescaleIntercept": 1e308}, "not a finite number|cannot be read"),
    ],
)
def test_dicom_files_with_false_headers_are_refused(
    header: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.dcm"
    dicom(path, **header)
    with pytest.raises(DataError, match=rf"a\.dcm:? .*({message})"), np.errstate(all="ignore"):
        read_picture(path)


def test_deflated_dicom_files_are_refused(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    data_set = pydicom.dcmread(dicom(tmp_path / "a.dcm"))
    data_set.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    data_set.save_as(tmp_path / "b.dcm")
    with pytest.raises(DataError, match=r"b\.dcm is a deflated DICOM file, which is not supported"):
        read_picture(tmp_path / "b.dcm")


def test_the_pixel_limit_of_dicom_images_is_pillows() -> None:
    assert MAX_PIXELS == Pictures.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"image,label\n\xff\xfe,1\n"],
)
def test_invalid_tables_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.csv cannot be read as a CSV file in UTF-8"):
        read_csv(tmp_path / "a.csv", {"image": "", "label": ""})


def test_a_table_that_is_a_named_pipe_is_refused(tmp_path: Path) -> None:
    pipe(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.csv is not a regular file"):
        read_csv(tmp_path / "a.csv", {"image": "", "label": ""})
