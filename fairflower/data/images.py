"""Images into the one layout that training uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def to_chw(images: Pixels, channels: int, size: tuple[int, int]) -> Pixels:
    """Resize, repeat grey to ``channels``, and put the channels first.

    Parameters
    ----------
    images
        uint8 [N, H, W], [N, H, W, 1] or [N, H, W, 3].
    channels
        1 or 3; not fewer than the images have.
    size
        (height, width) in pixels.

    Returns
    -------
    uint8 [N, channels, height, width], contiguous.
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
    height, width = size
    if images.shape[1:3] == size:
        return images
    resized = np.empty((len(images), height, width, *images.shape[3:]), np.uint8)
    for i, image in enumerate(images):
        picture = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
        resized[i] = np.asarray(picture)
    return resized
