"""Base class of classifiers that use a network from another library for features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fairflower.errors import ConfigError
from fairflower.models import Classifier


class BodyClassifier(Classifier):
    """A classifier with a network from another library as ``body`` and a linear head.

    Without an adapter, all arrays are trained and exchanged. After `freeze`, only the head and the
    parameters that an adapter has added to the body are trained and exchanged; all clients have the
    other arrays from the start.

    Parameters
    ----------
    body
        Network that maps an input to features [N, width].
    width
        Number of features.
    num_classes
        Number of classes, which is the number of outputs of the head.
    """

    def __init__(self, body: nn.Module, width: int, num_classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, num_classes)
        self.frozen = False

    def freeze(self) -> None:
        """Exchange only trained arrays from now on; an adapter has frozen the others."""
        self.frozen = True
        new = {id(parameter) for parameter in self.new_parameters()}
        for module in self.body.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in new]
            if any(p.dtype != torch.float32 for p in own):  # in a network of 16 bits
                module.register_forward_pre_hook(_in_float32)
            for parameter in own:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
        self.train(self.training)

    def new_parameters(self) -> Iterator[nn.Parameter]:
        """Yield parameters of the body that are new in this run and are trained with the head."""
        yield from ()

    def exchanged_arrays(self) -> dict[str, Tensor]:
        """Return all arrays or, for a frozen body, only the trained arrays."""
        state = self.state_dict()
        if not self.frozen:
            return state
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: array for name, array in state.items() if name in trained}

    def train(self, mode: bool = True) -> BodyClassifier:
        """Set the mode of all layers; batch norm layers of a frozen body stay in eval mode."""
        super().train(mode)
        if self.frozen:
            for module in self.body.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def to_head(self, features: Tensor) -> Tensor:
        """Convert features to the dtype of the head."""
        return features.to(self.head.weight.dtype)


def _in_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert a layer's inputs to float32, as the layer's weights are."""
    return tuple(x.float() for x in inputs)


@contextmanager
def same_for_every_seed() -> Iterator[None]:
    """Draw random weights from a fixed seed, because all clients need the same frozen weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def as_rgb(x: Tensor, name: str) -> Tensor:
    """Convert images [N, 1 or 3, H, W] to three channels; ``name`` names the model in errors."""
    if x.shape[1] not in (1, 3):
        raise ConfigError(
            f"{name} needs images with 1 or 3 channels, but the data have {x.shape[1]}. Choose "
            "another model.name."
        )
    return x.expand(-1, 3, -1, -1)


def resized(x: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Resize images [N, C, H, W] to this height and width; None means no resizing."""
    if size is None or tuple(x.shape[2:]) == size:
        return x
    return F.interpolate(x, size, mode="bilinear", antialias=True)
