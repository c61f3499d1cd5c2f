"""Names of the arrays of a network's head, body and normalization layers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fairflower.errors import ConfigError
from fairflower.models import exchanged_arrays, local_tensors

#: Batch and instance norm layers of all dimensions, and norm layers without running statistics.
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def norm_arrays(model: nn.Module, *, affine: bool) -> list[str]:
    """Return the names of running statistics and, with ``affine``, of scales and shifts.

    >>> norm_arrays(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), affine=False)
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    >>> norm_arrays(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), affine=True)
    ['1.weight', '1.bias']
    """
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, NORMS):
            arrays = [*(module.named_parameters(recurse=False) if affine else ())]
            arrays += module.named_buffers(recurse=False)
            names += [f"{prefix}.{name}" if prefix else name for name, _ in arrays]
    return names


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
