"""Construction of networks and trainers from a run config."""

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
) -> models.Model:
    """Build the network for a federation, adapted to the client's training method.

    See `fairflower.models.build` for ``seed`` and errors.
    """
    model = models.build(
        config.name,
        federation.num_classes,
        federation.shape,
        seed,
        config.weights,
        config.adapter,
        federation.learns,
    )
    with client.naming_failures():
        client.factory.adapt(model, federation, **{**client.defaults(), **client.args})
        models.keep_local(model, client.factory.local_arrays(model))
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
    """Build the trainer for a config; raise ``ConfigError`` if its name or an argument is unknown.

    Arguments that belong only to the method's exchanges are not passed to the trainer. See
    `Trainer` for the other parameters.
    """
    client.check()
    trainer: type[Trainer] = client.factory
    args = client.for_task(data.task).args
    accepted = {k: v for k, v in args.items() if k in constructor_specs(trainer)}
    return trainer(model, data, settings, client_id=client_id, seed=seed, device=device, **accepted)
