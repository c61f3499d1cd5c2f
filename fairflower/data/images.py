"""Tables of images, and decoding, resizing and corruption of images."""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fairflower.data import files
from fairflower.data.federation import Ints, Pixels
from fairflower.errors import DataError, require
from fairflower.seeds import derive_seed
from fairflower.tasks import Targets

if TYPE_CHECKING:  # Pillow and pydicom are not in every installation
    import pydicom
    from datasets import Dataset, DatasetDict
    from PIL import Image

SUFFIXES = (".dcm", ".dicom")  # extensions of DICOM files

#: Maximum number of pixels. Above this limit, Pillow warns of a decompression bomb.
MAX_PIXELS = 2**30 // 12

#: Supported formats, by their names in Pillow. Other formats are not tried: EPS, for example, would
#: run a program in the file with Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF")


@dataclass(frozen=True)
class FileTable:
    """Table of image files that are not yet decoded: a label and a file for each image.

    Every source of images is read by such a table: folders of classes, a .csv file with the names
    of images, and rows of a Hugging Face data set. ``labels`` are their targets. ``where`` returns
    the name of the image in a row, for error messages. ``pictures`` decodes the images of rows,
    one at a time.
    """

    labels: Targets
    where: Callable[[int], str]
    pictures: Callable[[Ints], Iterator[Image.Image]]

    def pixels(self, rows: Ints, side: int, source: str, bits: int = 16) -> tuple[Pixels, int]:
        """Return the images of these rows as squares, uint8 [len(rows), side, side, 3].

        Also returns the largest value in images with over 8 bits, of which ``bits`` are used.
        ``source`` is the name of the table in errors.
        """
        found = f"{source}: {len(rows)} images of {side}x{side} pixels take"
        files.check_memory(found, 3 * len(rows) * side**2, "Lower data.image-size.")
        pixels, largest = np.empty((len(rows), side, side, 3), np.uint8), 0
        for i, picture in enumerate(self.pictures(rows)):
            values = eight_bit(picture, self.where(int(rows[i])), bits)
            pixels[i] = resize(values[None], (side, side))[0]
            if picture.mode.startswith("I"):
                largest = max(largest, int(np.asarray(picture).max()))
        return pixels, largest


@dataclass(frozen=True)
class HuggingFaceImages:
    """Rows of a Hugging Face data set with an ``image`` column; ``where`` is its name in errors."""

    data: Dataset
    where: str

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column [N], with names instead of numbers if the column has class names."""
        values: npt.NDArray[Any] = np.asarray(self.data[name][:])
        names = getattr(self.data.features[name], "names", None)
        if names is None or values.dtype.kind not in "iu" or not len(values):
            return values
        numbers = files.checked_labels(f"{self.where}: {name}", values, len(names))
        return np.array([names[k] for k in numbers])

    def table(self, rows: Ints, labels: Targets) -> FileTable:
        """Return the table of the images in these rows, which have these labels."""
        undecoded, mode = self._files

        def where(position: int) -> str:
            return f"{self.where}: row {rows[position]}"

        def pictures(positions: Ints) -> Iterator[Image.Image]:
            chosen = undecoded.select(rows[positions])
            for position, example in zip(positions.tolist(), chosen, strict=True):
                yield picture_in(example["image"], where(position), mode)

        return FileTable(labels, where, pictures)

    def hashes(self, rows: Ints) -> list[str]:
        """Return the SHA-256 of each row's image file, or "" for a row without a file."""
        found = (example["image"] for example in self._files[0].select(rows))
        return [_hash(file) if isinstance(file, dict) else "" for file in found]

    @cached_property
    def _files(self) -> tuple[Dataset, str | None]:
        """The undecoded image column, for `picture_in`, and the color mode of its images."""
        from datasets import Image as Feature

        images, feature = self.data.select_columns(["image"]), self.data.features["image"]
        if not isinstance(feature, Feature):
            return images, None
        return images.cast_column("image", Feature(decode=False)), feature.mode


def split_table(
    splits: DatasetDict, split: str, where: str, num_outputs: int | None, task: str
) -> FileTable:
    """Return the table of a split of a Hugging Face data set with the columns image and label.

    For labels see `fairflower.data.files.checked_labels`. ``where`` is the data's name in errors.
    """
    if split not in splits:
        found = ", ".join(map(str, splits))
        raise DataError(f"{where}: found the splits {found}; expected train and test.")
    images = HuggingFaceImages(splits[split], f"{where}: {split}")
    files.check_columns(images.where, ("image", "label"), images.data.column_names)
    values = np.asarray(images.data["label"][:])
    labels = files.checked_labels(f"{images.where}: label", values, num_outputs, task)
    return images.table(np.arange(len(labels)), labels)


def load_hub(name: str, subset: str | None, remedy: str, splits: Sequence[str]) -> DatasetDict:
    """Download a data set from the Hugging Face Hub through flwr-datasets."""
    require("sim", f"{name} on the Hugging Face Hub", "flwr_datasets", "datasets")
    from datasets import DatasetDict
    from flwr_datasets import FederatedDataset

    with files.explained(f"{name} cannot be downloaded from the Hugging Face Hub", remedy):
        hub = FederatedDataset(dataset=name, subset=subset, partitioners={}, shuffle=False)
        return DatasetDict({split: hub.load_split(split) for split in splits})


def load_saved(folder: Path) -> Dataset | DatasetDict:
    """Load the data set that ``save_to_disk`` wrote to a folder."""
    require("sim", "A Hugging Face data set", "datasets")
    from datasets import load_from_disk

    for path in folder.rglob("*"):
        if path.exists() and not path.is_dir():
            files.check_regular(path)
    with files.explained(f"{folder} is not a Hugging Face data set written with save_to_disk"):
        return load_from_disk(str(folder))


def is_hf_dataset_folder(folder: Path) -> bool:
    """Return whether Hugging Face's ``save_to_disk`` wrote this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(file: dict[str, Any]) -> str:
    content = file["bytes"]
    return hashlib.sha256(content).hexdigest() if content else file_hash(Path(file["path"]))


def read_picture(path: Path) -> Image.Image:
    """Decode an image file, with pydicom if it has a DICOM extension and with Pillow otherwise.

    The image is rotated upright, as its EXIF orientation says.

    Raises ``DataError`` if the file is not a regular file, is damaged or is in none of the
    `FORMATS`, or if its header declares several frames or more than `MAX_PIXELS` pixels.
    """
    with _explained(path):
        if path.suffix.lower() in SUFFIXES:
            return read_dicom(path)
        with files.open_regular(path) as file:
            return _decoded(file, str(path))


def picture_in(value: Any, where: str, mode: str | None = None) -> Image.Image:
    """Decode an image file from a row of a Hugging Face data set.

    ``value`` is a mapping with the file's "bytes" or "path". As in ``datasets``, the image is
    rotated upright and, if ``mode`` is given, converted to this color mode. Raises the same errors
    as `read_picture`.
    """
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: image: found {type(value).__name__}; expected a column of the feature type "
            "datasets.Image."
        )
    with _explained(where):
        content = value["bytes"]
        opened = files.open_regular(Path(value["path"])) if content is None else io.BytesIO(content)
        with opened as file:
            picture = _decoded(file, where)
        return picture.convert(mode) if mode else picture


def _explained(where: Path | str) -> AbstractContextManager[None]:
    problem = f"{where} cannot be read as an image"
    return files.explained(problem, "Replace it with the original file")


def _decoded(file: BinaryIO, where: str) -> Image.Image:
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():  # large images are refused below
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            picture = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            raise DataError(
                f"{where} cannot be read as an image: found {_format_of(file)}; expected "
                f"{', '.join(FORMATS)} or DICOM. Replace it, or convert it to PNG."
            ) from error
    if not 0 < picture.width * picture.height <= MAX_PIXELS:
        raise DataError(
            f"{where} has {picture.width}x{picture.height} pixels; expected at most "
            f"{MAX_PIXELS:,}. Reduce its size."
        )
    # An MPO file is a JPEG file with several photos, of which the first is the main photo.
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        raise DataError(
            f"{where} has several frames; expected a single frame. Export the frames as PNG files."
        )
    picture.load()
    with suppress(Exception):  # damaged EXIF data do not say that the image is rotated
        ImageOps.exif_transpose(picture, in_place=True)
    return picture


def _format_of(file: BinaryIO) -> str:
    """Detect the format of a file from Pillow's signatures, reading only the first bytes."""
    from PIL import Image

    file.seek(0)
    start = file.read(16)
    marks = ((name, accept) for name, (_, accept) in Image.OPEN.items() if accept and start)
    name = next((name for name, accept in marks if accept(start) is True), "")
    return f"a damaged {name} file" if name in FORMATS else name or "an unknown format"


def eight_bit(picture: Image.Image, where: str, bits: int = 16) -> Pixels:
    """Convert a picture to 8-bit RGB, uint8 [H, W, 3]; ``where`` is its name in errors.

    Gray pictures with more than 8 bits are scaled by their bit depth and not by their content, so
    that a value has the same brightness in all pictures. Whole numbers from 0 to ``2**bits - 1``,
    or real numbers from 0 to 1, are mapped to 0 to 255 and rounded. Raises ``DataError`` for values
    outside this range, because it is then unknown which value is white.
    """
    if not picture.mode.startswith(("I", "F")):
        return np.asarray(picture.convert("RGB"))
    values = np.asarray(picture)
    white = 1 if picture.mode == "F" else 2**bits - 1
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= white):
        kind = "real" if picture.mode == "F" else "whole"
        raise DataError(
            f"{where}: found {kind} numbers from {low:g} to {high:g}; expected numbers from 0 "
            f"(black) to {white} (white). Scale all images in the same way, or apply a window."
        )
    gray = np.rint(values * (255 / white)).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2)


def to_chw(images: Pixels, channels: int, height: int, width: int) -> Pixels:
    """Resize images, repeat gray in all ``channels``, and move the channels to the front.

    ``images`` are uint8 [N, H, W], [N, H, W, 1] or [N, H, W, 3]. ``channels`` is 1 or 3; color
    images need 3. Returns a contiguous array, uint8 [N, channels, height, width].

    >>> to_chw(np.zeros((5, 4, 4), np.uint8), channels=3, height=8, width=8).shape
    (5, 3, 8, 8)
    """
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    found = f"{len(images)} images of {height}x{width} pixels take"
    needed = len(images) * channels * height * width
    files.check_memory(found, needed, "Lower data.image-size, or use fewer images.")
    images = resize(images, (height, width))
    if images.ndim == 3:
        return np.repeat(images[:, None], channels, axis=1)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def resize(images: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize images like ``torchvision.transforms.Resize``, with PIL's antialiased bilinear filter.

    ``images`` are uint8 [N, H, W] or [N, H, W, 3]; ``size`` is (height, width).
    """
    if images.shape[1:3] == size:
        return images
    from PIL import Image

    resized = np.empty((len(images), *size, *images.shape[3:]), np.uint8)
    for i, image in enumerate(images):
        resized[i] = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
    return resized


def nearest(masks: Targets, size: tuple[int, ...]) -> Targets:
    """Return masks [N, H, W] with another height and width, by nearest neighbor.

    >>> nearest(np.array([[[0, 1], [2, 3]]]), (4, 2)).tolist()
    [[[0, 1], [0, 1], [2, 3], [2, 3]]]
    """
    if masks.shape[1:] == size:
        return masks
    rows, columns = (
        ((np.arange(new) + 0.5) * old / new).astype(np.int64)
        for new, old in zip(size, masks.shape[1:], strict=True)
    )
    return masks[:, rows[:, None], columns]


def read_mask(path: Path) -> npt.NDArray[Any]:
    """Return the values in an image file of a mask, whole numbers [H, W].

    Values are those stored: of a DICOM file without its window, and of a palette the indices.
    Colors are accepted if red, green and blue are equal. Raises the errors of `read_picture`, and
    ``DataError`` for other colors or real numbers.
    """
    with _explained(path):
        if path.suffix.lower() in SUFFIXES:
            values: npt.NDArray[Any] = _dicom(path)[0]
        else:
            picture = read_picture(path)
            values = np.asarray(picture.convert("L") if picture.mode == "LA" else picture)
        if values.ndim == 3 and (values[..., :3] == values[..., :1]).all():
            values = values[..., 0]
        if values.ndim != 2 or values.dtype.kind not in "biu":
            raise DataError(
                f"{path}: found {files.described(values.dtype, values.shape)}; expected a mask "
                "[H, W] of whole numbers, in gray or with a palette. Convert it."
            )
        return values


def read_dicom(path: Path) -> Image.Image:
    """Read the image in a DICOM file, as grayscale or RGB.

    Gray values are rescaled by the file's slope and intercept (for example to Hounsfield units).
    Values are clipped to the first window, if the file has windows, or mapped by the VOI LUT, if it
    has one instead. The range of the window or the table is then scaled to 0 to 255. If the file
    has neither, the range is that of ``BitsStored`` bits. MONOCHROME1, where 0 is white, is
    inverted.

    Raises ``DataError`` if pydicom is not installed, or if the file has several frames, palette
    colors or more than `MAX_PIXELS` pixels, or is deflated as a whole, because its size is then
    unknown.
    """
    from PIL import Image

    values, header = _dicom(path)
    white = 2.0**header.BitsStored - 1
    shown = _windowed(values, header) if _is_gray(header) else values / white
    if not np.isfinite(shown).all():
        raise DataError(
            f"{path}: its slope, intercept or window is not a finite number. Correct it."
        )
    if header.PhotometricInterpretation == "MONOCHROME1":
        shown = 1 - shown
    return Image.fromarray(np.rint(255 * shown.clip(0, 1)).astype(np.uint8))


def _dicom(path: Path) -> tuple[npt.NDArray[Any], pydicom.Dataset]:
    """Return the stored values in a DICOM file, [H, W] or [H, W, 3], and its header."""
    header = _header(path)
    from pydicom.pixels import pixel_array

    found = f"{path}: found {header.PhotometricInterpretation}"
    frames = int(header.get("NumberOfFrames") or 1)
    sides, samples = (int(header.Rows), int(header.Columns)), int(header.SamplesPerPixel)
    if frames != 1 or samples != (1 if _is_gray(header) else 3):
        shape = [*([frames] if frames != 1 else []), *sides, *([samples] if samples != 1 else [])]
        raise DataError(
            f"{found} of shape {shape}; expected a single frame, grayscale or RGB. Export the "
            "frames as PNG files."
        )
    if sides[0] * sides[1] > MAX_PIXELS:
        raise DataError(
            f"{found} of {sides[1]}x{sides[0]} pixels; expected at most {MAX_PIXELS:,} pixels. "
            "Reduce its size."
        )
    return pixel_array(header), header


def _is_gray(header: pydicom.Dataset) -> bool:
    return header.PhotometricInterpretation in ("MONOCHROME1", "MONOCHROME2")


def patient_in(path: Path) -> str:
    """Return the PatientID of an image, or "" if it is no DICOM file or has none."""
    if path.suffix.lower() not in SUFFIXES:
        return ""
    with _explained(path):
        only: Any = {"stop_before_pixels": True, "specific_tags": ["PatientID"]}
        return str(_header(path, **only).get("PatientID") or "").strip()


def _header(path: Path, **options: Any) -> pydicom.Dataset:
    """Read a DICOM file with pydicom's options."""
    try:
        from pydicom import dcmread
        from pydicom.filereader import read_file_meta_info
    except ImportError:
        raise DataError(
            f"{path} is a DICOM file. To read it, install pydicom: pip install "
            "'fairflower[medical]'."
        ) from None
    with files.open_regular(path) as file:
        syntax = read_file_meta_info(path).get("TransferSyntaxUID")
        if syntax is not None and syntax.is_deflated:
            raise DataError(
                f"{path} is a deflated DICOM file, which is not supported. Decompress it."
            )
        return dcmread(file, **options)


def _windowed(values: npt.NDArray[Any], header: pydicom.Dataset) -> npt.NDArray[np.float64]:
    """Convert stored values to brightness, 0 to 1."""
    from pydicom.pixels import apply_rescale, apply_voi, apply_windowing

    bits, signed = int(header.BitsStored), int(header.PixelRepresentation)
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1])
    values = apply_rescale(values, header)
    if header.get("WindowWidth") not in (None, ""):
        # pydicom maps black and white to the ends of a range, in this order, even if it descends.
        low, high = apply_windowing(np.array([-np.inf, np.inf]), header)
        return np.asarray((apply_windowing(values, header) - low) / (high - low))
    if "VOILUTSequence" in header:
        bits = int(header.VOILUTSequence[0].LUTDescriptor[2])
        return np.asarray(apply_voi(values, header) / (2.0**bits - 1))
    low, high = sorted(map(float, apply_rescale(ends, header)))
    return np.asarray((values - low) / (high - low))


# --- corruptions ---------------------------------------------------------------------------------
#
# The corruptions of D. Hendrycks and T. Dietterich, *Benchmarking neural network robustness to
# common corruptions and perturbations* (ICLR 2019), as FedISM (IJCAI 2024) uses them. An image is
# corrupted at its training size, before augmentation. Its random numbers depend on ``data.seed``,
# its domain, its split and its row, and not on the client that holds it.

#: Standard deviation for each severity, for images in [0, 1] of any size, from ImageNet-C. FedISM
#: uses severity 3.
NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)

#: Side of an image in pixels -> (radius, sigma) in pixels for each severity, from CIFAR-10-C,
#: Tiny-ImageNet-C and ImageNet-C. The blur for 224 pixels would destroy images of 28 pixels. FedISM
#: shows blur in its appendix, and its notebook uses severity 1.
BLUR: dict[int, tuple[tuple[int, float], ...]] = {
    32: ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),
    64: ((10, 1.0), (10, 1.5), (10, 2.0), (10, 2.5), (12, 3.0)),
    224: ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0)),
}


def corrupt(
    images: Pixels, rows: Ints, kind: str, severity: int, *, seed: int, domain: str, split: str
) -> Pixels:
    """Return corrupted copies of images, uint8 [N, C, H, W].

    ``kind`` is "noise" (`noise`) or "blur" (`blur`), and ``severity`` is 1 to 5. ``rows``, int64
    [N], are the rows of the images in the split of the domain. Each image has its own random
    generator.
    """
    corrupted = np.empty_like(images)
    for i, row in enumerate(rows.tolist()):
        rng = np.random.default_rng(derive_seed(seed, domain, split, "corruption", row))
        corrupted[i] = CORRUPTIONS[kind](images[i], severity, rng)
    return corrupted


def noise(image: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Add Gaussian noise to an image: ``clip(x / 255 + N(0, c), 0, 1) * 255``, truncated.

    The standard deviation ``c`` is ``NOISE[severity - 1]``. The noise is independent for every
    channel of each pixel of ``image``, uint8 [C, H, W].
    """
    x = rng.standard_normal(image.shape, np.float32) * np.float32(NOISE[severity - 1])
    x += image / np.float32(255)
    return (x.clip(0, 1) * 255).astype(np.uint8)


def blur(image: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Blur an image, uint8 [C, H, W], as if the camera moved.

    Every pixel becomes a weighted mean along a line that starts at it, as in ImageMagick's motion
    blur. The line has ``2 radius + 1`` steps of one pixel at a random angle, U(-45, 45) degrees.
    The weights are a Gaussian with standard deviation ``sigma``, centered at the pixel, and the
    border is extended. Radius and sigma are those in ``BLUR`` for the size nearest to the size of
    ``image``.
    """
    _, height, width = image.shape
    radius, sigma = _streak(min(height, width), severity)
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-np.square(steps / sigma) / 2)
    weights /= weights.sum()
    angle = math.radians(rng.uniform(-45, 45))
    right = np.ceil(steps * math.cos(angle) - 0.5).astype(int)
    down = np.ceil(steps * math.sin(angle) - 0.5).astype(int)

    reach = 2 * radius
    padded = np.pad(image, ((0, 0), (reach, reach), (0, reach)), mode="edge").astype(np.float32)
    total = np.zeros(image.shape, np.float32)
    for weight, x, y in zip(weights.astype(np.float32), right, down + reach, strict=True):
        total += weight * padded[:, y : y + height, x : x + width]
    return np.rint(total).astype(np.uint8)


CORRUPTIONS = {"noise": noise, "blur": blur}


def corruption_text(kind: str, severity: int, side: int) -> str:
    """Describe the corruption of images with a side of ``side`` pixels.

    >>> corruption_text("noise", 3, 28), corruption_text("blur", 3, 28)
    ('Gaussian noise, sigma 0.18', 'motion blur, radius 6, sigma 2')
    """
    if kind == "noise":
        return f"Gaussian noise, sigma {NOISE[severity - 1]:g}"
    radius, sigma = _streak(side, severity)
    return f"motion blur, radius {radius}, sigma {sigma:g}"


def _streak(side: int, severity: int) -> tuple[int, float]:
    nearest = min(BLUR, key=lambda size: abs(math.log(size / side)))
    return BLUR[nearest][severity - 1]
