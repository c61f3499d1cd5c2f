"""Networks that are plain modules, as people and torchvision write them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairflower import models
from fairflower.config import ModelConfig, RunConfig
from fairflower.errors import ConfigError
from fairflower.models import _warn_once

SHAPE = (3, 8, 8)


class Usual(nn.Module):
    """Written as in torchvision: features, pooling, and a layer called ``fc``."""

    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.hidden = nn.Linear(4, 6)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.hidden(self.conv(x).mean((2, 3)))))


class Softmaxed(Usual):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(super().forward(x), 1)


class Twice(nn.Module):
    """Its last layer is used twice, so it is no head."""

    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x.mean((2, 3))))


@pytest.fixture
def nets(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("plain_nets")
    module.Usual, module.Softmaxed, module.Twice = Usual, Softmaxed, Twice
    module.sequential = lambda classes, shape: nn.Sequential(nn.Flatten(), nn.Linear(192, classes))
    module.last = lambda classes, shape: nn.Linear(8, classes)
    monkeypatch.setitem(sys.modules, "plain_nets", module)
    _warn_once.cache_clear()


@pytest.mark.parametrize(("name", "head"), [("Usual", "fc"), ("sequential", "1")])
def test_the_last_linear_layer_becomes_the_head(
    nets: None, caplog: pytest.LogCaptureFixture, name: str, head: str
) -> None:
    model = models.build(f"plain_nets:{name}", 5, SHAPE, seed=0).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own: Any = getattr(sys.modules["plain_nets"], name)(5, SHAPE).eval()
    x = torch.rand(3, *SHAPE)
    assert torch.equal(model(x), own(x))
    assert torch.equal(model.head(model.features(x)), model(x))
    assert {"head.weight", "head.bias"} <= set(models.exchanged_arrays(model))
    assert caplog.text.count(f"the last linear layer, {head}, is the head") == 1


@pytest.mark.parametrize("name", ["Softmaxed", "Twice"])
def test_other_outputs_are_refused_with_the_line_that_divides_them(nets: None, name: str) -> None:
    with pytest.raises(ConfigError, match=r"last linear layer.*PlainNetwork\(body, head\)"):
        models.build(f"plain_nets:{name}", 3, SHAPE, seed=0)


def test_a_network_that_fails_on_two_examples_is_the_users_error(nets: None) -> None:
    with pytest.raises(Exception, match="plain_nets:last"):
        models.build("plain_nets:last", 3, (3, 5, 5), seed=0)


def test_a_users_network_with_a_parameter_weights_gets_the_setting(nets: None) -> None:
    given = []

    def weighted(classes: int, shape: tuple[int, ...], weights: str = "own") -> nn.Module:
        given.append(weights)
        return Usual(classes, shape)

    sys.modules["plain_nets"].weighted = weighted  # type: ignore[attr-defined]
    for weights in ("", "a.pth"):
        models.build("plain_nets:weighted", 2, SHAPE, seed=0, weights=weights)
    assert given == ["own", "a.pth"]
    config = ModelConfig("plain_nets:weighted", "a.pth")
    assert config.to_receive() == config
    weighted.sent_whole = True  # type: ignore[attr-defined]
    assert config.to_receive().weights == ""
    flat = {"model.weights": "a.pth", "model.name": "plain_nets:weighted"}
    assert RunConfig.from_flat(flat).model == config
    with pytest.raises(ConfigError, match="Usual does not support pretrained weights"):
        RunConfig.from_flat(flat | {"model.name": "plain_nets:Usual"})
