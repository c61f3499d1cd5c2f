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

from fairflower.aggregation.cohort import Cohort as Cohort
from fairflower.aggregation.strategy import FairStrategy as FairStrategy
from fairflower.errors import RoundFailed as RoundFailed
from fairflower.numerics.min_norm import MinNorm as MinNorm
from fairflower.numerics.min_norm import min_norm_weights as min_norm_weights
from fairflower.registry import STRATEGIES as STRATEGIES
from fairflower.registry.measurements import measurement as measurement
from fairflower.strategies.aaggff import AAggFF as AAggFF
from fairflower.strategies.adafed import AdaFed as AdaFed
from fairflower.strategies.afl import AFL as AFL
from fairflower.strategies.daa import DaA as DaA
from fairflower.strategies.dqffl import DqFFL as DqFFL
from fairflower.strategies.eagle import EAGLE as EAGLE
from fairflower.strategies.fairfed import FairFed as FairFed
from fairflower.strategies.fairrfl import FairRFL as FairRFL
from fairflower.strategies.fedavg import FedAvg as FedAvg
from fairflower.strategies.fedavg import Uniform as Uniform
from fairflower.strategies.fedawa import FedAWA as FedAWA
from fairflower.strategies.fedaware import FedAWARE as FedAWARE
from fairflower.strategies.fedce import FedCE as FedCE
from fairflower.strategies.fedeba import FedEBAPlus as FedEBAPlus
from fairflower.strategies.fedequilibria import FedEquilibria as FedEquilibria
from fairflower.strategies.fedfv import FedFV as FedFV
from fairflower.strategies.fedga import FedGA as FedGA
from fairflower.strategies.fedgcr import FedGCR as FedGCR
from fairflower.strategies.fedheal import FedHEAL as FedHEAL
from fairflower.strategies.fedism import FedISM as FedISM
from fairflower.strategies.fedismplus import FedISMPlus as FedISMPlus
from fairflower.strategies.fedlf import FedLF as FedLF
from fairflower.strategies.fedmdfg import FedMDFG as FedMDFG
from fairflower.strategies.fedmgda import FedMGDAPlus as FedMGDAPlus
from fairflower.strategies.fednova import FedNova as FedNova
from fairflower.strategies.fedomg import FedOMG as FedOMG
from fairflower.strategies.fedpw import FedPW as FedPW
from fairflower.strategies.krum import Bulyan as Bulyan
from fairflower.strategies.krum import Krum as Krum
from fairflower.strategies.krum import MultiKrum as MultiKrum
from fairflower.strategies.median import GeometricMedian as GeometricMedian
from fairflower.strategies.median import Median as Median
from fairflower.strategies.median import TrimmedMean as TrimmedMean
from fairflower.strategies.pa3fed import PA3Fed as PA3Fed
from fairflower.strategies.propfair import PropFair as PropFair
from fairflower.strategies.qffl import QFFL as QFFL
from fairflower.strategies.references import Alone as Alone
from fairflower.strategies.references import Pooled as Pooled
from fairflower.strategies.superquantile import Superquantile as Superquantile
from fairflower.strategies.term import TERM as TERM
