"""Adapters, which add a few trained parameters to a frozen network (``model.adapter``)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Annotated

from torch import nn

from fairflower.arguments import Range
from fairflower.errors import ConfigError, quoted, require


def lora(
    body: nn.Module,
    *,
    r: Annotated[int, Range(1, 4096)] = 8,
    alpha: Annotated[float, Range(above=0)] = 16,
    dropout: Annotated[float, Range(0, 0.99)] = 0.0,
    targets: str = "all",
) -> None:
    """Freeze a network and add low-rank adapters to some of its layers, using PEFT.

    A layer W x becomes W x + (alpha / r) B A x, with A [r, inputs] and B [outputs, r]. B is
    initially 0 (E. Hu et al., *LoRA: Low-rank adaptation of large language models*, ICLR 2022).

    Parameters
    ----------
    r
        Rank of the adapters. Default 8 (PEFT).
    alpha
        Scale of the adapters. Default 16, twice the rank, as in the paper's code.
    dropout
        Dropout probability before A, at most 0.99: with 1 the adapters would never be trained.
        Default 0.
    targets
        Comma-separated last parts of layer names, such as ``query,value``, or ``all`` for every
        linear layer.

    Raises
    ------
    ConfigError
        If a target does not match any layer (the message lists the available names), or PEFT
        cannot adapt the layer.
    NotInstalled
        If PEFT is not installed.
    """
    require("hf", "model.adapter = 'lora'", "peft")
    from peft import LoraConfig, inject_adapter_in_model

    chosen = _matching(body, targets)
    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=chosen)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # of GPT-2's layers, which PEFT sets
        try:
            inject_adapter_in_model(config, body)
        except ValueError as error:  # of grouped convolutions, among others
            raise ConfigError(
                f"model.adapter: PEFT cannot adapt these layers: {error} Choose other targets."
            ) from error
    for parameter in body.parameters():
        if parameter.requires_grad:  # also beside layers of 16 bits
            parameter.data = parameter.data.float()


def _matching(body: nn.Module, targets: str) -> list[str]:
    """Return the full names of the layers that ``targets`` selects."""
    layers = _layers(body)
    linear = [name for name in layers if not isinstance(body.get_submodule(name), nn.Conv2d)]
    if targets == "all" and linear:
        return linear
    chosen = []
    for target in targets.split(","):
        wanted = target.strip()
        matches = [name for name in layers if f".{name}".endswith(f".{wanted}") and wanted]
        if not matches:
            raise ConfigError(
                f"model.adapter: targets = {quoted(targets)}: no layer is called {quoted(wanted)}. "
                f"Choose from {_last_parts(layers)}; or set targets = all, for all linear layers."
            )
        chosen += matches
    return chosen


def _layers(body: nn.Module) -> list[str]:
    """Return the names of layers that LoRA can adapt; Conv1D is the linear layer of GPT-2."""
    return [
        name
        for name, module in body.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D"
    ]


def _last_parts(names: Iterable[str]) -> str:
    """Return the last parts of names; if the last part is a number, include the part before it.

    >>> _last_parts(["a.0.query", "a.1.query", "a.conv.0"])
    'query, conv.0'
    """
    parts: dict[str, None] = {}
    for name in names:
        *above, last = name.split(".")
        parts[f"{above[-1]}.{last}" if last.isdigit() and above else last] = None
    return ", ".join(parts) or "none (the network has neither linear layers nor convolutions)"
