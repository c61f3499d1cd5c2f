"""Aggregation rules: how the server merges what came back. One file per paper.

Every rule is a ``flwr.serverapp.strategy.FedAvg`` with that class's keyword
arguments and its paper's own, and works in any Flower app without the rest of
fairflower. Importing this package does not import torch.
"""

from fairflower.strategies.base import FairStrategy, RoundFailed
from fairflower.strategies.cohort import Cohort
from fairflower.strategies.fedavg import FedAvg, Uniform
from fairflower.strategies.fedheal import FedHEAL

#: The names that a run config knows.
STRATEGIES: dict[str, type[FairStrategy]] = {
    "fedavg": FedAvg,
    "uniform": Uniform,
    "fedheal": FedHEAL,
}

__all__ = ["STRATEGIES", "Cohort", "FairStrategy", "FedAvg", "FedHEAL", "RoundFailed", "Uniform"]
