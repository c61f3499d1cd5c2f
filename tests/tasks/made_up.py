"""Small data sets for every task, with examples that say something about their targets."""

from typing import Any

import numpy as np

from fairflower.data import FeatureSet
from fairflower.tasks import task_of

ROWS, FEATURES = 24, 4


class MadeUp(FeatureSet):
    """Rows of three domains, with targets of ``data.task``."""

    task = "regression"

    def all_domains(self) -> list[str]:
        return ["a", "b", "c"]

    def labels(self, domain: str, split: str) -> Any:
        task = task_of(self.task)
        return task.made_up(ROWS, 2 if task.classes else 3, (FEATURES,))

    def features(self, domain: str, split: str, rows: Any) -> Any:
        place = self.all_domains().index(domain)
        noise = np.random.default_rng([place, split == "test"]).standard_normal((ROWS, FEATURES))
        signal = np.nan_to_num(np.reshape(self.labels(domain, split), (ROWS, -1))).sum(1) + place
        return (noise + signal[:, None]).astype(np.float32)[rows]

    def fingerprint(self) -> Any:
        return self.task

    def source(self, domain: str) -> str:
        return "made up"
