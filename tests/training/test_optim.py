"""Optimizers of clients: torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from fairflower.config import TrainConfig
from fairflower.training.trainer import build_optimizer

KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def trained(make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> bytes:
    """Return the parameters of a network after five steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = make(list(model.parameters()))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().sum().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().tobytes()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_equal_torchs_exactly(name: str, decay: float) -> None:
    settings = TrainConfig(optimizer=name, lr=0.05, momentum=0.8, weight_decay=decay)
    more = {"momentum": 0.8} if name == "sgd" else {}
    assert trained(lambda parameters: build_optimizer(parameters, settings)) == trained(
        lambda parameters: KINDS[name](parameters, lr=0.05, weight_decay=decay, fused=True, **more)
    )


def test_step_hooks_are_called() -> None:
    optimizer = build_optimizer([nn.Parameter(torch.ones(2))], TrainConfig())
    assert isinstance(optimizer, torch.optim.SGD)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))
    optimizer.step()
    assert called == [True]
