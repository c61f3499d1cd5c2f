"""Names of the arrays of a network's normalization layers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

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
