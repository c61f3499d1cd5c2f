"""Conversion of DICOM files to 8-bit images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairflower.data.opening import open_regular
from fairflower.errors import DataError

if TYPE_CHECKING:  # Pillow and pydicom are not in every installation
    from numpy.typing import NDArray
    from PIL import Image
    from pydicom import Dataset

#: Extensions of DICOM files.
SUFFIXES = (".dcm", ".dicom")

#: Maximum number of pixels. Above this limit, Pillow warns of a decompression bomb.
MAX_PIXELS = 2**30 // 12


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

    try:
        from pydicom import dcmread
        from pydicom.filereader import read_file_meta_info
        from pydicom.pixels import pixel_array
    except ImportError:
        raise DataError(
            f"{path} is a DICOM file. To read it, install pydicom: pip install "
            "'fairflower[medical]'."
        ) from None
    with open_regular(path) as file:
        syntax = read_file_meta_info(path).get("TransferSyntaxUID")
        if syntax is not None and syntax.is_deflated:
            raise DataError(
                f"{path} is a deflated DICOM file, which is not supported. Decompress it."
            )
        header = dcmread(file)
    kind = str(header.PhotometricInterpretation)
    gray = kind in ("MONOCHROME1", "MONOCHROME2")
    _check_shape(header, f"{path}: found {kind}", 1 if gray else 3)
    values = pixel_array(header)
    shown = _windowed(values, header) if gray else values / (2.0**header.BitsStored - 1)
    if not np.isfinite(shown).all():
        raise DataError(
            f"{path}: its slope, intercept or window is not a finite number. Correct it."
        )
    if kind == "MONOCHROME1":
        shown = 1 - shown
    return Image.fromarray(np.rint(255 * shown.clip(0, 1)).astype(np.uint8))


def _check_shape(header: Dataset, image: str, colors: int) -> None:
    """Raise ``DataError`` for several frames, other colors or too many pixels, before decoding."""
    frames = int(header.get("NumberOfFrames") or 1)
    sides, samples = (int(header.Rows), int(header.Columns)), int(header.SamplesPerPixel)
    if frames != 1 or samples != colors:
        shape = [*([frames] if frames != 1 else []), *sides, *([samples] if samples != 1 else [])]
        raise DataError(
            f"{image} of shape {shape}; expected a single frame, grayscale or RGB. Export "
            "the frames as PNG files."
        )
    if sides[0] * sides[1] > MAX_PIXELS:
        raise DataError(
            f"{image} of {sides[1]}x{sides[0]} pixels; expected at most {MAX_PIXELS:,} pixels. "
            "Reduce its size."
        )


def _windowed(values: NDArray[Any], header: Dataset) -> NDArray[np.float64]:
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
