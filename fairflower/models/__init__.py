"""The networks, by name, and the shape that they share."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from fairflower.config import ConfigError, unknown
from fairflower.names import MODELS

__all__ = ["Classifier", "build"]


class Classifier(nn.Module):
    """A feature extractor under a linear head: ``forward(x) = head(features(x))``.

    Methods that look at the representation (MOON, FedProto, ...) need the two
    apart; a subclass sets ``head`` and defines ``features``.
    """

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """Normalised images [N, C, H, W] to the head's input [N, D]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images [N, C, H, W] to logits [N, classes]."""
        logits: Tensor = self.head(self.features(x))
        return logits


def build(name: str, num_classes: int, shape: tuple[int, int, int], seed: int) -> Classifier:
    """Make a network; the seed alone decides its initial weights.

    Parameters
    ----------
    name
        A key of ``fairflower.names.MODELS``.
    num_classes
        Width of the head.
    shape
        Channels, height and width of an image.
    seed
        Seed of the initial weights. Torch's global generator is left as it was.

    Raises
    ------
    ConfigError
        On an unknown name, or images too small for the network.
    """
    if name not in MODELS:
        raise ConfigError(unknown("model", name, MODELS))
    module, attribute, _ = MODELS[name]
    make = getattr(importlib.import_module(module), attribute)
    # devices=[]: weights are drawn on the CPU, whatever device they go to later.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: Classifier = make(num_classes, shape)
    return model
