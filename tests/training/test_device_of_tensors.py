"""Clients, strategies and networks create tensors with an explicit device.

No GPU is needed: a PyTorch function mode raises an error if package code creates a tensor without
``device``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parametrize import STRATEGY_PER_NEEDS
from torch.overrides import TorchFunctionMode
from toy_trainers import trainer_case

import fairflower
from fairflower.models import build
from fairflower.registry import CLIENTS
from fairflower.strategies import STRATEGIES

PACKAGE = Path(fairflower.__file__).parent
CHECKED = tuple(str(PACKAGE / name) for name in ("training", "clients", "exchanges", "models"))
#: Copies arrays of messages and files into tensors on any device.
COPIES = str(PACKAGE / "models" / "__init__.py")

FACTORIES = {
    getattr(torch, name): name
    for name in (
        *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
        *("randperm", "tensor", "zeros"),
    )
}


class NamesItsDevice(TorchFunctionMode):
    """Refuse tensors that are created in the checked files without a device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Random numbers come from a CPU generator, for the same draws on every device.
        if func in FACTORIES and not {"device", "generator"} & kwargs.keys():
            frame = sys._getframe(1)
            place = frame.f_code.co_filename
            # Tensors made in a network's __init__ move with it; CPU scalars work with any device.
            moved = frame.f_code.co_name == "__init__" and isinstance(
                frame.f_locals.get("self"), torch.nn.Module
            )
            if (
                place.startswith(CHECKED)
                and place != COPIES
                and not moved
                and (tensor := func(*args, **kwargs)).ndim
            ):
                place = f"{Path(place).name}, line {frame.f_lineno}"
                raise AssertionError(
                    f"torch.{FACTORIES[func]} makes {tuple(tensor.shape)} without device= ({place})"
                )
        return func(*args, **kwargs)


PAIRS = [
    *((name, "uniform") for name in CLIENTS),
    *(("sgd", name) for name in STRATEGY_PER_NEEDS if name != "uniform"),
]


@pytest.mark.parametrize(("client", "strategy"), PAIRS)
def test_clients_and_strategies_create_tensors_with_a_device(client, strategy):
    with NamesItsDevice():
        trainer_case(client).two_rounds(STRATEGIES[strategy])


NETWORKS = {
    **dict.fromkeys(["cnn", "cnn:norm=batch", "prompt-vit-tiny", "vpt-vit-tiny"], (3, 16, 16)),
    **dict.fromkeys(["resnet10", "resnet12", "resnet18"], (3, 32, 32)),
    "mlp": (5,),
    "embedding-bag": (50, 8),
    **dict.fromkeys(["timm", "prompt-timm", "vpt-timm"], (3, 32, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_create_tensors_with_a_device(name):
    """Covers a training step and the representation."""
    options = {}
    if name.endswith("timm"):
        pytest.importorskip("timm", reason="needs fairflower[timm]")
        name, options = f"{name}:test_vit:image-size=32", {"weights": "random"}
    shape = NETWORKS[name.partition(":test")[0]]
    model = build(name, 3, shape, 0, **options)
    draws = torch.Generator().manual_seed(0)
    tokens = len(shape) == 2
    x = (
        torch.randint(1, shape[0], (4, shape[1]), generator=draws)
        if tokens
        else torch.randn(4, *shape, generator=draws)
    )
    with NamesItsDevice():
        torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 0])).backward()
        model.eval()
        with torch.no_grad():
            model.represent(x)


def test_the_check_detects_a_tensor_without_a_device():
    code = compile("torch.zeros(2)", str(PACKAGE / "clients" / "made_up.py"), "eval")
    refused = pytest.raises(AssertionError, match=r"zeros makes \(2,\) .* \(made_up.py, line 1\)")
    with refused, NamesItsDevice():
        eval(code, {"torch": torch})
    with NamesItsDevice():  # code of tests is not checked
        assert torch.zeros(2).sum() == 0
