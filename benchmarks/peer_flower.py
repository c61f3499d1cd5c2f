"""A plain Flower app for `peers.py`, written as in Flower's PyTorch tutorial.

Uses Flower's own FedAvg and simulation engine, two clients at a time. The only argument is the
folder of the task (`peer_task.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_task import Task

TASK = Task.read(Path(sys.argv[1]))


def make_client_app() -> ClientApp:
    """Return the ClientApp of the tutorial, for the task."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        task = TASK
        model = task.build()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = task.client(int(context.node_config["partition-id"]))
        batches = DataLoader(TensorDataset(x, y), task.batch_size, shuffle=True)
        optimizer = torch.optim.SGD(
            model.parameters(), task.lr, task.momentum, weight_decay=task.weight_decay
        )
        model.train()
        for _ in range(task.local_epochs):
            for images, labels in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


class Timed(FedAvg):
    """Flower's FedAvg that records when each round begins."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.round_starts: list[float] = []

    def configure_train(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        self.round_starts.append(time.perf_counter())
        return super().configure_train(*arguments, **options)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train the task's rounds and write the seconds of all but the first."""
    strategy = Timed(fraction_evaluate=0.0)
    initial = ArrayRecord(TASK.build().state_dict())
    strategy.start(grid, initial, num_rounds=TASK.rounds + 1)
    TASK.write_rounds(
        [
            b - a
            for a, b in zip(
                strategy.round_starts[1:],
                [*strategy.round_starts[2:], time.perf_counter()],
                strict=True,
            )
        ]
    )


if __name__ == "__main__":
    run_simulation(
        server,
        make_client_app(),
        TASK.num_clients,
        backend_config={
            "init_args": {"num_cpus": 2},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
