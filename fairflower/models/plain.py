"""Networks that are plain ``torch.nn.Module``s, as in torchvision: their last layer is the head."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor, nn

from fairflower.errors import ConfigError
from fairflower.models import Classifier

logger = logging.getLogger(__name__)


class PlainNetwork(Classifier):
    """A network whose last linear layer is ``head``; ``body`` is the rest of the network."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def features(self, x: Tensor) -> Tensor:
        """Map examples to the inputs of the last layer, [N, D]."""
        features: Tensor = self.body(x)
        return features


def with_head(name: str, network: nn.Module, x: Tensor) -> PlainNetwork:
    """Divide a network into body and head; ``x`` are two examples, ``name`` is ``model.name``.

    Raises ``ConfigError`` if the network's output is not that of a linear layer that it calls once.
    """
    outputs: list[tuple[str, Tensor]] = []
    linear = {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear)}
    hooks = [
        layer.register_forward_hook(lambda *call, n=n: outputs.append((n, call[-1])))
        for n, layer in linear.items()
    ]
    network.eval()
    with torch.no_grad():
        logits = network(x)
        for hook in hooks:
            hook.remove()
        place, out = outputs[-1] if outputs else ("", None)
        if out is logits and place and [n for n, _ in outputs].count(place) == 1:
            parent, _, own = place.rpartition(".")
            setattr(network.get_submodule(parent), own, nn.Identity())
            made = PlainNetwork(network, linear[place])
            if torch.equal(made.eval()(x), logits):
                _say(
                    f"model.name = {name!r}: its last linear layer, {place}, is taken as the head."
                )
                return made
    raise ConfigError(
        f"model.name = {name!r}: {type(network).__name__} is no fairflower.models.Classifier, and "
        "its output is not that of a last linear layer that could be taken as its head. Divide it: "
        "return fairflower.models.plain.PlainNetwork(body, head), where head is a torch.nn.Linear "
        "and head(body(x)) are the logits."
    )


@cache
def _say(text: str) -> None:
    logger.warning(text)  # once per process
