"""Strokes of handwritten digits on the paper of four scanners, for segmentation, without files.

The strokes are real handwriting: the 1797 digits of 8x8 pixels that scikit-learn ships
(`load_digits`; E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
Learning Repository, 1998, CC BY 4.0). Each is enlarged 2.5 to 3.2 times, turned by up to 25 degrees
and placed at random in an image of 32x32 gray pixels. Its mask is 1 (stroke) where the ink covers
at least half of a pixel, and 0 (paper) elsewhere; strokes cover 16 % of the pixels. Paper and
scanners are generated from a fixed seed, so that the data set is the same everywhere:

=========  ===================================================================  =====  ====
domain     images                                                               train  test
=========  ===================================================================  =====  ====
flatbed    dark ink on bright paper with a faint grain                            480   160
fax        black and white by a threshold, with specks and lost lines             240   160
microfilm  blurred and with little contrast, under the grain of the film          160   160
phone      pale ink on ruled paper, under a shadow that falls from one side       160   160
=========  ===================================================================  =====  ====

With five clients per domain, the clients have 96, 48, 32 and 32 images. With sample weighting, the
domain flatbed has 46 % of the weight.

An image of the source is used at most once, in a single domain, in train or in test; test images
come from the last five of the 14 writing sessions, as in `fairflower.published.uci_digits`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fairflower.data.data_set import DataSet
from fairflower.data.federation import Augment, Ints, Pixels
from fairflower.data.partition import split_rng
from fairflower.published.uci_digits import divided_rows

SIZE = 32  # side of the generated images, in pixels
TRAIN_SIZES = {"flatbed": 480, "fax": 240, "microfilm": 160, "phone": 160}
TEST_SIZE = 160

_SEED = 20261129

#: Values for each pixel, [N, SIZE, SIZE]; ink and brightness are in [0, 1].
Values = npt.NDArray[np.float64]


class Strokes(DataSet):
    """Strokes on the paper of four scanners; see the module's documentation for the data.

    The training images of a domain are divided equally among its clients. Each time an image is
    used, it and its mask are moved by up to two pixels.
    """

    task = "segmentation"
    classes = ("paper", "stroke")
    channels = 1
    augment = Augment(crop_padding=2)

    def all_domains(self) -> Sequence[str]:
        return tuple(TRAIN_SIZES)

    def labels(self, domain: str, split: str) -> Pixels:
        return _generated()[domain, split][1]

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        return _generated()[domain, split][0][rows]

    def fingerprint(self) -> Any:
        """Return the version of the generator."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        return "scikit-learn's load_digits"


def generate() -> dict[tuple[str, str], tuple[Pixels, Pixels]]:
    """Return images and masks, uint8 [N, 32, 32] each, for each (domain, split)."""
    from sklearn.datasets import load_digits

    digits = load_digits().images / 16
    splits = {}
    for (domain, split), rows in source_rows().items():
        rng = split_rng(_SEED, domain, split)
        ink = _placed(digits[rows], rng)
        pixels = np.rint(255 * _SCANNERS[domain](ink, rng).clip(0, 1)).astype(np.uint8)
        splits[domain, split] = pixels, (ink >= 0.5).astype(np.uint8)
    return splits


_generated = cache(generate)  # 3.5 MB


def source_rows() -> dict[tuple[str, str], Ints]:
    """Return the rows of ``load_digits`` for each domain and split."""
    return divided_rows(TRAIN_SIZES, TEST_SIZE, _SEED)


def _placed(digits: npt.NDArray[np.float64], rng: np.random.Generator) -> Values:
    """Enlarge, turn and place 8x8 digits; return the share of each pixel that ink covers."""
    bicubic = Image.Resampling.BICUBIC
    ink = np.empty((len(digits), SIZE, SIZE))
    for i, digit in enumerate(digits):
        source = Image.fromarray(np.pad(digit, 8).astype(np.float32))  # its center is (12, 12)
        scale, angle = rng.uniform(2.5, 3.2), np.radians(rng.uniform(-25, 25))
        x, y = SIZE / 2 + rng.uniform(-3, 3, 2)
        # PIL needs the map from pixels of the result to pixels of the source.
        cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
        back = (cos, sin, 12 - x * cos - y * sin, -sin, cos, 12 + x * sin - y * cos)
        ink[i] = np.asarray(source.transform((SIZE, SIZE), Image.Transform.AFFINE, back, bicubic))
    return ink.clip(0, 1)


def _flatbed(ink: Values, rng: np.random.Generator) -> Values:
    paper = rng.uniform(0.85, 0.95, (len(ink), 1, 1)) + rng.normal(0, 0.02, ink.shape)
    return paper - rng.uniform(0.55, 0.75, (len(ink), 1, 1)) * ink


def _fax(ink: Values, rng: np.random.Generator) -> Values:
    scanned = ink + rng.normal(0, 0.12, ink.shape) < 0.45
    specks = rng.random(ink.shape) < 0.06
    lost = rng.random((len(ink), SIZE, 1)) < 0.08
    return np.where(lost, 1.0, scanned ^ specks)


def _microfilm(ink: Values, rng: np.random.Generator) -> Values:
    film = 0.55 + 0.1 * _clouds(len(ink), 8, rng) - 0.35 * _blurred(ink, 2)
    return film + rng.normal(0, 0.09, ink.shape)


def _phone(ink: Values, rng: np.random.Generator) -> Values:
    place, count = np.arange(SIZE), len(ink)
    first, apart = rng.integers(0, 8, (count, 1, 1)), 8
    lines = 0.25 * ((place[:, None] - first) % apart == 0)
    angle = rng.uniform(0, 2 * np.pi, (count, 1, 1))
    across = (place * np.cos(angle) + place[:, None] * np.sin(angle)) / SIZE
    edge, depth = rng.uniform(-0.3, 0.3, angle.shape), rng.uniform(0.4, 0.7, angle.shape)
    middle = (np.cos(angle) + np.sin(angle)) / 2
    shadow = 1 - depth / (1 + np.exp(-12 * (across - middle - edge)))
    paper = 0.8 + 0.1 * _clouds(count, 4, rng) - lines - 0.35 * _blurred(ink, 1)
    pixels: Values = paper * shadow + rng.normal(0, 0.02, ink.shape)
    return pixels


_SCANNERS: dict[str, Callable[[Values, np.random.Generator], Values]] = {
    "flatbed": _flatbed,
    "fax": _fax,
    "microfilm": _microfilm,
    "phone": _phone,
}


def _clouds(count: int, cells: int, rng: np.random.Generator) -> Values:
    """Draw smooth random images in [-1, 1], with some ``cells`` spots in each direction."""
    size, bicubic = (SIZE, SIZE), Image.Resampling.BICUBIC
    coarse = rng.uniform(-1, 1, (count, cells, cells)).astype(np.float32)
    clouds = [np.asarray(Image.fromarray(c).resize(size, bicubic)) for c in coarse]
    return np.stack(clouds).astype(np.float64)


def _blurred(ink: Values, times: int) -> Values:
    """Smooth images by the weights 1/4, 1/2, 1/4 in both directions, some times."""
    for _ in range(times):
        for axis in (1, 2):
            ink = (np.roll(ink, 1, axis) + 2 * ink + np.roll(ink, -1, axis)) / 4
    return ink
