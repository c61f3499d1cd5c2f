"""Exchanges: state that server and clients share in addition to the model.

An `Exchange` defines the arrays in train messages, the arrays that clients return, and how the
server merges them. It works with every strategy, as in ``FedHEAL(exchanges=[ControlVariates()])``,
so that strategies and clients do not depend on each other.
"""

from fairflower.aggregation.exchange import Exchange as Exchange
from fairflower.exchanges.anchors import SemanticAnchors as SemanticAnchors
from fairflower.exchanges.centers import ClusterCenters as ClusterCenters
from fairflower.exchanges.server_optimizer import ServerOptimizer as ServerOptimizer
from fairflower.exchanges.stored import AveragedBatches as AveragedBatches
from fairflower.exchanges.stored import ClusterPrototypes as ClusterPrototypes
from fairflower.exchanges.stored import ControlVariates as ControlVariates
from fairflower.exchanges.stored import DynamicRegularizer as DynamicRegularizer
from fairflower.exchanges.stored import ImageStatistics as ImageStatistics
from fairflower.exchanges.stored import PersonalArrays as PersonalArrays
from fairflower.exchanges.stored import Prototypes as Prototypes
