"""DICOM files as pictures of 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairflower.errors import DataError

if TYPE_CHECKING:  # the latter two are not in every installation
    from numpy.typing import NDArray
    from PIL import Image
    from pydicom import Dataset

#: What names of DICOM files end in.
SUFFIXES = (".dcm", ".dicom")


def read_dicom(path: Path) -> Image.Image:
    """The image in a DICOM file, grey or RGB.

    Grey numbers are rescaled by the file's slope and intercept (to Hounsfield units, for
    instance), cut to the first window that it has, or else put through its VOI LUT, and brought to
    0 to 255 from all that is possible then: the window, the table, or without either what
    ``BitsStored`` bits can hold. Where 0 is white (MONOCHROME1) they are inverted. ``DataError``
    if pydicom is not installed, or the file has several frames, or colours by a palette.
    """
    from PIL import Image

    try:
        from pydicom import dcmread
        from pydicom.pixels import pixel_array
    except ImportError:
        raise DataError(
            f"{path} is a DICOM file, which pydicom reads: pip install 'fairflower[medical]'."
        ) from None
    header = dcmread(path)
    values, kind = pixel_array(header), str(header.PhotometricInterpretation)
    grey = kind in ("MONOCHROME1", "MONOCHROME2")
    if values.ndim != (2 if grey else 3) or values.shape[2:] not in ((), (3,)):
        raise DataError(
            f"{path}: found {kind} of shape {list(values.shape)}; expected one frame, grey or of "
            "three colours. Export its frames as PNG files."
        )
    shown = _windowed(values, header) if grey else values / (2.0**header.BitsStored - 1)
    if kind == "MONOCHROME1":
        shown = 1 - shown
    return Image.fromarray(np.rint(255 * shown.clip(0, 1)).astype(np.uint8))


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
