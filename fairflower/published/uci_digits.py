"""UCI handwritten digits in four domains, available without downloads or files.

The handwriting is real: it consists of the 1797 images of 8x8 pixels that scikit-learn ships
(`load_digits`; E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits,
UCI Machine Learning Repository, 1998, CC BY 4.0). The differences between the domains are
generated from a fixed seed, so that the data set is the same everywhere:

========  ======================================================  ===========  ====
domain    images                                                  train        test
========  ======================================================  ===========  ====
plain     the handwriting, light on black                         600          200
inverted  the handwriting, dark on bright, colored clouds         300          200
rotated   the handwriting turned by 20-45 degrees either way,     200          200
          with half the contrast and Gaussian noise
printed   digits in matplotlib's bundled fonts, in random colors  200          200
          with random positions, sizes (9-13 pixels) and slants
========  ======================================================  ===========  ====

With five clients per domain, the clients have 120, 60, 40 and 40 images. With sample weighting, the
domain plain has 46 % of the weight, and the two hardest domains have 15 % each.

Training and test images are kept separate:

- An image of the source is used at most once: in a single domain, in train or in test.
- The source file contains 14 writing sessions in sequence (each begins with 0-9 in order). The test
  images come from the last five sessions, so no session is in both splits. As far as the file
  shows, no writer is in both splits either.
- The test fonts (DejaVu Serif, Computer Modern Sans and Typewriter) belong to
  different families than the training fonts (DejaVu Sans and Mono, STIX, Computer Modern Roman).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fairflower.data.data_set import DataSet
from fairflower.data.federation import Augment, Ints, Pixels
from fairflower.data.partition import split_rng

SIZE = 16  # side of the generated images, in pixels; another ``data.image-size`` resizes them
TRAIN_SIZES = {"plain": 600, "inverted": 300, "rotated": 200, "printed": 200}
TEST_SIZE = 200

_SEED = 20240617
FIRST_TEST_IMAGE = 1157  # the first source image of the tenth writing session
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

#: Fraction of each pixel that the digit covers, [N, SIZE, SIZE] in [0, 1].
Ink = npt.NDArray[np.float64]
#: [N, SIZE, SIZE, 3] in [0, 1], or [N, 1, 1, 3] for a single color per image.
Colors = npt.NDArray[np.float64]


class UCIDigits(DataSet):
    """UCI handwritten digits in four domains; see the module's documentation for the data.

    The training images of a domain are divided equally among its clients.
    """

    num_classes = 10
    channels = 3
    augment = Augment(crop_padding=1)

    def all_domains(self) -> Sequence[str]:
        return tuple(TRAIN_SIZES)

    def labels(self, domain: str, split: str) -> Ints:
        return _generated()[domain, split][1]

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        return _generated()[domain, split][0][rows]

    def fingerprint(self) -> Any:
        """Return the version of the generator."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        return "matplotlib's fonts" if domain == "printed" else "scikit-learn's load_digits"


def generate() -> dict[tuple[str, str], tuple[Pixels, Ints]]:
    """Return images, uint8 [N, 16, 16, 3], and labels, int64 [N], for each (domain, split)."""
    from sklearn.datasets import load_digits

    source = load_digits()
    splits = {}
    for (domain, split), rows in source_rows().items():
        images = _written(domain, source.images[rows] / 16, split_rng(_SEED, domain, split))
        splits[domain, split] = images, source.target[rows].astype(np.int64)
    for split, count in (("train", TRAIN_SIZES["printed"]), ("test", TEST_SIZE)):
        rng = split_rng(_SEED, "printed", split)
        labels = rng.permutation(np.arange(count) % 10).astype(np.int64)
        splits["printed", split] = _printed(labels, fonts(split), rng), labels
    return splits


_generated = cache(generate)  # 3 MB


def source_rows() -> dict[tuple[str, str], Ints]:
    """Return the rows of ``load_digits`` for each handwritten domain and split."""
    handwritten = {domain: size for domain, size in TRAIN_SIZES.items() if domain != "printed"}
    return divided_rows(handwritten, TEST_SIZE, _SEED)


def divided_rows(
    train_sizes: Mapping[str, int], test_size: int, seed: int
) -> dict[tuple[str, str], Ints]:
    """Return rows of ``load_digits`` for each domain and split; no session is in both splits."""
    rows = {}
    for split, span in {"train": (0, FIRST_TEST_IMAGE), "test": (FIRST_TEST_IMAGE, 1797)}.items():
        order = split_rng(seed, "source", split).permutation(np.arange(*span))
        for domain, train_size in train_sizes.items():
            size = train_size if split == "train" else test_size
            rows[domain, split], order = order[:size], order[size:]
    return rows


def fonts(split: str) -> list[Path]:
    """Return the paths of a split's fonts, which matplotlib ships."""
    from matplotlib import get_data_path

    return [Path(get_data_path(), "fonts", "ttf", f"{name}.ttf") for name in _FONTS[split]]


def _written(domain: str, digits: npt.NDArray[np.float64], rng: np.random.Generator) -> Pixels:
    """Create the images of a handwritten domain from 8x8 digits in [0, 1]."""
    count = len(digits)
    if domain == "plain":
        return _gray(_enlarged(digits, np.zeros(count)))
    if domain == "inverted":
        stroke = rng.uniform(0, 0.2, (count, 1, 1, 3))
        return _blend(_enlarged(digits, np.zeros(count)), stroke, _clouds(count, rng))
    angles = rng.uniform(20, 45, count) * rng.choice([-1, 1], count)
    ink = _enlarged(digits, angles)
    return _gray(0.25 + 0.5 * ink + rng.normal(0, 0.1, ink.shape))


def _printed(labels: Ints, files: list[Path], rng: np.random.Generator) -> Pixels:
    """Draw digits in random fonts, with exact antialiasing."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D, Bbox

    faces = [FontProperties(fname=str(file)) for file in files]

    @cache
    def drawn(label: int, face: int) -> tuple[TextPath, Bbox]:
        outline = TextPath((0, 0), str(label), size=100, prop=faces[face])
        return outline, outline.get_extents()

    untyped: Any = RendererAgg
    renderer = untyped(SIZE, SIZE, 72)
    pen = renderer.new_gc()
    pen.set_linewidth(0)
    pen.set_snap(False)
    ink = np.empty((len(labels), SIZE, SIZE))
    for i, label in enumerate(labels):
        outline, box = drawn(int(label), int(rng.integers(len(faces))))
        height = rng.uniform(9, 13)
        center = SIZE / 2 + rng.uniform(-1, 1, 2)
        to_picture = (
            Affine2D()
            .translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)
            .scale(height / box.height)
            .rotate_deg(rng.uniform(-12, 12))
            .translate(*center)
        )
        renderer.clear()
        renderer.draw_path(pen, outline, to_picture, (1.0, 1.0, 1.0))
        ink[i] = np.asarray(renderer.buffer_rgba())[..., 3] / 255
    colors = np.stack([_colors(rng) for _ in labels])
    return _blend(ink, colors[:, None, None, 0], colors[:, None, None, 1])


def _enlarged(digits: npt.NDArray[np.float64], angles: npt.NDArray[np.float64]) -> Ink:
    """Enlarge 8x8 digits 1.75 times and rotate them around the center by ``angles``, in degrees."""
    size, bicubic = (SIZE, SIZE), Image.Resampling.BICUBIC
    ink = np.empty((len(digits), *size))
    for i, (digit, angle) in enumerate(zip(digits, np.radians(angles), strict=True)):
        source = Image.fromarray(np.pad(digit, 4).astype(np.float32))
        # PIL needs the map from pixels of the result to pixels of the source. Both have the center
        # (8, 8).
        cos, sin = np.cos(angle) / 1.75, np.sin(angle) / 1.75
        back = (cos, sin, 8 - 8 * (cos + sin), -sin, cos, 8 - 8 * (cos - sin))
        ink[i] = np.asarray(source.transform(size, Image.Transform.AFFINE, back, bicubic))
    return ink.clip(0, 1)


def _colors(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw random colors of ink and paper, [2, 3], that differ by at least 0.35 in brightness."""
    while True:
        pair = rng.uniform(0, 1, (2, 3))
        if abs(pair[0].mean() - pair[1].mean()) >= 0.35:
            return pair


def _clouds(count: int, rng: np.random.Generator) -> Colors:
    """Draw bright and smooth random images by enlarging 4x4 images of random colors."""
    coarse = (255 * rng.uniform(0.55, 1, (count, 4, 4, 3))).astype(np.uint8)
    size, bicubic = (SIZE, SIZE), Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(c).resize(size, bicubic)) for c in coarse]) / 255


def _gray(values: Ink) -> Pixels:
    return _uint8(np.repeat(values[..., None], 3, axis=-1))


def _blend(ink: Ink, stroke: Colors, paper: Colors) -> Pixels:
    cover = ink[..., None]
    return _uint8(cover * stroke + (1 - cover) * paper)


def _uint8(values: Colors) -> Pixels:
    pixels: Pixels = np.rint(255 * values.clip(0, 1)).astype(np.uint8)
    return pixels
