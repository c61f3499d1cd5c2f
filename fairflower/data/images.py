"""Images into the one layout that training uses."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fairflower.data.dicom import MOST_PIXELS, SUFFIXES, read_dicom
from fairflower.data.federation import Pixels
from fairflower.data.opening import explained, open_regular
from fairflower.errors import DataError

if TYPE_CHECKING:  # not in every installation
    from PIL import Image


#: Formats that are read, by Pillow's names. Its others are not even tried: for one it starts
#: Ghostscript on the file's program.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF")


def read_picture(path: Path) -> Image.Image:
    """The picture in an image file, decoded: by pydicom if its name is a DICOM file's.

    ``DataError`` if it is not a regular file, in none of the `FORMATS`, has several frames or more
    than `MOST_PIXELS`, which its header tells before anything is decoded, or is damaged.
    """
    with explained(*_unreadable(str(path))):
        if path.suffix.lower() in SUFFIXES:
            return read_dicom(path)
        with open_regular(path) as file:
            return _decoded(file, str(path))


def picture_in(value: Any, where: str, mode: str | None = None) -> Image.Image:
    """The picture in a row of a Hugging Face data set's column whose files are not decoded.

    ``value`` is a mapping with the file's "bytes" or its "path". As by ``datasets`` the picture is
    turned upright, and brought to the column's ``mode`` if it has one. Errors as of `read_picture`.
    """
    from PIL import ImageOps

    if not isinstance(value, dict):
        raise DataError(
            f"{where}: image: found {type(value).__name__}; expected a column of the feature type "
            "datasets.Image."
        )
    with explained(*_unreadable(where)):
        content = value["bytes"]
        opened = open_regular(Path(value["path"])) if content is None else io.BytesIO(content)
        with opened as file:
            picture = ImageOps.exif_transpose(_decoded(file, where))
        return picture.convert(mode) if mode else picture


def _unreadable(where: str) -> tuple[str, str]:
    return f"{where} cannot be read as an image", "Replace it by the original"


def _decoded(file: BinaryIO, where: str) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():  # Pillow's, of the size that is refused here
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            picture = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            raise DataError(
                f"{where} cannot be read as an image: found {_format_of(file)}; expected "
                f"{', '.join(FORMATS)} or DICOM. Replace it, or convert it to PNG."
            ) from error
    if not 0 < picture.width * picture.height <= MOST_PIXELS:
        raise DataError(
            f"{where} has {picture.width}x{picture.height} pixels; expected at most "
            f"{MOST_PIXELS:,}. Reduce it."
        )
    # Of several photos in a JPEG file, which is MPO then, the first is the main one.
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        raise DataError(
            f"{where} has several frames; expected one. Export its frames as PNG files."
        )
    picture.load()
    return picture


def _format_of(file: BinaryIO) -> str:
    """The name of what a file begins as, by Pillow's marks; none of its plugins reads on."""
    from PIL import Image

    file.seek(0)
    start = file.read(16)
    marks = ((name, accept) for name, (_, accept) in Image.OPEN.items() if accept and start)
    name = next((name for name, accept in marks if accept(start) is True), "")
    return f"a damaged {name} file" if name in FORMATS else name or "no known format"


def eight_bit(picture: Image.Image, where: str, bits: int = 16) -> Pixels:
    """A picture in 8 bits and RGB, uint8 [H, W, 3]; ``where`` it is from, for messages.

    Of grey pictures with more bits every one is scaled alike, by its depth and not by what is
    in it, so that a number means the same brightness in all: whole numbers of ``bits`` bits
    from 0 to white (65535 of 16 bits) and real ones from 0 to 1 are stretched to 0 to 255, and
    rounded. ``DataError`` where there are other numbers, whose white nobody knows.
    """
    if not picture.mode.startswith(("I", "F")):
        return np.asarray(picture.convert("RGB"))
    values = np.asarray(picture)
    white = 1 if picture.mode == "F" else 2**bits - 1
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= white):
        kind = "real" if picture.mode == "F" else "whole"
        raise DataError(
            f"{where}: found {kind} numbers from {low:g} to {high:g}; expected 0, black, to "
            f"{white}, white. Scale all images alike, or window them."
        )
    grey = np.rint(values * (255 / white)).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2)


def to_chw(images: Pixels, channels: int, size: tuple[int, int]) -> Pixels:
    """Resize, repeat grey to ``channels``, and put the channels first.

    ``images`` are uint8 [N, H, W], [N, H, W, 1] or [N, H, W, 3]; ``channels`` are 1 or 3, not
    fewer than theirs; ``size`` is (height, width) in pixels. The result is contiguous, uint8
    [N, channels, height, width].
    """
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    images = resize(images, size)
    if images.ndim == 3:
        return np.repeat(images[:, None], channels, axis=1)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def resize(images: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize as ``torchvision.transforms.Resize`` does: PIL's bilinear filter, anti-aliased.

    ``images`` are uint8 [N, H, W] or [N, H, W, 3]; ``size`` is (height, width).
    """
    if images.shape[1:3] == size:
        return images
    from PIL import Image

    resized = np.empty((len(images), *size, *images.shape[3:]), np.uint8)
    for i, image in enumerate(images):
        resized[i] = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
    return resized
