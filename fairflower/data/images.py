"""Images into the one layout that training uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fairflower.data.dicom import SUFFIXES, read_dicom
from fairflower.data.federation import Pixels
from fairflower.errors import DataError

if TYPE_CHECKING:  # not in every installation
    from PIL import Image


def open_picture(path: Path) -> Image.Image:
    """An image file, by Pillow, or by pydicom if its name is a DICOM file's."""
    from PIL import Image

    return read_dicom(path) if path.suffix.lower() in SUFFIXES else Image.open(path)


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
