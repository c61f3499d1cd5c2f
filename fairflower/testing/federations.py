"""Toy federations for tests: real messages, strategies and trainers, in a few milliseconds."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.arrays import arrays_of, record_of
from fairflower.clients import ClientData, Trainer, make_client_app
from fairflower.config import TrainConfig
from fairflower.data import Augment, Split
from fairflower.engines.inline import InlineGrid
from fairflower.models import Classifier
from fairflower.strategies import FairStrategy
from fairflower.testing.failures import Arrays

#: Training settings: one epoch of two steps.
SETTINGS = TrainConfig(local_epochs=1, batch_size=8, lr=0.05, momentum=0.9, weight_decay=1e-3)
CLASSES = 4


class TinyModel(Classifier):
    """A linear layer with batch norm and a head, for 8x8 gray images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        """Compute features [N, 6] of images [N, 1, 8, 8]."""
        return F.relu(self.norm(self.layer(x.flatten(1))))


def tiny_model(seed: int = 0) -> TinyModel:
    """Make a `TinyModel` whose weights depend only on the seed."""
    return copy.deepcopy(_tiny_model(seed))  # threads would draw the weights from one generator


@functools.cache
def _tiny_model(seed: int) -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return TinyModel()


def images(n: int, seed: int, classes: int = CLASSES) -> Split:
    """Draw ``n`` 8x8 gray images; their brightness depends on their class."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    x = rng.integers(0, 128, (n, 1, 8, 8)) + 32 * y[:, None, None, None]
    return Split(x.astype(np.uint8), y)


def data(client: int = 0, train: int = 12, classes: int = CLASSES) -> ClientData:
    """Make a client's images from the first ``classes`` classes."""
    splits = images(train, 10 + client, classes), images(9, 50 + client, classes)
    return ClientData(*splits, (0.5,), (0.5,), CLASSES, Augment(1, True))


def run_toy_rounds(
    strategy: FairStrategy,
    make: Callable[[int], Trainer],
    clients: int,
    rounds: int,
    start: Arrays | None = None,
    reverse: bool = False,
) -> tuple[dict[str, NDArray[Any]], InlineGrid]:
    """Run training rounds; return the last model and the grid with the clients' contexts.

    ``make`` creates the trainer of a client for every message. With ``reverse`` the clients train
    in reverse order.
    """

    def trainer_fn(context: Context, config: Mapping[str, Any]) -> Trainer:
        return make(int(context.node_config["partition-id"]))

    grid = InlineGrid(make_client_app(trainer_fn), clients, raise_errors=True)
    strategy.enroll(dict(enumerate(grid.get_node_ids())), seed=0)
    arrays = dict(start) if start is not None else make(0).send()
    for number in range(1, rounds + 1):
        config = ConfigRecord(
            {"run-id": "toy", "train.lr": SETTINGS.lr, "train.momentum": SETTINGS.momentum}
        )
        messages = list(strategy.configure_train(number, record_of(arrays), config, grid))
        replies = grid.send_and_receive(messages[::-1] if reverse else messages)
        merged, _ = strategy.aggregate_train(number, replies)
        assert merged is not None
        arrays = arrays_of(merged)
    return arrays, grid


def models_equal(a: Arrays, b: Arrays) -> bool:
    """Return whether two models are equal, bit for bit."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]) for name in a
    )
