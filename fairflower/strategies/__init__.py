"""Strategies: how the server merges the clients' models. Each file implements one paper.

Every strategy is a subclass of ``flwr.serverapp.strategy.FedAvg``. It accepts the keyword arguments
of that class and the hyper-parameters of its paper, and works in any Flower app. Importing this
package does not import torch.

Examples
--------
A strategy in the ServerApp of a Flower app:

>>> from flwr.serverapp import ServerApp
>>> from fairflower.strategies import AFL
>>> app = ServerApp()
>>> @app.main()
... def main(grid, context):
...     strategy = AFL(lr=0.1, fraction_train=0.5, min_available_nodes=4)
...     strategy.start(grid, initial_arrays, num_rounds=30)
"""

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.strategy import FairStrategy
from fairflower.errors import RoundFailed
from fairflower.numerics.min_norm import MinNorm, min_norm_weights
from fairflower.registry import STRATEGIES
from fairflower.registry.measurements import measurement
from fairflower.strategies.aaggff import AAggFF
from fairflower.strategies.adafed import AdaFed
from fairflower.strategies.afl import AFL
from fairflower.strategies.daa import DaA
from fairflower.strategies.dqffl import DqFFL
from fairflower.strategies.eagle import EAGLE
from fairflower.strategies.fairfed import FairFed
from fairflower.strategies.fairrfl import FairRFL
from fairflower.strategies.fedavg import FedAvg, Uniform
from fairflower.strategies.fedce import FedCE
from fairflower.strategies.fedeba import FedEBAPlus
from fairflower.strategies.fedequilibria import FedEquilibria
from fairflower.strategies.fedfv import FedFV
from fairflower.strategies.fedga import FedGA
from fairflower.strategies.fedgcr import FedGCR
from fairflower.strategies.fedheal import FedHEAL
from fairflower.strategies.fedism import FedISM
from fairflower.strategies.fedismplus import FedISMPlus
from fairflower.strategies.fedlf import FedLF
from fairflower.strategies.fedmdfg import FedMDFG
from fairflower.strategies.fedmgda import FedMGDAPlus
from fairflower.strategies.fednova import FedNova
from fairflower.strategies.fedpw import FedPW
from fairflower.strategies.pa3fed import PA3Fed
from fairflower.strategies.propfair import PropFair
from fairflower.strategies.qffl import QFFL
from fairflower.strategies.superquantile import Superquantile
from fairflower.strategies.term import TERM

__all__ = [
    "AFL",
    "EAGLE",
    "QFFL",
    "STRATEGIES",
    "TERM",
    "AAggFF",
    "AdaFed",
    "Cohort",
    "DaA",
    "DqFFL",
    "FairFed",
    "FairRFL",
    "FairStrategy",
    "FedAvg",
    "FedCE",
    "FedEBAPlus",
    "FedEquilibria",
    "FedFV",
    "FedGA",
    "FedGCR",
    "FedHEAL",
    "FedISM",
    "FedISMPlus",
    "FedLF",
    "FedMDFG",
    "FedMGDAPlus",
    "FedNova",
    "FedPW",
    "MinNorm",
    "PA3Fed",
    "PropFair",
    "RoundFailed",
    "Superquantile",
    "Uniform",
    "measurement",
    "min_norm_weights",
]
