"""The network, the data and the training loop; nothing here knows of fairflower."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Sequential):
    """A small network for images of 8x8 pixels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, Tensor, Tensor]:
    """Return a client's batches for training, and its images and labels for testing."""
    images, labels = load_digits(return_X_y=True)
    images = images[partition_id::num_partitions].reshape(-1, 8, 8) / 16
    if partition_id % 4 == 3:  # these clients have their digits upside down
        images = images[:, ::-1]
    x = torch.tensor(np.ascontiguousarray(images), dtype=torch.float32)
    y = torch.tensor(labels[partition_id::num_partitions])
    test = len(y) // 5
    batches = DataLoader(TensorDataset(x[test:], y[test:]), batch_size=16)
    return batches, x[:test], y[:test]


def train(net: Net, batches: DataLoader, lr: float) -> float:
    """Train for one epoch, and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def accuracy(net: Net, x: Tensor, y: Tensor) -> float:
    """Return the share of images that the network classifies correctly."""
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()
