"""Dividing the arrays of a network into head and body."""

from __future__ import annotations

from torch import nn

from fairflower.errors import ConfigError
from fairflower.models import exchanged_arrays, local_tensors


def head_arrays(model: nn.Module) -> list[str]:
    """Return the names of the arrays of ``model.head`` that are exchanged.

    Raises ``ConfigError`` if the network has no layer named ``head``, or no other arrays.

    >>> from fairflower.models import build
    >>> head_arrays(build("mlp", num_classes=3, shape=(5,), seed=0))
    ['head.weight', 'head.bias']
    """
    return _parts(model)[0]


def body_arrays(model: nn.Module) -> list[str]:
    """Return the names of the exchanged arrays outside the head; see `head_arrays`."""
    return _parts(model)[1]


def _parts(model: nn.Module) -> tuple[list[str], list[str]]:
    names = list({**exchanged_arrays(model), **local_tensors(model)})
    head = [name for name in names if name.startswith("head.")]
    body = [name for name in names if not name.startswith("head.")]
    missing = [what for what, found in (("head", head), ("body", body)) if not found]
    if missing:
        raise ConfigError(
            f"{type(model).__name__} has no {missing[0]}: its arrays are "
            f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}. This client needs a "
            "network with a layer named `head` and other layers. Name the last layer `head`, as in "
            "a Classifier, or choose another client.name."
        )
    return head, body
