"""AdaBN (Li et al., 2018): BatchNorm statistics from the test examples, without their labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def layers_with_statistics(model: nn.Module) -> list[_NormBase]:
    """Return the normalization layers that have running statistics."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


@contextmanager
def target_statistics(model: nn.Module, batches: Iterable[Tensor]) -> Iterator[None]:
    """Set BatchNorm statistics to those of the batches; restore the earlier statistics on exit.

    Every batch has the same weight. Batches of a single example are ignored; if all batches are of
    this kind, they are joined. With a single example in total, the statistics do not change,
    because one example has no variance. To compute the statistics, each batch passes through
    BatchNorm layers in training mode, which use the statistics of the batch. The rest of the
    network is in eval mode, and is unchanged.
    """
    layers = layers_with_statistics(model)
    kept = [{name: b.clone() for name, b in m.named_buffers(recurse=False)} for m in layers]
    momenta = [m.momentum for m in layers]
    model.eval()
    try:
        all_batches = list(batches)
        usable = [x for x in all_batches if len(x) > 1]
        if not usable and len(all_batches) > 1:
            usable = [torch.cat(all_batches)]
        for m in layers if usable else ():
            m.reset_running_stats()
            m.momentum = None  # the mean over all batches
            m.train()
        with torch.no_grad():
            for x in usable:
                model(x)
        model.eval()
        yield
    finally:
        model.eval()
        with torch.no_grad():
            for m, own, momentum in zip(layers, kept, momenta, strict=True):
                m.momentum = momentum
                for name, buffer in m.named_buffers(recurse=False):
                    buffer.copy_(own[name])
