"""Made-up images of the sizes of FedHEAL's Digits, for times that need no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fairflower.data import DataSet
from fairflower.data.data_set import IMAGENET
from fairflower.data.digits import Digits
from fairflower.data.federation import Augment, Ints, Pixels


class MadeUpDigits(DataSet):
    """Noise that is brighter in higher classes: four domains with the clients' sizes of Digits."""

    num_classes: ClassVar[int | None] = 10
    image_size: ClassVar[int | None] = 32
    channels: ClassVar[int | None] = 3
    augment = Augment(crop_padding=4)
    mean, std = IMAGENET
    fraction = 0.01
    published_sizes = Digits.published_sizes

    def all_domains(self) -> Sequence[str]:
        return Digits.domain_names

    def labels(self, domain: str, split: str) -> Ints:
        # Five clients with 1 % each.
        size = 5 * int(self.published_sizes[domain] * 0.01) if split == "train" else 200
        return np.arange(size) % 10

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        place = self.all_domains().index(domain), split == "train"
        rng = np.random.default_rng(place)
        labels = self.labels(domain, split)
        noise = rng.integers(0, 128, (len(labels), 32, 32, 3))
        images: Pixels = (noise + 12 * labels[:, None, None, None]).astype(np.uint8)
        return images[rows]

    def fingerprint(self) -> Any:
        return 1

    def source(self, domain: str) -> str:
        return "made up by benchmarks/made_up.py"
