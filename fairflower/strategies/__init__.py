"""Aggregation rules: how the server merges what came back. One file per paper.

Every rule is a ``flwr.serverapp.strategy.FedAvg`` with that class's keyword
arguments and its paper's own, and works in any Flower app without the rest of
fairflower. Importing this package does not import torch.
"""

from fairflower.strategies.base import FairStrategy, RoundFailed
from fairflower.strategies.cohort import Cohort
from fairflower.strategies.exchange import EXCHANGES, ControlVariates, Exchange, build_exchange
from fairflower.strategies.fedavg import FedAvg, Uniform
from fairflower.strategies.fedequilibria import FedEquilibria
from fairflower.strategies.fedfv import FedFV
from fairflower.strategies.fedgcr import FedGCR
from fairflower.strategies.fedheal import FedHEAL
from fairflower.strategies.fedmgda import FedMGDAPlus
from fairflower.strategies.qp import MinNorm, min_norm_weights

#: The names that a run config knows.
STRATEGIES: dict[str, type[FairStrategy]] = {
    "fedavg": FedAvg,
    "uniform": Uniform,
    "fedheal": FedHEAL,
    "fedequilibria": FedEquilibria,
    "fedmgda+": FedMGDAPlus,
    "fedfv": FedFV,
    "fedgcr": FedGCR,
}

__all__ = [
    "EXCHANGES",
    "STRATEGIES",
    "Cohort",
    "ControlVariates",
    "Exchange",
    "FairStrategy",
    "FedAvg",
    "FedEquilibria",
    "FedFV",
    "FedGCR",
    "FedHEAL",
    "FedMGDAPlus",
    "MinNorm",
    "RoundFailed",
    "Uniform",
    "build_exchange",
    "min_norm_weights",
]
