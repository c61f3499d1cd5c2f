"""Plain local training on random images, and multinomial regression in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fairflower.clients import SGD, ClientData, Trainer
from fairflower.config import TrainConfig
from fairflower.data import Augment, Split

Arrays = dict[str, np.ndarray]
SETTINGS = TrainConfig(local_epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01)


def random_images(n: int, seed: int, shape: tuple[int, int, int] = (3, 8, 8)) -> Split:
    rng = np.random.default_rng(seed)
    return Split(rng.integers(0, 256, (n, *shape), dtype=np.uint8), rng.integers(0, 4, n))


def random_client_data(train: int = 20, test: int = 11, seed: int = 0) -> ClientData:
    half = (0.5, 0.5, 0.5)
    return ClientData(
        random_images(train, seed), random_images(test, seed + 1), half, half, 4, Augment(2, True)
    )


def linear() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))


def batch_normed() -> nn.Module:
    torch.default_generator.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(144, 4))
    return nn.Sequential(*layers)


def sgd_trainer(model: nn.Module | None = None, **changes: Any) -> SGD:
    arguments: dict[str, Any] = {
        "model": model or batch_normed(),
        "data": random_client_data(),
        "settings": SETTINGS,
        "client_id": 3,
        "seed": 0,
    }
    return SGD(**(arguments | changes))


def one_round(client: Trainer, arrays: Arrays, server_round: int = 1) -> tuple[Arrays, float]:
    client.receive(arrays)
    loss = client.train(server_round)["train_loss"]
    return client.send(), loss


class NumPySoftmaxRegression:
    """Multinomial regression in float64 numpy: cross entropy, its gradient, and SGD."""

    def __init__(self, split: Split) -> None:
        x = (split.x.reshape(len(split.y), -1) / 255 - 0.5) / 0.5
        self.x, self.y = np.c_[x, np.ones(len(x))], np.eye(4)[split.y]

    def probabilities(self, w: np.ndarray) -> np.ndarray:
        logits = self.x @ w.T
        e = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(e / e.sum(1, keepdims=True))

    def loss(self, w: np.ndarray) -> float:
        return float(-np.log((self.probabilities(w) * self.y).sum(1)).mean())

    def accuracy(self, w: np.ndarray) -> float:
        return float((self.probabilities(w).argmax(1) == self.y.argmax(1)).mean())

    def step(
        self, w: np.ndarray, buffer: np.ndarray, settings: TrainConfig
    ) -> tuple[np.ndarray, np.ndarray]:
        gradient = (self.probabilities(w) - self.y).T @ self.x / len(self.x)
        buffer = settings.momentum * buffer + gradient + settings.weight_decay * w
        return w - settings.lr * buffer, buffer
