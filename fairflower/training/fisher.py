"""Diagonal of the empirical Fisher information: the mean of squared per-sample gradients.

Per-sample gradients can be computed in three ways. `torch.func` works for most differentiable
models, but is slow for convolutions on a CPU. For models with common layers, an ordinary backward
pass over a batch provides the input of every layer and the gradient of its output; their product is
the gradient of the layer's weight. Two samples are used to test whether this second way is exact
for a model. Models that `torch.func` does not support, such as most networks of the transformers
library, need a backward pass for each sample.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fairflower.models import trainable
from fairflower.tasks import CLASSIFICATION, Task, task_of
from fairflower.training.gradients import Batches, batches_of, checked_count, gradients_of
from fairflower.training.modes import attention_for_vmap, eval_mode, without_tf32

#: Number of elements of a layer's per-sample gradients in memory: 1 MB fits in a CPU's cache.
_BLOCK = 2**18


@torch.enable_grad()
def fisher_diagonal(
    model: nn.Module, data: Batches, *, memory_mb: float = 512, task: Task | None = None
) -> dict[str, Tensor]:
    """Return the diagonal of the empirical Fisher information: mean squared per-sample gradients.

    F_i = 1/n sum_s (dL(x_s, y_s)/dtheta_i)^2 with the task's loss L and the true targets y. The
    model is in eval mode during the call (batch norm uses its running statistics, so that the loss
    of a sample does not depend on others), and is unchanged. ``memory_mb`` is the memory in MiB for
    gradients and activations of the samples that are processed together (at least one). The result
    and, temporarily, five arrays of the model's size need additional memory. Other arguments, the
    result and errors are those of `mean_gradient`.

    >>> import torch
    >>> model = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x, y = torch.tensor([[2.0], [4.0]]), torch.tensor([0, 1])
    >>> fisher_diagonal(model, [(x, y)])["weight"].tolist()
    [[2.5], [2.5]]
    """
    total, n, task = _zeros(model), 0, task or task_of(CLASSIFICATION)
    with eval_mode(model), attention_for_vmap():
        for x, y in batches_of(model, data):
            if n == 0:
                by_layer = _is_exact_by_layer(model, task, x, y)
                add_squares = _add_by_layer if by_layer else _add_by_sample
                chunk = chunk_size(model, task, x[:1], y[:1], memory_mb, gradients=not by_layer)
            for some_x, some_y in zip(torch.split(x, chunk), torch.split(y, chunk), strict=True):
                add_squares(total, model, task, some_x, some_y)
            n += len(y)
    return {name: value / checked_count(n) for name, value in total.items()}


def chunk_size(
    model: nn.Module, task: Task, x: Tensor, y: Tensor, memory_mb: float, *, gradients: bool = True
) -> int:
    """Return the number of samples that fit into memory together, at least 1.

    A forward pass over ``x`` and ``y`` counts the activations; with ``gradients``, a gradient of
    every trainable parameter is added. The sum is doubled, because the backward pass also holds
    gradients of activations and intermediate results.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    # No backward pass follows. A hook that returns a layer's output would never be freed.
    def keep(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage

    x, y = x.clone(), y.clone()  # views would count their whole storage
    with saved_tensors_hooks(keep, lambda nothing: nothing):
        task.loss(model(x), y, "sum")
    per_sample = sum(storage.nbytes() for storage in kept.values()) / len(y)
    if gradients:
        per_sample += sum(p.numel() * p.element_size() for p in trainable(model).values())
    return max(1, int(memory_mb * 2**20 / (2 * per_sample)))


def _zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in trainable(model).items()}


# --- ways to add the squares of a batch's per-sample gradients ---------------------------


def _add_by_sample(
    total: Mapping[str, Tensor], model: nn.Module, task: Task, x: Tensor, y: Tensor
) -> None:
    """Add the squares with torch.func or, if it does not support the model, sample by sample."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(model, parameters, (x[None],)), y[None], "sum")

    parameters = trainable(model)
    fixed = {name: p.detach() for name, p in parameters.items()}
    per_sample = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    try:  # which adds nothing before it fails
        for name, gradients in per_sample(fixed, x, y).items():
            total[name] += gradients.square().sum(0)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # torch.func refuses models in many words; an error of the model comes again
        for k in range(len(y)):
            one = task.loss(model(x[k : k + 1]), y[k : k + 1], "sum")
            for name, gradient in gradients_of(one, parameters).items():
                total[name] += gradient.square()


def _add_by_layer(
    total: Mapping[str, Tensor], model: nn.Module, task: Task, x: Tensor, y: Tensor
) -> None:
    """Add the squares for convolutions, linear layers and norms; skip other parameters."""

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
        if x.is_floating_point():
            # The gradient of the images alone saves the ordinary gradients of the weights.
            images = x.detach().requires_grad_()
            # A clone, because models may change their input in place, which a leaf does not allow.
            loss = task.loss(model(images.clone()), y, "sum")
            torch.autograd.grad(loss, images, allow_unused=True)
        else:
            loss = task.loss(model(x), y, "sum")
            torch.autograd.grad(loss, list(trainable(model).values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _is_exact_by_layer(model: nn.Module, task: Task, x: Tensor, y: Tensor) -> bool:
    """Return whether `_add_by_layer` is exact for this model, by a test on two samples.

    It is not exact if a parameter belongs to another kind of layer or to several layers, or is used
    without a call to its layer, or if the first dimension of a layer's input is not that of the
    samples.
    """
    if any(isinstance(m, nn.Embedding) and m.weight.requires_grad for m in model.modules()):
        return False  # the gradient of embeddings is not implemented by layer
    # A single sample is repeated: two are needed to see whether samples are mixed.
    if len(y) == 1:
        x, y = x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)
    x, y = x[:2].clone(), y[:2]
    parameters = trainable(model)
    truth, by_layer = _zeros(model), _zeros(model)
    with without_tf32(x.device):  # products by layer do not round to TF32 either
        _add_by_layer(by_layer, model, task, x, y)
        for loss in task.loss(model(x), y, "none"):
            for name, gradient in gradients_of(loss, parameters, retain_graph=True).items():
                truth[name] += gradient.square()
    largest = {name: square.max().item() for name, square in truth.items() if square.numel()}
    # Where gradients should be zero, both may have different rounding errors.
    noise = 1e-12 * max(largest.values(), default=0.0)
    return all(
        torch.allclose(by_layer[name], truth[name], rtol=0, atol=1e-4 * most + noise)
        for name, most in largest.items()
    )


# --- a layer ---------------------------------------------------------------------------
# x is the layer's input, d the gradient of the summed loss with respect to its output; the first
# dimension of both is that of the n samples.


def _is_understood(module: nn.Module, x: Tensor) -> bool:
    if len(x) == 0:  # a routed layer that no sample reached
        return False
    if isinstance(module, nn.Conv2d):
        zero_padded = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return zero_padded and x.ndim == 4
    if isinstance(module, _BatchNorm):
        return module.running_mean is not None
    return isinstance(module, (nn.Linear, nn.GroupNorm)) and x.ndim > 1


def _by_channel(module: nn.Module, d: Tensor) -> Tensor:
    """Return d as [n, channels, positions]; d has channels last for linear layers, else second."""
    if isinstance(module, nn.Linear):
        return d.reshape(len(d), -1, d.shape[-1]).transpose(1, 2)
    return d.reshape(*d.shape[:2], -1)


def _weight_squares(module: nn.Module, x: Tensor, d: Tensor) -> Tensor:
    """Return the sum over samples of the weight's squared gradients, in the weight's shape."""
    if isinstance(module, nn.GroupNorm):
        normalized = F.group_norm(x, module.num_groups, eps=module.eps)
        return _by_channel(module, d * normalized).sum(2).square().sum(0)
    if isinstance(module, _BatchNorm):
        normalized = F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
        return _by_channel(module, d * normalized).sum(2).square().sum(0)
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
    """Return the patch of the input for each position of the output, [n, groups, positions, seen].

    Like ``torch.nn.functional.unfold``, but with the channels last in a patch. This is the memory
    order of channels-last images, and is ten times faster.
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
