"""Optimizers and sharpness-aware gradients for local training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fairflower.config import TrainConfig
from fairflower.training.modes import no_stats_update


def build_optimizer(
    parameters: Sequence[nn.Parameter], settings: TrainConfig
) -> torch.optim.Optimizer:
    """Return torch's optimizer for ``train.optimizer``: ``sgd``, ``adam`` or ``adamw``."""
    arguments = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimizer == "sgd":
        return _eager(torch.optim.SGD)(parameters, momentum=settings.momentum, **arguments)
    adam = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return _eager(adam)(parameters, **arguments)


@cache
def _eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer class without its preparations for ``torch.compile``.

    These import torch's compiler when an optimizer is created and at its first step, which takes
    more than a second of CPU time in every process that trains: on a SuperNode, for every message.
    """
    methods: dict[str, Any] = {
        name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")
    }
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def apply_sam_gradient(
    model: nn.Module, loss: Callable[[], Tensor], rho: float, alpha: float
) -> None:
    """Replace the gradient at w with the gradient of SAM (alpha = 0) or GSAM.

    Let g be the current gradient. Norms are over all parameters::

        g_p = gradient of the loss at w + rho g / ||g||           (Foret et al., ICLR 2021)
        grad <- g_p - alpha (g - <g, g_p> / ||g_p||^2 g_p)        (Zhuang et al., ICLR 2022)

    GSAM subtracts the part of g that is orthogonal to g_p, so that a step lowers the loss in the
    neighborhood and its gap to the loss at w. The second pass does not change batch norm's
    statistics and step counter. It uses a new dropout mask, as in the authors' code.

    Published optimizers (pytorch_optimizer has both) are not used, because they wrap the optimizer,
    update batch norm statistics twice, restore w by subtraction with rounding errors, and take
    GSAM's radius from a schedule.

    Parameters without a gradient are not perturbed, and w is restored exactly. FedISM (IJCAI 2024)
    uses a constant rho = 0.05 and alpha = 0.1.
    """
    moved = [p for p in model.parameters() if p.grad is not None]
    w = [p.detach().clone() for p in moved]
    g = [p.grad for p in moved if p.grad is not None]
    scale = rho / (nn.utils.get_total_norm(g) + 1e-12)
    with torch.no_grad():
        for p, direction in zip(moved, g, strict=True):
            p.addcmul_(direction, scale)
            p.grad = None
    with no_stats_update(model):
        loss().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for p, before in zip(moved, w, strict=True):
            p.copy_(before)
        if alpha == 0:
            return
        g_p = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved]
        share = _dot(g, g_p) / (_dot(g_p, g_p) + 1e-24)
        for p, a, b in zip(moved, g, g_p, strict=True):
            p.grad = b - alpha * (a - share * b)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.sum(x * y) for x, y in zip(a, b, strict=True)]).sum()
