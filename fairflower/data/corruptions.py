"""Image corruptions: sensor noise, and motion of a patient or camera.

The corruptions of D. Hendrycks and T. Dietterich, *Benchmarking neural network robustness to
common corruptions and perturbations* (ICLR 2019), as FedISM (IJCAI 2024) uses them. An image
is corrupted at its training size, before augmentation. Its random numbers depend on
``data.seed``, its domain, its split and its row, and not on the client that holds it.
"""

from __future__ import annotations

import math

import numpy as np

from fairflower.data.federation import Ints, Pixels
from fairflower.seeds import derive_seed

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
