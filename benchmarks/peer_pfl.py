"""The rounds of a task on pfl-research's simulator, for an environment with pfl installed.

Runs in one process, as pfl's tutorials do on a CPU, with FederatedAveraging weighted by images. The
only argument is the folder of the task (`peer_task.py`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from peer_task import Task
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Clock(TrainingProcessCallback):
    """Callback that records when each round ends."""

    def __init__(self) -> None:
        self.round_ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.round_ends.append(time.perf_counter())
        return False, Metrics()


class Net(nn.Module):
    """The benchmark's network with the methods that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
        return {}


def main(task: Task) -> None:
    """Train the task's rounds and write the seconds of all but the first."""
    torch.set_num_threads(1)
    users = list(range(task.num_clients))

    def make_dataset(user: int) -> Dataset:
        x, y = task.client(user)
        order = torch.randperm(len(y))
        return Dataset(raw_data=[x[order], y[order]], user_id=str(user))

    data = FederatedDataset(make_dataset, get_user_sampler("minimize_reuse", users))
    net = Net(task.build())
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(
            parameters, lr, task.momentum, weight_decay=task.weight_decay
        ),
        torch.optim.SGD(net.parameters(), 1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task.rounds + 1,
            evaluation_frequency=10**6,
            train_cohort_size=task.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task.local_epochs,
            local_learning_rate=task.lr,
            local_batch_size=task.batch_size,
        ),
        model_eval_params=None,
        callbacks=[clock],
    )
    task.write_rounds([b - a for a, b in zip(clock.round_ends, clock.round_ends[1:], strict=False)])


if __name__ == "__main__":
    main(Task.read(Path(sys.argv[1])))
