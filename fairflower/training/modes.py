"""Modes of a model, and of torch, for a moment: eval_mode, statistics left alone, seeded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model into eval mode; put every module back as it was."""
    return _temporarily(model.modules(), "training", False)


def use_running_stats(model: nn.Module) -> AbstractContextManager[None]:
    """Let batch norm normalise by, and leave alone, its running statistics."""
    return _temporarily(
        (m for m in model.modules() if isinstance(m, _BatchNorm)), "training", False
    )


def no_stats_update(model: nn.Module) -> AbstractContextManager[None]:
    """Let batch norm, and what keeps statistics as it does, neither update nor count them."""
    norms = (m for m in model.modules() if getattr(m, "track_running_stats", False))
    return _temporarily(norms, "track_running_stats", False)


@contextmanager
def _temporarily(modules: Iterable[nn.Module], attribute: str, value: bool) -> Iterator[None]:
    before = [(module, getattr(module, attribute)) for module in modules]
    try:
        for module, _ in before:
            setattr(module, attribute, value)
        yield
    finally:
        for module, was in before:
            setattr(module, attribute, was)


def at_least_float32(values: Tensor) -> Tensor:
    """What autocast computed in 16 bits, from here on in float32; any other tensor as it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Take numbers too small for a normalised float for zero, in this thread; undo it after.

    A processor computes with them a hundred times slower.
    """
    before = not torch.tensor(1e-39).mul(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def reproducible(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators (dropout), pick repeatable kernels; undo both after."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if device.type == "cpu":
                # `torch.manual_seed` would note a seed, with who gave it, for every GPU to come.
                torch.default_generator.manual_seed(seed)
            else:
                torch.manual_seed(seed)
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
