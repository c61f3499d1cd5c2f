"""The server: fairflower's strategy in the place of Flower's FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

from fairflower.strategies import FedHEAL
from one_strategy.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the rounds of the run config."""
    strategy = FedHEAL(min_available_nodes=8, evaluate_metrics_aggr_fn=mean_and_worst)
    rounds = int(context.run_config["num-server-rounds"])
    strategy.start(grid, ArrayRecord(Net().state_dict()), num_rounds=rounds)


def mean_and_worst(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the mean and the lowest accuracy of clients."""
    found = [float(reply["metrics"]["accuracy"]) for reply in replies]
    return MetricRecord({"mean-accuracy": sum(found) / len(found), "worst-accuracy": min(found)})
