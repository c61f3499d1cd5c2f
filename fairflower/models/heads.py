"""A network's arrays in two parts: its head, and its body."""

from __future__ import annotations

from torch import nn

from fairflower.errors import ConfigError
from fairflower.models import local_tensors, travelling


def head_arrays(model: nn.Module) -> list[str]:
    """Return the names of the arrays of ``model.head`` that travel.

    ``ConfigError`` if the network has no such layer, or no other arrays.

    >>> from fairflower.models import build
    >>> head_arrays(build("mlp", num_classes=3, shape=(5,), seed=0))
    ['head.weight', 'head.bias']
    """
    return _parts(model)[0]


def body_arrays(model: nn.Module) -> list[str]:
    """Return the names of the travelling arrays outside of the head; see `head_arrays`."""
    return _parts(model)[1]


def _parts(model: nn.Module) -> tuple[list[str], list[str]]:
    names = list({**travelling(model), **local_tensors(model)})
    head = [name for name in names if name.startswith("head.")]
    body = [name for name in names if not name.startswith("head.")]
    missing = [what for what, found in (("head", head), ("body", body)) if not found]
    if missing:
        raise ConfigError(
            f"{type(model).__name__} has no {missing[0]} that is sent: its arrays are "
            f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}. The client divides a "
            "network into `head` and the rest. Name the last layer `head`, as a Classifier does, "
            "or choose another client.name."
        )
    return head, body
