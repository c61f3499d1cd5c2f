"""AdaBN: statistics of the test examples, averaged over batches; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy_trainers import tiny_model

from fairflower.training.modes import layers_with_statistics, target_statistics


def test_batch_statistics_are_averaged():
    """Golden: batches with means 1, 2 and 6 give 3."""
    norm = nn.BatchNorm1d(1, momentum=0.1)
    with target_statistics(norm, [torch.tensor([[m - 1.0], [m + 1.0]]) for m in (1.0, 2.0, 6.0)]):
        assert norm.running_mean.item() == pytest.approx(3)
        assert norm.running_var.item() == pytest.approx(2)
        assert not norm.training
    assert (norm.running_mean.item(), norm.running_var.item(), norm.momentum) == (0, 1, 0.1)


def test_the_network_is_restored_and_dropout_is_off():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout(0.9)

        def forward(self, x):
            return self.norm(self.drop(x))

    network = Network()
    network.norm.weight.data.fill_(3)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)) * 4 + 7
    before = {name: array.clone() for name, array in network.state_dict().items()}
    with target_statistics(network, [x]):
        torch.testing.assert_close(network.norm.running_mean, x.mean(0))
        torch.testing.assert_close(network(x).mean(0), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(network(x).std(0), torch.full((2,), 3.0), atol=1e-3, rtol=0)
    after = network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_batch_of_one_example_is_left_out():
    norm = nn.BatchNorm1d(1)
    with target_statistics(norm, [torch.tensor([[1.0], [3.0]]), torch.tensor([[90.0]])]):
        assert norm.running_mean.item() == pytest.approx(2)


def test_batches_of_one_example_are_joined():
    norm = nn.BatchNorm1d(1)
    with target_statistics(norm, [torch.tensor([[1.0]]), torch.tensor([[3.0]])]):
        assert (norm.running_mean.item(), norm.running_var.item()) == pytest.approx((2, 2))


def test_a_single_example_leaves_the_statistics_unchanged():
    norm = nn.BatchNorm1d(1)
    with target_statistics(norm, [torch.tensor([[90.0]])]):
        assert (norm.running_mean.item(), norm.running_var.item()) == (0, 1)
        assert not norm.training


def test_an_error_restores_the_statistics():
    norm = nn.BatchNorm1d(1)
    with pytest.raises(ZeroDivisionError), target_statistics(norm, [torch.tensor([[1.0], [3.0]])]):
        raise ZeroDivisionError
    assert norm.running_mean.item() == 0


def test_only_layers_with_running_statistics_are_found():
    assert len(layers_with_statistics(tiny_model())) == 1
    assert not layers_with_statistics(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
