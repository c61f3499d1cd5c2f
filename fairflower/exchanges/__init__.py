"""Shared state that travels beside the model: control variates, prototypes, ...

A method of local training may need more of the server than a model. An `Exchange` is
that need: what every train message carries, what comes back, and how it is merged.
Any strategy carries any exchange (``FedHEAL(exchanges=[ControlVariates()])``), so no
strategy knows a method of local training and no method knows a strategy.
"""

from __future__ import annotations

from fairflower.aggregation.exchange import Exchange
from fairflower.errors import renamed
from fairflower.exchanges.anchors import SemanticAnchors
from fairflower.exchanges.averages import AveragedBatches
from fairflower.exchanges.centers import ClusterCenters
from fairflower.exchanges.control import ControlVariates
from fairflower.exchanges.prototypes import Prototypes
from fairflower.exchanges.regularizer import DynamicRegularizer

__all__ = [
    "AveragedBatches",
    "ClusterCenters",
    "ControlVariates",
    "DynamicRegularizer",
    "Exchange",
    "Prototypes",
    "SemanticAnchors",
]


__getattr__ = renamed(__name__, Centres="ClusterCenters", DynamicRegulariser="DynamicRegularizer")
