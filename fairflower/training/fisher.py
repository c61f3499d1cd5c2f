"""Diagonal of the Fisher information: the mean of squared per-sample gradients.

It needs every sample's own gradient. Two ways lead there. `torch.func` takes any
differentiable model, but on a CPU it is slow where there are convolutions. So for models
built of the usual layers one ordinary backward pass over a batch tells every layer's
input and the gradient of its output, whose product is the gradient of its weight.
Whether that accounts for all of a model is found out on two samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fairflower.models import trainable
from fairflower.training.gradients import Batches, batches_of, divide_sums, gradients_of, zeros_like
from fairflower.training.modes import eval_mode

#: Elements of one layer's per-sample gradients at a time, 1 MB: a CPU's cache holds it.
_BLOCK = 2**18


@torch.enable_grad()
def fisher_diagonal(
    model: nn.Module, data: Batches, *, memory_mb: float = 512
) -> dict[str, Tensor]:
    """Diagonal of the empirical Fisher information: the mean of squared per-sample gradients.

    F_i = 1/n sum_s (dL(x_s, y_s)/dtheta_i)^2 with the cross entropy L and the true
    labels y. The model is put into eval mode for it (batch norm uses its running
    statistics, so a sample's loss is its own) and is left as it was found.

    Parameters
    ----------
    model, data
        As for `mean_gradient`.
    memory_mb
        Megabytes (2**20 bytes) that the gradients and activations of the samples in
        work may take; it decides how many are in work, at least one. On top come the
        result and, for a moment, five arrays as large as the model.

    Returns
    -------
    dict
        As `mean_gradient`.

    Raises
    ------
    ValueError
        When there are no samples.
    """
    total = zeros_like(trainable(model))
    n = 0
    with eval_mode(model), _attention_for_vmap():
        for x, y in batches_of(model, data):
            if n == 0:
                by_layer = _layers_tell_all(model, x, y)
                add_squares = _add_by_layer if by_layer else _add_by_vmap
                chunk = chunk_size(model, x[:1], y[:1], memory_mb, gradients=not by_layer)
            for some_x, some_y in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
                add_squares(total, model, some_x, some_y)
            n += len(y)
    return divide_sums(total, n)


def chunk_size(
    model: nn.Module, x: Tensor, y: Tensor, memory_mb: float, *, gradients: bool = True
) -> int:
    """Count the samples that fit into memory at a time, at least 1.

    Activations are counted by a forward pass over ``x`` and ``y``; with ``gradients``,
    a gradient of every trainable parameter comes on top. All of it counts twice,
    because the backward pass holds gradients of activations and intermediate results.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = x.clone(), y.clone()  # they may be parts of larger storages
    with saved_tensors_hooks(count, lambda tensor: tensor):
        F.cross_entropy(model(x), y)
    per_sample = sum(kept.values()) / len(y)
    if gradients:
        per_sample += sum(p.numel() * p.element_size() for p in trainable(model).values())
    return max(1, int(memory_mb * 2**20 / (2 * per_sample)))


@contextmanager
def _attention_for_vmap() -> Iterator[None]:
    """Use the attention that vmap knows; it takes the samples of others one at a time."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


# --- adding the squares of a batch's per-sample gradients, two ways --------------------


def _add_by_vmap(total: Mapping[str, Tensor], model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Any model, through torch.func."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: p.detach() for name, p in trainable(model).items()}
    per_sample = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    for name, gradients in per_sample(parameters, x, y).items():
        total[name] += gradients.square().sum(0)


def _add_by_layer(total: Mapping[str, Tensor], model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A model of convolutions, linear layers and norms; what others own is left alone."""

    def watch(prefix: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inputs and _is_understood(module, inputs[0]) and output.requires_grad:
            layer_input = inputs[0].detach()
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda d: add(prefix, module, layer_input, d)
            )

    def add(prefix: str, module: nn.Module, x: Tensor, d: Tensor) -> None:
        if f"{prefix}weight" in total:
            total[f"{prefix}weight"] += _weight_squares(module, x, d)
        if f"{prefix}bias" in total:
            total[f"{prefix}bias"] += _by_channel(module, d).sum(2).square().sum(0)

    handles = [
        module.register_forward_hook(partial(watch, f"{name}." if name else ""))
        for name, module in model.named_modules()
    ]
    try:
        # Differentiating by the images alone spares the weights' ordinary gradients.
        images = x.detach().requires_grad_()
        # A clone, because a model may work in place on what it is given, but not on a leaf.
        loss = F.cross_entropy(model(images.clone()), y, reduction="sum")
        torch.autograd.grad(loss, images, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _layers_tell_all(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Test on two samples whether `_add_by_layer` is right about this model.

    It is not when a parameter belongs to another kind of layer or to several, or is
    used without a call of its layer, or when a layer's input has something else than
    the samples in its first dimension.
    """
    if not x.is_floating_point():
        return False
    # A single sample is doubled: it takes two to see whether they are kept apart.
    x, y = (x[:2].clone(), y[:2]) if len(y) > 1 else (x.repeat_interleave(2, 0), y.repeat(2))
    parameters = trainable(model)
    truth, found = zeros_like(parameters), zeros_like(parameters)
    _add_by_layer(found, model, x, y)
    for loss in F.cross_entropy(model(x), y, reduction="none"):
        for name, gradient in gradients_of(loss, parameters, retain_graph=True).items():
            truth[name] += gradient.square()
    largest = {name: square.max().item() for name, square in truth.items()}
    # What is zero but for rounding may differ by all of it.
    noise = 1e-12 * max(largest.values(), default=0.0)
    return all(
        torch.allclose(found[name], truth[name], rtol=0, atol=1e-4 * largest[name] + noise)
        for name in truth
    )


# --- one layer -------------------------------------------------------------------------
# x is its input, d the gradient of the summed loss by its output; both begin with the
# samples' dimension n.


def _is_understood(module: nn.Module, x: Tensor) -> bool:
    if isinstance(module, nn.Conv2d):
        zero_padded = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return zero_padded and x.ndim == 4
    if isinstance(module, _BatchNorm):
        return module.running_mean is not None
    return isinstance(module, (nn.Linear, nn.GroupNorm)) and x.ndim > 1


def _by_channel(module: nn.Module, d: Tensor) -> Tensor:
    """To [n, channels, places]: a linear layer's channels come last, all others' second."""
    if isinstance(module, nn.Linear):
        return d.reshape(len(d), -1, d.shape[-1]).transpose(1, 2)
    return d.reshape(*d.shape[:2], -1)


def _weight_squares(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """Sum over samples of the squared gradients of the weight, in its shape."""
    if isinstance(module, nn.GroupNorm):
        normalised = F.group_norm(x, module.num_groups, eps=module.eps)
        return _by_channel(module, d * normalised).sum(2).square().sum(0)
    if isinstance(module, _BatchNorm):
        normalised = F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
        return _by_channel(module, d * normalised).sum(2).square().sum(0)
    if isinstance(module, nn.Linear) and x.ndim == 2:
        return d.square().T @ x.square()  # the square of a product of two numbers

    assert isinstance(module, (nn.Conv2d, nn.Linear))
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    d = _by_channel(module, d)
    d = d.reshape(len(d), groups, -1, d.shape[2])
    places, seen = d.shape[3], module.weight[0].numel()
    total = d.new_zeros(groups, d.shape[2], seen)
    block = max(1, _BLOCK // max(total.numel(), groups * places * seen))
    for some_d, some_x in zip(torch.split(d, block), torch.split(x, block), strict=True):
        for gradient in some_d @ _columns(module, some_x):
            total.addcmul_(gradient, gradient)
    if isinstance(module, nn.Linear):
        return total[0]
    channels, *kernel = module.weight.shape[1:]
    return total.reshape(-1, *kernel, channels).permute(0, 3, 1, 2)


def _columns(module: nn.Conv2d | nn.Linear, x: Tensor) -> Tensor:
    """Cut out what each place of the output sees of the input: [n, groups, places, seen].

    ``torch.nn.functional.unfold`` with the channels last in what is seen, the order in
    which channels-last images lie in memory; that makes it ten times as fast.
    """
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), 1, -1, module.in_features)
    top, left = map(int, module.padding)
    x = F.pad(x, (left, left, top, top)).permute(0, 2, 3, 1)
    for dim, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=1
    ):
        x = x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    n, height, width, _, *kernel = x.shape
    x = x.view(n, height, width, module.groups, -1, *kernel)
    x = x.permute(0, 3, 1, 2, 5, 6, 4)  # [n, groups, height, width, *kernel, channels]
    return x.reshape(n, module.groups, height * width, -1)
