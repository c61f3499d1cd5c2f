"""Networks and trainers by the names that a run config gives them."""

from __future__ import annotations

import torch
from torch import nn

from fairflower import models
from fairflower.arguments import constructor_specs
from fairflower.config import ClientConfig, ModelConfig, TrainConfig
from fairflower.data import Federation
from fairflower.training.batches import ClientData
from fairflower.training.trainer import Trainer


def build_model(
    config: ModelConfig, client: ClientConfig, federation: Federation, seed: int
) -> models.Classifier:
    """Make a federation's network as the method of local training wants it.

    See `fairflower.models.build` for ``seed`` and errors.
    """
    model = models.build(
        config.name, federation.num_classes, federation.shape, seed, config.weights
    )
    client.factory.adapt(model, federation, **{**client.defaults(), **client.args})
    return model


def build_trainer(
    client: ClientConfig,
    model: nn.Module,
    data: ClientData,
    settings: TrainConfig,
    *,
    client_id: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> Trainer:
    """Make the trainer that ``client`` names; ``ConfigError`` if it or an argument is unknown.

    Of the method's arguments it gets those that are not its exchanges' alone. See
    `Trainer` for the others.
    """
    client.check()
    trainer: type[Trainer] = client.factory
    own = {k: v for k, v in client.args.items() if k in constructor_specs(trainer)}
    return trainer(model, data, settings, client_id=client_id, seed=seed, device=device, **own)
