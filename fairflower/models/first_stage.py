"""Outputs of a network's frozen first stage, attached to the batches that they belong to."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def cache_first_stage(x: Tensor, result: Tensor) -> Tensor:
    """Attach the output [N, D] of ``Classifier.first_stage`` to a batch [N, C, H, W].

    The output belongs to this tensor object only. Tensors computed from the batch, for example by
    augmentation, mixing or slicing, do not have it.
    """
    batch: Any = x
    batch.first_stage = (result, _version(x))
    return x


def cached_first_stage(x: Tensor) -> Tensor | None:
    """Return the output attached to a batch, or None if it is missing or the batch has changed.

    Examples
    --------
    >>> import torch
    >>> from fairflower.models import cache_first_stage, cached_first_stage
    >>> x = cache_first_stage(torch.zeros(2, 3), torch.ones(2, 1))
    >>> cached_first_stage(x).shape, cached_first_stage(x + 1)
    (torch.Size([2, 1]), None)
    """
    result, version = getattr(x, "first_stage", (None, None))
    return result if version == _version(x) else None


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version  # inference tensors count no versions
