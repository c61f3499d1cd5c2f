"""UCI handwritten digits in four domains: the embedded benchmark, no network and no files.

The handwriting is real: the 1797 images of 8x8 pixels that scikit-learn ships
(`load_digits`; E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits,
UCI Machine Learning Repository, 1998, CC BY 4.0). The shift between the domains is
made here, always from the same seed, so everybody has the same benchmark:

========  ======================================================  ===========  ====
domain    what it shows                                           train        test
========  ======================================================  ===========  ====
plain     the handwriting, light on black                         600          200
inverted  the handwriting, dark on bright coloured clouds         300          200
rotated   the handwriting turned by 20-45 degrees either way,     200          200
          half the contrast, Gaussian noise
printed   digits of matplotlib's bundled fonts in random colours  200          200
          at random places, sizes (9-13 pixels) and slants
========  ======================================================  ===========  ====

With five clients per domain these are 120, 60, 40 and 40 images per client: weighted by
samples, plain counts for 46 % of the model and the two hardest domains for 15 % each.

What is kept apart, so that the test accuracies are honest:

- An image of the source is used at most once: in one domain, in train or in test.
- The source file holds its 14 sessions of writing one after the other (every one begins
  with 0-9 written in order); the test images come from the last five, so no session, and
  as far as the file tells no writer, is on both sides.
- The test fonts (DejaVu Serif, Computer Modern Sans and Typewriter) are of other
  families than the training fonts (DejaVu Sans and Mono, STIX, Computer Modern Roman).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from fairflower.data.base import DataSet
from fairflower.data.federation import Augment

#: Images are made at this side, in pixels; another ``data.image-size`` rescales them.
SIZE = 16
TRAIN_SIZES = {"plain": 600, "inverted": 300, "rotated": 200, "printed": 200}
TEST_SIZE = 200

_SEED = 20240617
#: The first source image of the tenth writing session.
_FIRST_TEST_IMAGE = 1157
_HANDWRITTEN = ("plain", "inverted", "rotated")
_FONTS = {
    "train": (
        *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono"),
        *("DejaVuSansMono-Bold", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic"),
        *("STIXGeneralBolIta", "cmr10", "cmb10", "cmti10"),
    ),
    "test": (
        *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
        *("cmss10", "cmtt10"),
    ),
}

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
#: Ink: how much of each pixel the digit covers, [N, SIZE, SIZE] in [0, 1].
Ink = npt.NDArray[np.float64]


class UCIDigits(DataSet):
    """See the module's text. All training images are divided equally among the clients."""

    num_classes: ClassVar[int] = 10
    channels: ClassVar[int] = 3
    augment = Augment(crop_padding=1)

    def all_domains(self) -> Sequence[str]:
        """plain, inverted, rotated, printed."""
        return tuple(TRAIN_SIZES)

    def labels(self, domain: str, split: str) -> Labels:
        """Labels of one split of a domain, int64 [N]."""
        return self._splits[domain, split][1]

    def images(self, domain: str, split: str, rows: npt.NDArray[np.int64]) -> Pixels:
        """The images of these rows, uint8 [len(rows), 16, 16, 3]."""
        return self._splits[domain, split][0][rows]

    def fingerprint(self) -> Any:
        """Nothing but the version decides what is generated."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        """Where a domain's images come from."""
        return "matplotlib's fonts" if domain == "printed" else "scikit-learn's load_digits"

    @cached_property
    def _splits(self) -> dict[tuple[str, str], tuple[Pixels, Labels]]:
        return generate()


def generate() -> dict[tuple[str, str], tuple[Pixels, Labels]]:
    """Every (domain, split) as images uint8 [N, 16, 16, 3] and labels int64 [N]."""
    from sklearn.datasets import load_digits

    source = load_digits()
    splits = {}
    for (domain, split), rows in source_rows().items():
        rng = _rng(domain, split)
        angles = np.zeros(len(rows))
        if domain == "rotated":
            angles = rng.uniform(20, 45, len(rows)) * rng.choice([-1, 1], len(rows))
        ink = _written(source.images[rows] / 16, angles)
        splits[domain, split] = _SHADES[domain](ink, rng), source.target[rows].astype(np.int64)
    for split, count in (("train", TRAIN_SIZES["printed"]), ("test", TEST_SIZE)):
        rng = _rng("printed", split)
        labels = rng.permutation(np.arange(count) % 10)
        ink = _printed(labels, split, rng)
        splits["printed", split] = _coloured(ink, rng), labels.astype(np.int64)
    return splits


def source_rows() -> dict[tuple[str, str], npt.NDArray[np.int64]]:
    """Which rows of ``load_digits`` make up each handwritten (domain, split)."""
    rows = {}
    for split, first, last in (
        ("train", 0, _FIRST_TEST_IMAGE),
        ("test", _FIRST_TEST_IMAGE, 1797),
    ):
        order = _rng("source", split).permutation(np.arange(first, last))
        for domain in _HANDWRITTEN:
            size = TRAIN_SIZES[domain] if split == "train" else TEST_SIZE
            rows[domain, split], order = order[:size], order[size:]
    return rows


def fonts(split: str) -> list[Path]:
    """The font files of a split, as matplotlib ships them."""
    from matplotlib import get_data_path

    return [Path(get_data_path(), "fonts", "ttf", f"{name}.ttf") for name in _FONTS[split]]


def _rng(*purpose: str) -> np.random.Generator:
    return np.random.default_rng([_SEED, *"/".join(purpose).encode()])


def _written(digits: npt.NDArray[np.float64], angles: npt.NDArray[np.float64]) -> Ink:
    """8x8 digits in [0, 1], enlarged 1.75 times into the middle and turned by degrees."""
    ink = np.empty((len(digits), SIZE, SIZE))
    for i, (digit, angle) in enumerate(zip(digits, np.radians(angles), strict=True)):
        source = Image.fromarray(np.pad(digit, 4).astype(np.float32))
        # PIL wants the map from the result's pixels back to the source's; both have their
        # centre at (8, 8).
        cos, sin = np.cos(angle) / 1.75, np.sin(angle) / 1.75
        back = (cos, sin, 8 - 8 * (cos + sin), -sin, cos, 8 - 8 * (cos - sin))
        ink[i] = source.transform(
            (SIZE, SIZE), Image.Transform.AFFINE, back, Image.Resampling.BICUBIC
        )
    return ink.clip(0, 1)


def _printed(labels: Labels, split: str, rng: np.random.Generator) -> Ink:
    """Digits drawn from the fonts of a split, with exact anti-aliasing."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    faces = [FontProperties(fname=str(path)) for path in fonts(split)]
    renderer = RendererAgg(SIZE, SIZE, 72)
    pen = renderer.new_gc()
    pen.set_linewidth(0)
    pen.set_snap(False)
    ink = np.empty((len(labels), SIZE, SIZE))
    for i, label in enumerate(labels):
        outline = TextPath((0, 0), str(label), size=100, prop=faces[rng.integers(len(faces))])
        box = outline.get_extents()
        height = rng.uniform(9, 13)
        place = SIZE / 2 + rng.uniform(-1, 1, 2)
        to_picture = (
            Affine2D()
            .translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)
            .scale(height / box.height)
            .rotate_deg(rng.uniform(-12, 12))
            .translate(*place)
        )
        renderer.clear()
        renderer.draw_path(pen, outline, to_picture, (1.0, 1.0, 1.0))
        ink[i] = np.asarray(renderer.buffer_rgba())[..., 3] / 255
    return ink


def _plain(ink: Ink, rng: np.random.Generator) -> Pixels:
    return _uint8(np.repeat(ink[..., None], 3, axis=-1))


def _inverted(ink: Ink, rng: np.random.Generator) -> Pixels:
    paper = _texture(len(ink), rng, low=0.55, high=1.0)
    stroke = rng.uniform(0, 0.2, (len(ink), 1, 1, 3))
    return _blend(ink, stroke, paper)


def _rotated(ink: Ink, rng: np.random.Generator) -> Pixels:
    grey = 0.25 + 0.5 * ink + rng.normal(0, 0.1, ink.shape)
    return _uint8(np.repeat(grey[..., None], 3, axis=-1))


def _coloured(ink: Ink, rng: np.random.Generator) -> Pixels:
    """Any ink on any paper, as long as their brightness differs by 0.35 or more."""
    stroke, paper = np.stack(list(_colour_pairs(len(ink), rng)), axis=1)[:, :, None, None]
    return _blend(ink, stroke, paper)


_SHADES = {"plain": _plain, "inverted": _inverted, "rotated": _rotated}


def _colour_pairs(count: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.float64]]:
    while count:
        pair = rng.uniform(0, 1, (2, 3))
        if abs(pair[0].mean() - pair[1].mean()) >= 0.35:
            count -= 1
            yield pair


def _texture(count: int, rng: np.random.Generator, low: float, high: float) -> Ink:
    """Smooth coloured clouds: random 4x4 colours, enlarged; [count, SIZE, SIZE, 3]."""
    coarse = (255 * rng.uniform(low, high, (count, 4, 4, 3))).astype(np.uint8)
    size = (SIZE, SIZE)
    clouds = [Image.fromarray(c).resize(size, Image.Resampling.BICUBIC) for c in coarse]
    return np.stack(clouds) / 255


def _blend(ink: Ink, stroke: Ink, paper: Ink) -> Pixels:
    cover = ink[..., None]
    return _uint8(cover * stroke + (1 - cover) * paper)


def _uint8(values: npt.NDArray[np.float64]) -> Pixels:
    return np.rint(255 * values.clip(0, 1)).astype(np.uint8)
