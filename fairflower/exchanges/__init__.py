"""Exchanges: state that server and clients share in addition to the model.

An `Exchange` defines the arrays in train messages, the arrays that clients return, and how the
server merges them. It works with every strategy, as in ``FedHEAL(exchanges=[ControlVariates()])``,
so that strategies and clients do not depend on each other.
"""

from __future__ import annotations

from fairflower.aggregation.exchange import Exchange
from fairflower.exchanges.anchors import SemanticAnchors
from fairflower.exchanges.centers import ClusterCenters
from fairflower.exchanges.stored import (
    AveragedBatches,
    ControlVariates,
    DynamicRegularizer,
    PersonalArrays,
    Prototypes,
)

__all__ = [
    "AveragedBatches",
    "ClusterCenters",
    "ControlVariates",
    "DynamicRegularizer",
    "Exchange",
    "PersonalArrays",
    "Prototypes",
    "SemanticAnchors",
]
