"""Registered methods on toy federations, and trainers with a known loss."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from fairflower.clients import ClientData, Trainer
from fairflower.config import ClientConfig, TrainConfig
from fairflower.data import Split
from fairflower.exchanges import SemanticAnchors
from fairflower.models import Classifier
from fairflower.models.prompt_vit import PromptViT
from fairflower.registry import CLIENTS
from fairflower.testing.federations import (
    CLASSES,
    SETTINGS,
    data,
    images,
    models_equal,
    run_toy_rounds,
    tiny_model,
)
from fairflower.testing.trainers import TrainerCase
from fairflower.training.build import build_trainer

__all__ = ["CLASSES", "SETTINGS", "data", "images", "models_equal", "run_toy_rounds", "tiny_model"]


def prompted(seed: int = 0) -> PromptViT:
    """Return a prompted transformer of one layer, for images of 8x8 pixels."""
    return copy.deepcopy(_prompted(seed))


@functools.cache
def _prompted(seed: int) -> PromptViT:
    # Built once: the frozen part is not sent to clients, and clients in threads share torch's
    # generator, so that each could draw a different frozen part.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return PromptViT(VisionTransformer(8, 4, 1, 2, 8, 16), CLASSES, (1, 8, 8))


def tiny_network(name: str, seed: int = 0) -> Classifier:
    """Return a tiny network that a registered trainer can train."""
    return prompted(seed) if name == "fedgc" else tiny_model(seed)


def trainer_case(name: str) -> TrainerCase:
    """Return the test case of a registered trainer."""
    return TrainerCase(CLIENTS[name], lambda: tiny_network(name), exchanges=lambda: exchanges(name))


def trainer(name: str, client: int = 0, **changes: Any) -> Trainer:
    """Return a registered trainer on tiny data."""
    options = {
        "model": changes.pop("model", None) or tiny_network(name),
        "data": changes.pop("data", None) or data(client),
        "settings": changes.pop("settings", SETTINGS),
        "client_id": client,
        "seed": 0,
    }
    return build_trainer(ClientConfig(name, changes), **options)


class QuadraticModel(nn.Module):
    """Model with parameters w; `quadratic_trainer` defines the loss."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))


def quadratic_trainer(
    kind: type[Trainer],
    curvature: Sequence[float],
    minimum: Sequence[float],
    settings: TrainConfig,
    client: int = 0,
    examples: int = 2,
    **arguments: Any,
) -> Trainer:
    """Return a trainer of ``kind`` for F(w) = 1/2 (w - c)' diag(a) (w - c), one step per epoch."""
    a, c = torch.tensor(curvature), torch.tensor(minimum)

    class OnQuadratic(kind):  # type: ignore[misc, valid-type]
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return 0.5 * (a * (self.model.w - c).square()).sum()

    pixels = Split(np.zeros((examples, 1, 1, 1), np.uint8), np.zeros(examples, np.int64))
    alone = ClientData(pixels, pixels, (0.5,), (0.5,), 1)
    return OnQuadratic(
        QuadraticModel(len(a)), alone, settings, client_id=client, seed=0, **arguments
    )


def exchanges(name: str) -> list[Any]:
    """Return the exchanges of a trainer, as a session creates them."""
    created = CLIENTS[name].make_exchanges({})
    for exchange in created:
        if isinstance(exchange, SemanticAnchors):
            exchange.epochs = 20  # instead of 500: the quality of anchors does not matter here
    return created
