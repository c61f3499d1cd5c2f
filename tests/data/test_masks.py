"""Data for segmentation: the embedded strokes, and a user's images with masks."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import call
from PIL import Image

from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.data.images import nearest
from fairflower.data.own_images import MaskFolder
from fairflower.data.show import contact_sheet
from fairflower.data.sites import merge_sites, open_site
from fairflower.errors import DataError
from fairflower.published.strokes import TRAIN_SIZES, Strokes, generate, source_rows
from fairflower.published.uci_digits import source_rows as digits_of
from fairflower.testing import check_data

# --- strokes --------------------------------------------------------------------------------------


def test_strokes_pass_check_data() -> None:
    check_data(Strokes)


def test_strokes_are_the_same_everywhere() -> None:
    digest = hashlib.sha256()
    for x, masks in generate().values():
        assert x.dtype == masks.dtype == np.uint8
        assert x.shape == masks.shape
        assert 0.14 < masks.mean() < 0.18
        digest.update(masks.tobytes())
    assert digest.hexdigest()[:12] == "6d16dd5705fe"


def test_strokes_have_the_documented_sizes() -> None:
    federation = prepare(DataConfig(name="strokes"))
    sizes = [client.num_examples for client in federation.clients]
    assert sizes == [96] * 5 + [48] * 5 + [32] * 10
    assert federation.test_sizes == (160,) * 4
    assert (federation.shape, federation.num_classes) == ((1, 32, 32), 2)
    x, y = federation.train(0)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((96, 1, 32, 32), "u1", (96, 32, 32), "u1")
    assert all(client.class_counts == () for client in federation.clients)


def test_no_digit_is_used_twice_and_no_session_in_both_splits() -> None:
    rows = source_rows()
    every = np.concatenate(list(rows.values()))
    assert len(np.unique(every)) == len(every) == sum(TRAIN_SIZES.values()) + 4 * 160
    first_test = min(rows[domain, "test"].min() for domain in TRAIN_SIZES)
    assert max(rows[domain, "train"].max() for domain in TRAIN_SIZES) < first_test
    assert min(of.min() for (_, split), of in digits_of().items() if split == "test") <= first_test


def test_masks_are_resized_with_the_images() -> None:
    whole, half = prepare(DataConfig(name="strokes")), prepare(DataConfig("strokes", image_size=16))
    x, y = half.test("fax")
    assert (x.shape[2:], y.shape[1:]) == ((16, 16), (16, 16))
    np.testing.assert_array_equal(y, nearest(whole.test("fax").y, (16, 16)))


# --- a folder with masks --------------------------------------------------------------------------


def write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values, np.uint8)).save(path)


def folder(
    tmp_path: Path, foreground: int = 1, sites: tuple[str, ...] = ("north", "south")
) -> Path:
    """Write images of bright discs of different sizes; masks are TIFF files."""
    rng = np.random.default_rng(0)
    for k, site in enumerate(sites):
        for i in range(6 + k):
            height, width = rng.integers(20, 40, 2)
            y, x = np.mgrid[:height, :width]
            disc = (y - height / 2) ** 2 + (x - width / 2) ** 2 < 60
            write(tmp_path / site / "images" / f"p{i}.png", 60 + 150 * disc)
            write(tmp_path / site / "masks" / f"p{i}.tif", foreground * disc)
    return tmp_path


def data(path: Path, name: str = "masks", **settings: Any) -> DataConfig:
    return DataConfig(
        **{"name": name, "dir": str(path), "image_size": 16, "clients_per_domain": 2} | settings
    )


@pytest.mark.parametrize("foreground", [1, 255])
def test_images_and_masks_are_read_and_resized(tmp_path: Path, foreground: int) -> None:
    federation = prepare(data(folder(tmp_path, foreground)))
    assert federation.domains == ("north", "south")
    assert (federation.num_classes, federation.shape) == (2, (3, 16, 16))
    assert federation.test_sizes == (2, 2)  # the first image and every fifth after it
    for domain in federation.domains:
        x, y = federation.test(domain)
        assert set(np.unique(y)) == {0, 1}
        assert (x[:, 0][y == 1] > 150).mean() > 0.85  # masks are where the discs are
        assert (x[:, 0][y == 0] < 150).mean() > 0.85
    names = [path.name for path in (tmp_path / "north" / "masks").iterdir()]
    rows = MaskFolder(data(tmp_path)).labels("north", "test")
    for name, mask in zip(sorted(names)[::5], rows, strict=True):
        stored = np.asarray(Image.open(tmp_path / "north" / "masks" / name)) > 0
        np.testing.assert_array_equal(mask, nearest(stored[None], (16, 16))[0])


def test_the_folder_passes_check_data(tmp_path: Path) -> None:
    check_data(MaskFolder, data(folder(tmp_path)))


def test_a_single_site_is_named_after_its_folder(tmp_path: Path) -> None:
    folder(tmp_path, sites=("clinic",))
    assert prepare(data(tmp_path / "clinic")).domains == ("clinic",)


def test_unknown_pixels_palettes_and_gray_in_colors_are_read(tmp_path: Path) -> None:
    folder(tmp_path)
    path = tmp_path / "north" / "masks" / "p0.tif"
    mask = np.asarray(Image.open(path)).copy()
    mask[:4], mask[4:8] = 255, 2
    path.unlink()
    picture = Image.fromarray(mask, mode="P")
    picture.putpalette(list(range(255, -1, -1)) * 3)
    picture.save(tmp_path / "north" / "masks" / "p0.png")
    rgb = tmp_path / "north" / "masks" / "p1.tif"
    Image.fromarray(np.asarray(Image.open(rgb))).convert("RGB").save(rgb)
    federation = prepare(data(tmp_path))
    assert federation.num_classes == 3
    masks = np.concatenate([federation.test("north").y, federation.test("north", "train").y])
    assert set(np.unique(masks)) == {0, 1, 2, 255}


def test_masks_in_dicom_files_keep_their_values(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset

    folder(tmp_path)
    path = tmp_path / "north" / "masks" / "p0.tif"
    mask = np.asarray(Image.open(path)).astype(np.uint16)
    path.unlink()
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = meta.MediaStorageSOPInstanceUID = "1.2.3"
    file = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = mask.shape
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit = 16, 16, 15
    file.PixelRepresentation, file.PixelData = 0, mask.tobytes()
    file.WindowCenter, file.WindowWidth = 500, 100  # which images use, and masks do not
    file.save_as(path.with_suffix(".dcm"), enforce_file_format=True)
    (first, _) = MaskFolder(data(tmp_path)).labels("north", "test")
    np.testing.assert_array_equal(first, nearest(mask[None], (16, 16))[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "north/masks/p3.tif").unlink(), r"north/images/p3\.png has no mask"),
        (lambda p: (p / "south/images/p2.png").unlink(), r"masks/p2\.tif is the mask of no image"),
        (
            lambda p: write(p / "north/masks/p2.tif", np.ones((9, 8))),
            r"masks/p2\.tif: the mask has 8x9 pixels; expected \d+x\d+, as its image .*p2\.png",
        ),
        (lambda p: shutil.rmtree(p / "south/masks"), r"south/masks does not exist"),
        (
            lambda p: [f.unlink() for f in (p / "south/images").iterdir()],
            r"south/images has no images",
        ),
        (
            lambda p: write(p / "north/images/p1.jpg", np.ones((9, 9))),
            r"p1\.png and .*p1\.jpg have the same name",
        ),
        (
            lambda p: write(p / "north/masks/p1.tif", np.arange(48).reshape(4, 4, 3)),
            r"p1\.tif: found uint8 \[4, 4, 3\]; expected a mask \[H, W\]",
        ),
        (
            lambda p: [write(f, 0 * np.asarray(Image.open(f))) for f in p.glob("*/masks/*")],
            r"all masks are 0\. Expected a class from 1",
        ),
        (
            lambda p: [write(f, 255 * np.asarray(Image.open(f))) for f in p.glob("north/masks/*")],
            r"north: found masks with no other values than 0 and 255, but .* the class 1",
        ),
        (
            lambda p: [f.unlink() for f in p.glob("north/*/p[1-9]*")],
            r"north has too few images: the first",
        ),
    ],
)
def test_damaged_folders_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    damage(folder(tmp_path))
    with pytest.raises(DataError, match=message):
        prepare(data(tmp_path))


def test_classes_beyond_the_range_are_named(tmp_path: Path) -> None:
    folder(tmp_path, foreground=3)
    message = r"masks/p0\.tif: found the value 3; expected class numbers from 0 to 1, or 255"
    with pytest.raises(DataError, match=message):
        prepare(data(tmp_path, "masks:classes=2"))
    assert prepare(data(tmp_path, "masks:classes=5")).num_classes == 5
    Image.fromarray(np.full((20, 20), 300, np.uint16)).save(tmp_path / "north/masks/p1.tif")
    with pytest.raises(DataError, match=r"p1\.tif: found the value 300; expected .* 0 to 254"):
        prepare(data(tmp_path))


def test_masks_in_npz_files_are_read_and_must_fit_their_images(tmp_path: Path) -> None:
    arrays = {
        f"{axis}_{split}": np.zeros((4, 8, 8), np.uint8)
        for axis in "xy"
        for split in ("train", "test")
    }
    arrays["y_train"][:, 2:5] = 1
    wide = np.tile(np.arange(9, dtype=np.uint8) % 2, (4, 8, 1))
    np.savez(tmp_path / "one.npz", **arrays)
    config = DataConfig("npz", task="segmentation", dir=str(tmp_path), clients_per_domain=1)
    assert prepare(config).train(0).y.shape == (4, 8, 8)
    np.savez(tmp_path / "one.npz", **arrays | dict.fromkeys(("y_train", "y_test"), wide))
    with pytest.raises(DataError, match=r"masks of 8x9 pixels; expected 8x8, the images' size"):
        prepare(config)


def test_sites_may_lack_classes_if_their_number_is_set(tmp_path: Path) -> None:
    folder(tmp_path)
    write(
        tmp_path / "north/masks/p1.tif", 2 * np.asarray(Image.open(tmp_path / "north/masks/p1.tif"))
    )
    for name, message in (
        ("masks", r"targets differ \(north 3; south 2\)"),
        ("masks:classes=3", ""),
    ):
        sites = [
            open_site(data(tmp_path / site, name, clients_per_domain=1), site)
            for site in ("north", "south")
        ]
        if message:
            with pytest.raises(DataError, match=message):
                merge_sites(sites)
        else:
            assert merge_sites(sites).num_classes == 3


def test_the_contact_sheet_outlines_masks(tmp_path: Path) -> None:
    picture = np.asarray(
        Image.open(contact_sheet(prepare(data(folder(tmp_path))), tmp_path / "x.png"))
    )
    orange = (np.abs(picture[..., :3].astype(int) - [255, 127, 14]) < 40).all(-1)
    assert orange.sum() > 500


def test_data_show_names_the_task(tmp_path: Path) -> None:
    out = str(tmp_path / "sheet.png")
    shown = call("data", "show", "strokes", "--out", out)
    assert "task: segmentation" in shown
    assert "targets: 0 paper, 1 stroke" in shown
