"""How a client trains: one file per method."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fairflower import models
from fairflower.clients.app import make_client_app
from fairflower.clients.base import Trainer
from fairflower.clients.batches import ClientData, Images
from fairflower.clients.device import choose_device, limit_threads
from fairflower.clients.gradients import fisher_diagonal, mean_gradient, sharpness
from fairflower.clients.sgd import SGD
from fairflower.config import ClientConfig, ConfigError, ModelConfig, TrainConfig, unknown
from fairflower.data import Federation
from fairflower.names import CLIENTS

__all__ = [
    "SGD",
    "ClientData",
    "Images",
    "Trainer",
    "build_model",
    "build_trainer",
    "choose_device",
    "fisher_diagonal",
    "limit_threads",
    "make_client_app",
    "mean_gradient",
    "sharpness",
]


def build_model(
    config: ModelConfig, client: ClientConfig, federation: Federation, seed: int
) -> models.Classifier:
    """Make a federation's network as the method of local training wants it.

    See `fairflower.models.build` for ``seed`` and errors.
    """
    model = models.build(
        config.name, federation.num_classes, federation.shape, seed, config.weights
    )
    method = CLIENTS[client.name]
    if method.adapt:
        adapt = getattr(importlib.import_module(method.module), method.adapt)
        adapt(model, federation, **{**method.defaults(), **client.args})
    return model


def build_trainer(
    name: str,
    model: nn.Module,
    data: ClientData,
    settings: TrainConfig,
    *,
    client_id: int,
    seed: int,
    device: str | torch.device = "cpu",
    arguments: Mapping[str, Any] | None = None,
) -> Trainer:
    """Make the trainer that ``client.name`` names.

    Of the method's ``arguments`` it gets those that are not its exchanges' alone. See
    `Trainer` for the others.

    Raises
    ------
    ConfigError
        On an unknown name or argument.
    """
    if name not in CLIENTS:
        raise ConfigError(unknown("client", name, CLIENTS))
    method = CLIENTS[name]
    for argument in arguments or {}:
        if argument not in method.arguments:
            raise ConfigError(unknown(f"argument of {name}", argument, method.arguments))
    trainer: type[Trainer] = getattr(importlib.import_module(method.module), method.attribute)
    own = {k: v for k, v in (arguments or {}).items() if k in trainer.arguments()}
    return trainer(model, data, settings, client_id=client_id, seed=seed, device=device, **own)
