"""DICOM files as pictures of 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairflower.data.opening import open_regular
from fairflower.errors import DataError

if TYPE_CHECKING:  # the latter two are not in every installation
    from numpy.typing import NDArray
    from PIL import Image
    from pydicom import Dataset

#: What names of DICOM files end in.
SUFFIXES = (".dcm", ".dicom")

#: Of an image, from where on Pillow, too, suspects that it was made to fill the memory.
MOST_PIXELS = 2**30 // 12


def read_dicom(path: Path) -> Image.Image:
    """The image in a DICOM file, grey or RGB.

    Grey numbers are rescaled by the file's slope and intercept (to Hounsfield units, for
    instance), cut to the first window that it has, or else put through its VOI LUT, and brought to
    0 to 255 from all that is possible then: the window, the table, or without either what
    ``BitsStored`` bits can hold. Where 0 is white (MONOCHROME1) they are inverted. ``DataError``
    if pydicom is not installed, or the file has several frames, colours by a palette, more than
    `MOST_PIXELS`, or was deflated as a whole, so that its size is not known before it is inflated.
    """
    from PIL import Image

    try:
        from pydicom import dcmread
        from pydicom.filereader import read_file_meta_info
        from pydicom.pixels import pixel_array
    except ImportError:
        raise DataError(
            f"{path} is a DICOM file, which pydicom reads: pip install 'fairflower[medical]'."
        ) from None
    with open_regular(path) as file:
        syntax = read_file_meta_info(path).get("TransferSyntaxUID")
        if syntax is not None and syntax.is_deflated:
            raise DataError(f"{path} is a deflated DICOM file. Decompress it.")
        header = dcmread(file)
    kind = str(header.PhotometricInterpretation)
    grey = kind in ("MONOCHROME1", "MONOCHROME2")
    _check_shape(header, f"{path}: found {kind}", 1 if grey else 3)
    values = pixel_array(header)
    shown = _windowed(values, header) if grey else values / (2.0**header.BitsStored - 1)
    if not np.isfinite(shown).all():
        raise DataError(f"{path}: its slope, intercept or window is no finite number. Mend it.")
    if kind == "MONOCHROME1":
        shown = 1 - shown
    return Image.fromarray(np.rint(255 * shown.clip(0, 1)).astype(np.uint8))


def _check_shape(header: Dataset, found: str, colours: int) -> None:
    """Refuse what is not one frame of the colours, or too large, before it is decoded."""
    frames = int(header.get("NumberOfFrames") or 1)
    sides, samples = (int(header.Rows), int(header.Columns)), int(header.SamplesPerPixel)
    if frames != 1 or samples != colours:
        shape = [*([frames] if frames != 1 else []), *sides, *([samples] if samples != 1 else [])]
        raise DataError(
            f"{found} of shape {shape}; expected one frame, grey or of three colours. Export its "
            "frames as PNG files."
        )
    if sides[0] * sides[1] > MOST_PIXELS:
        raise DataError(
            f"{found} of {sides[1]}x{sides[0]} pixels; expected at most {MOST_PIXELS:,}. Reduce it."
        )


def _windowed(values: NDArray[Any], header: Dataset) -> NDArray[np.float64]:
    """Stored numbers as brightness from 0 to 1."""
    from pydicom.pixels import apply_rescale, apply_voi, apply_windowing

    bits, signed = int(header.BitsStored), int(header.PixelRepresentation)
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1])
    values = apply_rescale(values, header)
    if "WindowWidth" in header:
        values = apply_windowing(values, header)  # over all that can be stored, rescaled
    elif "VOILUTSequence" in header:
        bits = int(header.VOILUTSequence[0].LUTDescriptor[2])
        return np.asarray(apply_voi(values, header) / (2.0**bits - 1))
    low, high = sorted(map(float, apply_rescale(ends, header)))
    return np.asarray((values - low) / (high - low))
