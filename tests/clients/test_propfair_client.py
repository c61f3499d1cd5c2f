"""PropFair's batch loss against the formula and its tangent."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from toy_trainers import tiny_model, trainer


def loss_at(entropy: float, **arguments) -> tuple[float, float]:
    """Return the client's loss for a batch with this cross entropy, and its slope."""
    client = trainer("propfair", model=tiny_model(), **arguments)
    # Two classes' logits that give one image this cross entropy: log(1 + exp(z)).
    z = torch.tensor(math.log(math.expm1(entropy)), requires_grad=True)
    logits = torch.stack([torch.zeros_like(z), z, torch.tensor(-1e9), torch.tensor(-1e9)])
    client.model.forward = lambda x: logits[None]
    loss = client.loss(torch.zeros(1), torch.tensor([0]))
    loss.backward()
    return loss.item(), z.grad.item() / torch.sigmoid(z).item()


@pytest.mark.parametrize("entropy", [0.01, 1.0, 2.5])
def test_the_loss_is_minus_log_of_1_minus_entropy_over_m(entropy):
    value, slope = loss_at(entropy, M=3.0, epsilon=0.2)
    assert value == pytest.approx(-math.log(1 - entropy / 3), rel=1e-5)
    assert slope == pytest.approx(1 / (3 - entropy), rel=1e-5)


@pytest.mark.parametrize("entropy", [2.9, 3.0, 40.0])
def test_the_loss_is_linear_beyond_the_tangent_point(entropy):
    value, slope = loss_at(entropy, M=3.0, epsilon=0.2)
    assert value == pytest.approx(-math.log(0.2 / 3) + (entropy - 2.8) / 0.2, rel=1e-5)
    assert slope == pytest.approx(5, rel=1e-5)


def test_the_released_variant_falls_back_to_the_cross_entropy_over_m():
    assert loss_at(2.9, M=3.0, epsilon=0.2, variant="released") == pytest.approx((2.9 / 3, 1 / 3))


def test_a_large_m_gives_the_plain_loss_over_m():
    client, plain = trainer("propfair", M=1e4), trainer("sgd")
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 4
    client.model.eval(), plain.model.eval()
    assert client.loss(x, y).item() * 1e4 == pytest.approx(plain.loss(x, y).item(), rel=1e-2)
    assert plain.loss(x, y).item() == pytest.approx(F.cross_entropy(plain.model(x), y).item())
