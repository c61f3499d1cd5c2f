"""Tiny data sets of features and texts, with predictable values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fairflower.clients import ClientData
from fairflower.config import DataConfig
from fairflower.data import FeatureSet, Split, TokenSet
from fairflower.models.small import MLP, EmbeddingBag
from fairflower.published.uci_digits import UCIDigits
from fairflower.testing.federations import CLASSES

SIZES = {"train": 40, "test": 12}
#: Kind of data -> model for four features, or for words from a vocabulary of twenty.
MODELS = {"features": lambda: MLP(CLASSES, (4,), hidden=6), "tokens": lambda: tiny_embedding_bag()}


def tiny_embedding_bag() -> EmbeddingBag:
    return EmbeddingBag(CLASSES, (20, 5), width=6)


class TwoDomains:
    """Two domains whose labels count up."""

    num_classes = 4

    def all_domains(self) -> list[str]:
        return ["a", "b"]

    def labels(self, domain: str, split: str) -> Any:
        return np.arange(SIZES[split]) % 4

    def fingerprint(self) -> Any:
        return 1

    def source(self, domain: str) -> str:
        return "a test"


class Table(TwoDomains, FeatureSet):
    """Feature k of row n is 10 n + k, plus 1000 in domain b."""

    mean = (100.0, 101.0, 0.0)
    std = (10.0, 1.0, 1.0)
    feature_names = ("tens", "tens and one", "tens and two")

    def features(self, domain: str, split: str, rows: Any) -> Any:
        numbers = 10 * rows[:, None] + np.arange(3) + 1000 * (domain == "b")
        return numbers.astype(np.float32)


class Texts(TwoDomains, TokenSet):
    """Row n has the token n + 1 three times, then padding."""

    vocabulary = 41

    def tokens(self, domain: str, split: str, rows: Any) -> Any:
        return np.stack([rows + 1] * 3 + [0 * rows] * 2, axis=1)


class SiteTable(FeatureSet):
    """A site's features in its own folder, whatever the name of its domain.

    See `write_site_table`.
    """

    num_classes = CLASSES
    mean, std = (0.5,) * 4, (2.0,) * 4

    def all_domains(self) -> list[str]:
        return ["here"]

    def _held(self, name: str) -> Any:
        with np.load(Path(self.config.dir) / "table.site") as file:
            return file[name]

    def features(self, domain: str, split: str, rows: Any) -> Any:
        return self._held(f"x_{split}")[rows]

    def labels(self, domain: str, split: str) -> Any:
        return self._held(f"y_{split}")

    def fingerprint(self) -> Any:
        return self.labels("here", "train").tolist()

    def source(self, domain: str) -> str:
        return "a test"


def write_site_table(folder: Path, client: int) -> None:
    """Write a client's features to a site's folder."""
    has = data("features", client)
    with (folder / "table.site").open("wb") as file:
        np.savez(
            file, x_train=has.train.x, y_train=has.train.y, x_test=has.test.x, y_test=has.test.y
        )


def digits_folders(place: Path, domains: Iterable[str], most: int | None = None) -> dict[str, Path]:
    """Write a folder for each domain of uci-digits, with the domain's images in one file.

    ``most`` is the largest number of training and of test images; None means all.
    """
    digits, folders = UCIDigits(DataConfig()), {}
    for domain in domains:
        folders[domain] = place / f"site {domain}"
        folders[domain].mkdir(parents=True)
        arrays = {}
        for split in ("train", "test"):
            labels = arrays[f"y_{split}"] = digits.labels(domain, split)[:most]
            arrays[f"x_{split}"] = digits.images(domain, split, np.arange(len(labels)))
        np.savez(folders[domain] / "digits.npz", **arrays)
    return folders


def data(kind: str, client: int = 0) -> ClientData:
    """Return a client's features or texts, which correlate with its four classes."""
    rng = np.random.default_rng(client)

    def split(n: int) -> Split:
        y = rng.integers(0, CLASSES, n)
        if kind == "features":
            return Split(rng.normal(y[:, None], 0.5, (n, 4)).astype(np.float32), y)
        return Split(4 * rng.integers(0, 4, (n, 5)) + 1 + y[:, None], y)

    mean, std = ((0.5,) * 4, (2.0,) * 4) if kind == "features" else ((), ())
    return ClientData(split(12), split(9), mean, std, CLASSES)
