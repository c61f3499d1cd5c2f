"""Small data sets for every task, with examples that say something about their targets."""

from typing import Any

import numpy as np

from fairflower.data import DataSet, FeatureSet, TokenSet
from fairflower.tasks import task_of

ROWS, FEATURES, SIDE = 24, 4, 8


class ThreeDomains:
    """Three domains, whose examples differ."""

    def all_domains(self) -> list[str]:
        return ["a", "b", "c"]

    def place_and_noise(self, domain: str, split: str) -> tuple[int, np.random.Generator]:
        place = self.all_domains().index(domain)
        return place, np.random.default_rng([place, split == "test"])

    def fingerprint(self) -> Any:
        return self.task  # type: ignore[attr-defined]

    def source(self, domain: str) -> str:
        return "made up"


class MadeUp(ThreeDomains, FeatureSet):
    """Rows with targets of ``data.task``."""

    task = "regression"

    def labels(self, domain: str, split: str) -> Any:
        task = task_of(self.task)
        return task.made_up(ROWS, 2 if task.classes else 3, (FEATURES,))

    def features(self, domain: str, split: str, rows: Any) -> Any:
        place, rng = self.place_and_noise(domain, split)
        noise = rng.standard_normal((ROWS, FEATURES))
        signal = np.nan_to_num(np.reshape(self.labels(domain, split), (ROWS, -1))).sum(1) + place
        return (noise + signal[:, None]).astype(np.float32)[rows]


class Images(ThreeDomains, DataSet):
    """Images whose classes have other intensities; a tenth of the pixels are unknown."""

    task = "segmentation"
    mean, std = (0.5,), (0.5,)

    def labels(self, domain: str, split: str) -> Any:
        _, rng = self.place_and_noise(domain, split)
        masks = rng.integers(0, 3, (ROWS, SIDE, SIDE)).astype(np.uint8)
        masks[rng.random(masks.shape) < 0.1] = 255
        return masks

    def images(self, domain: str, split: str, rows: Any) -> Any:
        place, rng = self.place_and_noise(domain, split)
        signal = 40 * (self.labels(domain, split) % 255) + 20 * place
        return (signal + rng.integers(0, 60, signal.shape)).astype(np.uint8)[rows]


class Tokens(ThreeDomains, TokenSet):
    """Texts in which the next token is mostly the same distance away; their end is padded."""

    task = "next-token"
    vocabulary = num_classes = 7

    def _texts(self, domain: str, split: str) -> Any:
        place, rng = self.place_and_noise(domain, split)
        steps = rng.integers(1, 3 + place, (ROWS, 6))
        texts = 1 + steps.cumsum(1) % 6
        texts[::5, 4:] = 0
        return texts

    def tokens(self, domain: str, split: str, rows: Any) -> Any:
        return self._texts(domain, split)[rows, :-1]

    def labels(self, domain: str, split: str) -> Any:
        return self._texts(domain, split)[:, 1:]
