"""The task of the peers in a folder; programs that read it import fairflower's network only."""

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
    """Settings of local training, and the folder with the images of all clients in one array."""

    folder: str
    model: str
    num_classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_clients: int
    cohort: int  # clients in a round
    rounds: int
    local_epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    seed: int

    @classmethod
    def write(cls, config: RunConfig, folder: Path) -> Task:
        """Write a run's settings and its clients' training images."""
        from fairflower.data import prepare
        from fairflower.server.setup import num_selected

        data, train = prepare(config.data), config.train
        task = cls(
            str(folder),
            config.model.name,
            data.num_classes,
            data.shape,
            data.mean,
            data.std,
            len(data.clients),
            num_selected(config, len(data.clients)),
            config.num_server_rounds - 1,
            train.local_epochs,
            train.batch_size,
            train.lr,
            train.momentum,
            train.weight_decay,
            config.seed,
        )
        arrays = zip(*(data.test(domain, "train") for domain in data.domains), strict=True)
        for name, parts in zip("xy", arrays, strict=True):
            np.save(folder / f"{name}.npy", np.concatenate(parts))
        sizes = [client.num_examples for client in data.clients]
        np.save(folder / "ends.npy", np.cumsum([0, *sizes]))
        (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
        return task

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Read a task from its folder."""
        meta = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in meta.items()})

    def build(self) -> torch.nn.Module:
        """Build the initial network."""
        from fairflower.models import build

        return build(self.model, self.num_classes, self.shape, self.seed)

    def client(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a client's normalized images and its labels; each process caches them."""
        return _client(self, k)

    def write_rounds(self, seconds: list[float]) -> None:
        """Write the seconds of the rounds to ``rounds.txt``, one per line."""
        Path(self.folder, "rounds.txt").write_text("\n".join(map(str, seconds)), encoding="utf-8")


@cache
def _client(task: Task, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ends, x, y = (_array(task.folder, name) for name in ("ends", "x", "y"))
    rows = slice(ends[k], ends[k + 1])
    mean, std = (np.array(values).reshape(1, -1, 1, 1) for values in (task.mean, task.std))
    images = ((x[rows] / 255 - mean) / std).astype(np.float32)
    return torch.from_numpy(images), torch.from_numpy(np.array(y[rows]))


@cache
def _array(folder: str, name: str) -> np.ndarray:
    return np.load(Path(folder, f"{name}.npy"), mmap_mode="r")
