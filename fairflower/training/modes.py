"""Context managers for temporary modes of a model and of torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fairflower.process_wide import Setting, process_wide


@contextmanager
def temporarily(changes: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    """Set attributes, each an object, a name and a value; restore their values on exit."""
    changes = list(changes)
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    try:
        for thing, name, value in changes:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn

#: Kernels of attention that vmap cannot batch, and that cannot be differentiated twice.
_FAST_ATTENTION = (
    Setting(_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    Setting(_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    Setting(_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)
_FAST_LAYERS = Setting(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled
)
_REPRODUCIBLE = {Setting.of(_cudnn, "deterministic"): True, Setting.of(_cudnn, "benchmark"): False}

#: Deterministic algorithms, without which a GPU adds the gradients of embeddings in random order;
#: PyTorch warns of operations that have none. No result depends on the content of new memory.
_DETERMINISTIC = {
    Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ): (True, True),
    Setting.of(torch.utils.deterministic, "fill_uninitialized_memory"): False,
}

# PyTorch refuses to use its old and its new name together.
_TF32 = (
    {Setting.of(_cudnn.conv, "fp32_precision"): "ieee"}
    if hasattr(_cudnn, "conv")
    else {Setting.of(_cudnn, "allow_tf32"): False}
)


def plain_attention() -> AbstractContextManager[None]:
    """Compute attention by the kernel that can be differentiated twice."""
    return process_wide(dict.fromkeys(_FAST_ATTENTION, False))


def attention_for_vmap() -> AbstractContextManager[None]:
    """Compute attention by the kernel that vmap can batch; it loops over samples with others."""
    return process_wide(dict.fromkeys((*_FAST_ATTENTION, _FAST_LAYERS), False))


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model into eval mode, and restore the mode of every module afterwards."""
    return temporarily((m, "training", False) for m in model.modules())


def use_running_stats(model: nn.Module) -> AbstractContextManager[None]:
    """Make batch norm use its running statistics, without updating them."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm))
    return temporarily((m, "training", False) for m in norms)


def no_stats_update(model: nn.Module) -> AbstractContextManager[None]:
    """Make batch norm use the batch's statistics, without updating its running statistics."""
    norms = (m for m in model.modules() if getattr(m, "track_running_stats", False))
    return temporarily((m, "track_running_stats", False) for m in norms)


def frozen(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Exclude parameters from training temporarily, then restore their earlier settings."""
    chosen = [p for p in parameters if p.requires_grad]
    for p in chosen:
        p.grad = None
    return temporarily((p, "requires_grad", False) for p in chosen)


def at_least_float32(values: Tensor) -> Tensor:
    """Convert 16-bit results of autocast to float32; return other tensors unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormal numbers as 0 in this thread; they slow a processor down a hundredfold."""
    before = not torch.tensor(1e-39).mul(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def reproducible(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all global generators and use deterministic kernels; undo both afterwards.

    A network or augmentation of a user may draw from NumPy's or Python's.
    """
    numpys, pythons = np.random.get_state(), random.getstate()
    np.random.seed(seed % 2**32)
    random.seed(seed)
    on_gpu = device.type == "cuda"
    try:
        with (
            torch.random.fork_rng(devices=[device] if on_gpu else []),
            process_wide(_REPRODUCIBLE | (_DETERMINISTIC if on_gpu else {})),
        ):
            if device.type == "cpu":
                # `torch.manual_seed` would also queue the seed for every GPU used later.
                torch.default_generator.manual_seed(seed)
            else:
                torch.manual_seed(seed)
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def without_tf32(device: torch.device) -> AbstractContextManager[None]:
    """Compute convolutions on an NVIDIA GPU in float32; by default their inputs become TF32."""
    return process_wide(_TF32 if device.type == "cuda" else {})


def layers_with_statistics(model: nn.Module) -> list[_NormBase]:
    """Return the normalization layers that have running statistics."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


@contextmanager
def target_statistics(model: nn.Module, batches: Iterable[Tensor]) -> Iterator[None]:
    """Set BatchNorm statistics to those of the batches; restore the earlier statistics on exit.

    This is AdaBN (Li et al., 2018): statistics from the test examples, without their labels.
    Every batch has the same weight. Batches of a single example are ignored; if all batches are of
    this kind, they are joined. With a single example in total, the statistics do not change,
    because one example has no variance. To compute the statistics, each batch passes through
    BatchNorm layers in training mode, which use the statistics of the batch. The rest of the
    network is in eval mode, and is unchanged.
    """
    layers = layers_with_statistics(model)
    kept = [{name: b.clone() for name, b in m.named_buffers(recurse=False)} for m in layers]
    model.eval()
    try:
        all_batches = list(batches)
        usable = [x for x in all_batches if len(x) > 1]
        if not usable and len(all_batches) > 1:
            usable = [torch.cat(all_batches)]
        for m in layers if usable else ():
            m.reset_running_stats()
            m.train()
        # Without momentum, the statistics are the mean over all batches.
        with torch.no_grad(), temporarily((m, "momentum", None) for m in layers):
            for x in usable:
                model(x)
        model.eval()
        yield
    finally:
        model.eval()
        with torch.no_grad():
            for m, own in zip(layers, kept, strict=True):
                for name, buffer in m.named_buffers(recurse=False):
                    buffer.copy_(own[name])
