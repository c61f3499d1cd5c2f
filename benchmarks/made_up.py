"""Synthetic images for timings that need no files: a federation of Digits' sizes, or one client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import nn

from fairflower.clients import ClientData
from fairflower.data import DataSet, Split
from fairflower.data.data_set import IMAGENET
from fairflower.data.federation import Augment, Ints, Pixels
from fairflower.models import build
from fairflower.published.image_sets import Digits


class MadeUpDigits(DataSet):
    """Four domains with the client sizes of FedHEAL's Digits; noise, brighter in higher classes."""

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
        # Five clients per domain, each with 1 % of the published size.
        size = 5 * int(self.published_sizes[domain] * 0.01) if split == "train" else 200
        return np.arange(size) % 10

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        seed = self.all_domains().index(domain), split == "train"
        rng = np.random.default_rng(seed)
        labels = self.labels(domain, split)
        noise = rng.integers(0, 128, (len(labels), 32, 32, 3))
        images: Pixels = (noise + 12 * labels[:, None, None, None]).astype(np.uint8)
        return images[rows]

    def fingerprint(self) -> Any:
        return 1

    def source(self, domain: str) -> str:
        return "made up by benchmarks/made_up.py"


def made_up_client(model: str, images: int) -> tuple[nn.Module, ClientData]:
    """Return a network for ten classes, and a client's random color images of 32x32 pixels."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (images, 3, 32, 32), dtype=np.uint8)
    split = Split(x, rng.integers(0, 10, images))
    data = ClientData(split, split, (0.5,) * 3, (0.25,) * 3, 10, Augment(crop_padding=4))
    return build(model, 10, (3, 32, 32), seed=0), data
