"""A linear model of several clients against closed forms of least squares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor, nn

from fairflower.clients import ClientData, Trainer
from fairflower.config import TrainConfig
from fairflower.data import Split
from fairflower.models import Classifier
from fairflower.strategies import QFFL, FairStrategy, FedAvg, Uniform
from fairflower.tasks import task_of
from fairflower.testing.federations import run_toy_rounds

#: One step per round, on all examples of a client.
SETTINGS = TrainConfig(local_epochs=1, batch_size=100, lr=0.3, momentum=0.0, weight_decay=0.0)
SIZES = (20, 50, 90)
CENTER, SCALE = 3.0, 2.0


class Linear(Classifier):
    """A linear model of four features."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(4, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, x: Tensor) -> Tensor:
        return x


def client(k: int, outputs: int) -> Split:
    """Return the examples of a client, whose coefficients are its own."""
    rng = np.random.default_rng(k)
    x = rng.normal(size=(SIZES[k], 4)).astype(np.float32)
    y = 3 + x @ rng.normal(size=(4, outputs)) + rng.normal(size=(SIZES[k], outputs)) * (1 + k)
    return Split(x, y.astype(np.float32) if outputs > 1 else y[:, 0].astype(np.float32))


def trained(strategy: FairStrategy, outputs: int, rounds: int) -> NDArray[np.float64]:
    """Return the coefficients in the targets' unit after rounds, [5, outputs]."""
    task = task_of(f"regression:center={CENTER}:scale={SCALE}")

    def make(k: int) -> Trainer:
        split = client(k, outputs)
        data = ClientData(split, split, (0.0,) * 4, (1.0,) * 4, outputs, task=task)
        return Trainer(Linear(outputs), data, SETTINGS, client_id=k, seed=0)

    arrays, _ = run_toy_rounds(strategy, make, len(SIZES), rounds)
    bias = CENTER + SCALE * arrays["head.bias"]
    return np.vstack([SCALE * arrays["head.weight"].T, bias]).astype(np.float64)


def least_squares(weights: Any, outputs: int) -> NDArray[np.float64]:
    """Return the minimum of the clients' weighted mean squared errors, [5, outputs]."""
    designs, targets = [], []
    for k, weight in enumerate(weights):
        x, y = client(k, outputs)
        root = np.sqrt(weight / len(y))
        designs.append(root * np.column_stack([x, np.ones(len(x))]))
        targets.append(root * y.reshape(len(y), -1))
    solution, *_ = np.linalg.lstsq(np.concatenate(designs), np.concatenate(targets), rcond=None)
    return np.asarray(solution, np.float64)


def losses(coefficients: NDArray[np.float64], outputs: int) -> NDArray[np.float64]:
    """Return the clients' mean squared errors."""
    errors = []
    for k in range(len(SIZES)):
        x, y = client(k, outputs)
        guess = np.column_stack([x, np.ones(len(x))]) @ coefficients
        errors.append(np.mean((guess - y.reshape(len(y), -1)) ** 2))
    return np.array(errors) / SCALE**2


@pytest.mark.parametrize("outputs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_fixed_point_of_fedavg_is_pooled_least_squares(outputs: int) -> None:
    found = trained(FedAvg(), outputs, 25 * outputs)
    np.testing.assert_allclose(found, least_squares(SIZES, outputs), atol=1e-4)
    clients = [client(k, outputs) for k in range(len(SIZES))]
    x = np.concatenate([x for x, _ in clients])
    y = np.concatenate([y.reshape(len(y), -1) for _, y in clients])
    pooled = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    np.testing.assert_allclose(found, pooled, atol=1e-4)


@pytest.mark.slow
def test_uniform_weights_count_clients_alike() -> None:
    np.testing.assert_allclose(trained(Uniform(), 1, 25), least_squares([1, 1, 1], 1), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("q", [1.0, 3.0])
@pytest.mark.parametrize("rule", ["qfedavg", "weights"])
def test_the_fixed_point_of_qffl_is_least_squares_with_weights_of_the_losses(
    q: float, rule: Any
) -> None:
    """The gradient of the sum of F_k^(q + 1) is 0 where that of the sum of w_k F_k is, w = F^q."""
    found = trained(QFFL(q=q, lr=SETTINGS.lr, rule=rule), 1, 30)
    weights = losses(found, 1) ** q
    np.testing.assert_allclose(found, least_squares(weights, 1), atol=1e-3)
    assert np.abs(found - least_squares([1, 1, 1], 1)).max() > 0.05
