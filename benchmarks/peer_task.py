"""The task of `peers.py` in a folder; programs that read it import fairflower's network only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from fairflower.config import RunConfig


@dataclass(frozen=True)
class Task:
    """Settings of local training, and the folder with the clients' images."""

    folder: str
    model: str
    num_classes: int
    shape: tuple[int, int, int]
    num_clients: int
    rounds: int
    local_epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    seed: int

    @classmethod
    def write(cls, config: RunConfig, folder: Path) -> Task:
        """Write a run's settings and its clients' normalized images, without augmentation."""
        from fairflower.data import prepare

        data, train = prepare(config.data), config.train
        task = cls(
            str(folder),
            config.model.name,
            data.num_classes,
            data.shape,
            len(data.clients),
            config.num_server_rounds - 1,
            train.local_epochs,
            train.batch_size,
            train.lr,
            train.momentum,
            train.weight_decay,
            config.seed,
        )
        mean, std = (np.array(values).reshape(1, -1, 1, 1) for values in (data.mean, data.std))
        for k in range(task.num_clients):
            x, y = data.train(k)
            np.save(folder / f"x-{k}.npy", ((x / 255 - mean) / std).astype(np.float32))
            np.save(folder / f"y-{k}.npy", y)
        (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
        return task

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Read a task from its folder."""
        meta = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        return cls(**{**meta, "shape": tuple(meta["shape"])})

    def build(self) -> torch.nn.Module:
        """Build the initial network."""
        from fairflower.models import build

        return build(self.model, self.num_classes, self.shape, self.seed)

    def client(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a client's images and labels; each process caches them."""
        return _client(self.folder, k)

    def write_rounds(self, seconds: list[float]) -> None:
        """Write the seconds of the rounds to ``rounds.txt``, one per line."""
        Path(self.folder, "rounds.txt").write_text("\n".join(map(str, seconds)), encoding="utf-8")


@cache
def _client(folder: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.from_numpy(np.load(Path(folder, f"{name}-{k}.npy"))) for name in "xy")
    return x, y
