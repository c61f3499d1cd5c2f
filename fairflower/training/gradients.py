"""Gradient of the cross entropy over a data set, and how fast the loss rises along it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fairflower.models import trainable
from fairflower.training.batches import Examples
from fairflower.training.modes import eval_mode

#: A client's examples; or batches (x [B, ...], y int64 [B]), as dicts by the names below, too.
Batches = Examples | Iterable[Sequence[Tensor] | Mapping[str, Any]]

#: What data sets on the Hugging Face Hub, and so Flower's tutorials, call x and y.
INPUTS = ("img", "image", "x", "pixel_values", "features")
LABELS = ("label", "labels", "y", "fine_label")

#: Examples per forward pass over `Examples`: as many as training takes, so memory is alike.
_BATCH_SIZE = 64


@torch.enable_grad()
def mean_gradient(model: nn.Module, data: Batches) -> dict[str, Tensor]:
    """Gradient of the mean cross entropy over a data set.

    The model is put into eval mode for it and is left as it was found, ``.grad``
    included. Parameters that the output does not depend on have gradient zero.

    Parameters
    ----------
    model
        Gives logits [B, classes].
    data
        A client's images, taken as they are, without augmentation; or any batches
        (x [B, ...], y int64 [B]), such as a DataLoader's, also as dicts
        ``{"img": x, "label": y}``; a generator of them will do.

    Returns
    -------
    dict
        By the name of each trainable parameter: in its type and shape, on its device.
        A parameter shared by several modules appears once, as in ``named_parameters``.

    Raises
    ------
    ValueError
        When there are no samples.
    TypeError
        When a batch is none of these.
    """
    with eval_mode(model):
        return _loss_and_gradient(model, data)[1]


@torch.no_grad()
def mean_loss(model: nn.Module, data: Batches) -> float:
    """Mean cross entropy over a data set: ``received_loss`` before training.

    After training it is ``trained_loss``. The model is in eval mode for it and is left as it
    was found. Parameters and errors are those of `mean_gradient`.
    """
    with eval_mode(model):
        return _loss(model, data, model)


@torch.enable_grad()
def sharpness(model: nn.Module, data: Batches, *, rho: float = 0.05) -> float:
    """Rise of the mean cross entropy within rho of the model, to first order.

    S = L(theta + rho g / ||g||) - L(theta) with the gradient g of the mean L over the
    data set, and one norm over all trainable parameters (Foret et al., ICLR 2021; Eq. 8
    of Wu et al., IJCAI 2024). The model is in eval mode for it (batch norm uses its
    running statistics, and keeps them) and is left as it was found.

    Parameters
    ----------
    model, data
        As for `mean_gradient`.
    rho
        Radius, in the parameters' own units. Default 0.05 (FedISM).

    Returns
    -------
    float
        At least 0: where the step leads down, beyond a bend, the maximum over the
        neighbourhood is at the model itself.

    Raises
    ------
    ValueError
        When there are no samples.
    """
    if isinstance(data, Iterator):
        data = list(data)  # which is gone through twice
    with eval_mode(model):
        loss, gradient = _loss_and_gradient(model, data)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradient.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item()
        if norm == 0:
            return 0.0
        step = rho / norm
        moved = {name: p.detach() + step * gradient[name] for name, p in trainable(model).items()}
        with torch.no_grad():
            there = _loss(model, data, lambda x: functional_call(model, moved, (x,)))
    return max(there - loss, 0.0)


def _loss(model: nn.Module, data: Batches, logits_of: Callable[[Tensor], Tensor]) -> float:
    """Mean cross entropy over a data set."""
    total, n = _zero(model), 0
    for x, y in batches_of(model, data):
        total += F.cross_entropy(logits_of(x), y, reduction="sum")
        n += len(y)
    if n == 0:
        raise ValueError("There are no samples to take a loss on. Give at least one.")
    return total.item() / n


def _loss_and_gradient(model: nn.Module, data: Batches) -> tuple[float, dict[str, Tensor]]:
    """Mean cross entropy and its gradient, of the model in the mode that it is in."""
    parameters = trainable(model)
    total = zeros_like(parameters)
    losses, n = _zero(model), 0
    for x, y in batches_of(model, data):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        for name, gradient in gradients_of(loss, parameters).items():
            total[name] += gradient
        losses += loss.detach()
        n += len(y)
    mean = divide_sums(total, n)
    return losses.item() / n, mean


def batches_of(model: nn.Module, data: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Deal batches on the model's device."""
    device = next(model.parameters()).device
    for batch in data.eval_batches(_BATCH_SIZE) if isinstance(data, Examples) else data:
        x, y = _pair(batch)
        yield x.to(device), y.to(device)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a batch; ``TypeError`` if they are not to be found."""
    found = batch
    if isinstance(batch, Mapping):
        found = [batch[name] for names in (INPUTS, LABELS) for name in names if name in batch]
    if isinstance(found, Sequence) and len(found) == 2 and all(map(torch.is_tensor, found)):
        return found[0], found[1]
    held = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise TypeError(
        f"A batch is {held}: expected tensors (x, y), or a dict of them under one of "
        f"{', '.join(INPUTS)} and one of {', '.join(LABELS)}."
    )


def _zero(model: nn.Module) -> Tensor:
    """A sum to begin with, on the model's device: asking a GPU per batch would wait for it."""
    return torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)


def zeros_like(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums to begin with."""
    return {name: torch.zeros_like(p) for name, p in parameters.items()}


def gradients_of(
    loss: Tensor, parameters: Mapping[str, Tensor], *, retain_graph: bool = False
) -> dict[str, Tensor]:
    """Gradient by each parameter, zero for what the loss does not depend on."""
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=retain_graph, materialize_grads=True
    )
    return dict(zip(parameters, gradients, strict=True))


def divide_sums(total: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    """Divide a sum over n samples."""
    if n == 0:
        raise ValueError("There are no samples to take gradients on. Give at least one.")
    return {name: value / n for name, value in total.items()}
