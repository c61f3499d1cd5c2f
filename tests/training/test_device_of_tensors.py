"""Tensors that methods make name their device: a GPU would refuse those of the CPU.

No GPU is needed: a mode of PyTorch refuses functions that make tensors, called in the code of
methods without ``device``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from toys import method

import fairflower
from fairflower.registry import CLIENTS
from fairflower.strategies import STRATEGIES

PACKAGE = Path(fairflower.__file__).parent
CHECKED = tuple(str(PACKAGE / name) for name in ("training", "clients", "exchanges"))

FACTORIES = {
    getattr(torch, name): name
    for name in (
        *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
        *("randperm", "tensor", "zeros"),
    )
}


class NamesItsDevice(TorchFunctionMode):
    """Refuses tensors without a device, made in the files of methods."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Random numbers are of a generator on the CPU, for the same draws on every device.
        if func in FACTORIES and not {"device", "generator"} & kwargs.keys():
            frame = sys._getframe(1)
            place = frame.f_code.co_filename
            # A module's tensors are moved with it; a scalar of the CPU goes with any device.
            moved = isinstance(frame.f_locals.get("self"), torch.nn.Module)
            if place.startswith(CHECKED) and not moved and (made := func(*args, **kwargs)).ndim:
                place = f"{Path(place).name}, line {frame.f_lineno}"
                raise AssertionError(
                    f"torch.{FACTORIES[func]} makes {tuple(made.shape)} without device= ({place})"
                )
        return func(*args, **kwargs)


PAIRS = [
    *((name, "uniform") for name in CLIENTS),
    *(("sgd", name) for name in STRATEGIES if name != "uniform"),
]


@pytest.mark.parametrize(("client", "strategy"), PAIRS)
def test_methods_name_the_device_of_every_tensor(client, strategy):
    with NamesItsDevice():
        method(client).two_rounds(STRATEGIES[strategy])


def test_the_check_sees_a_tensor_without_a_device():
    code = compile("torch.zeros(2)", str(PACKAGE / "clients" / "made_up.py"), "eval")
    refused = pytest.raises(AssertionError, match=r"zeros makes \(2,\) .* \(made_up.py, line 1\)")
    with refused, NamesItsDevice():
        eval(code, {"torch": torch})
    with NamesItsDevice():  # a test is not the code of a method
        assert torch.zeros(2).sum() == 0
