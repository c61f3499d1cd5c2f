"""Decoding of images, and conversion to the array layout for training."""

from __future__ import annotations

import io
import math
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fairflower.data.dicom import MAX_PIXELS, SUFFIXES, read_dicom
from fairflower.data.federation import Pixels
from fairflower.data.opening import check_memory, explained, open_regular
from fairflower.errors import DataError

if TYPE_CHECKING:  # not in every installation
    from PIL import Image


#: Supported formats, by their names in Pillow. Other formats are not tried: EPS, for example, would
#: run a program in the file with Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF")


def read_picture(path: Path) -> Image.Image:
    """Decode an image file, with pydicom if it has a DICOM extension and with Pillow otherwise.

    The image is rotated upright, as its EXIF orientation says.

    Raises ``DataError`` if the file is not a regular file, is damaged or is in none of the
    `FORMATS`, or if its header declares several frames or more than `MAX_PIXELS` pixels.
    """
    with explained(*_unreadable(str(path))):
        if path.suffix.lower() in SUFFIXES:
            return read_dicom(path)
        with open_regular(path) as file:
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
    with explained(*_unreadable(where)):
        content = value["bytes"]
        opened = open_regular(Path(value["path"])) if content is None else io.BytesIO(content)
        with opened as file:
            picture = _decoded(file, where)
        return picture.convert(mode) if mode else picture


def _unreadable(where: str) -> tuple[str, str]:
    return f"{where} cannot be read as an image", "Replace it with the original file"


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


def to_chw(images: Pixels, channels: int, size: tuple[int, int]) -> Pixels:
    """Resize images, repeat gray in all ``channels``, and move the channels to the front.

    ``images`` are uint8 [N, H, W], [N, H, W, 1] or [N, H, W, 3]. ``channels`` is 1 or 3; color
    images need 3. ``size`` is (height, width) in pixels. Returns a contiguous array, uint8 [N,
    channels, height, width].

    >>> to_chw(np.zeros((5, 4, 4), np.uint8), channels=3, size=(8, 8)).shape
    (5, 3, 8, 8)
    """
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    found = f"{len(images)} images of {size[0]}x{size[1]} pixels take"
    needed = len(images) * channels * math.prod(size)
    check_memory(found, needed, "Lower data.image-size, or use fewer images.")
    images = resize(images, size)
    if images.ndim == 3:
        return np.repeat(images[:, None], channels, axis=1)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def empty_pixels(where: str, count: int, side: int) -> Pixels:
    """Return an array for color images, uint8 [count, side, side, 3], if the memory is enough."""
    found = f"{where}: {count} images of {side}x{side} pixels take"
    check_memory(found, 3 * count * side**2, "Lower data.image-size.")
    return np.empty((count, side, side, 3), np.uint8)


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
