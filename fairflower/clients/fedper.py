"""FedPer (Arivazhagan et al., 2019)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fairflower.models.heads import head_arrays
from fairflower.training.local_arrays import LocalArraysTrainer


class FedPer(LocalArraysTrainer):
    """Plain local training, with a head that stays with the client.

    Client k trains body and head together in every round. It sends the body, which the strategy
    merges, and keeps its head, which begins with the network's initial values. The head is the
    layer ``model.head``; the paper also keeps the last blocks of a ResNet.

    The server tests with the initial head, so the global model is no better than chance. ``test``
    also reports ``personal_accuracy``, with the client's own head on its test examples. It runs
    with ``evaluate.by = "clients"`` or ``"both"``. ``ConfigError`` for a network without a layer
    ``head``, or without anything else.

    See Also
    --------
    FedRep : Trains the head first, then the body.
    LGFedAvg : The reverse, a local body under a global head.

    Examples
    --------
    >>> from fairflower.clients.fedper import FedPer
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedPer(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> sorted(client.state["local"])
    ['head.bias', 'head.weight']
    """

    paper = "Arivazhagan et al., 2019"
    local_part: ClassVar[str] = "the head"

    @classmethod
    def local_arrays(cls, model: nn.Module) -> list[str]:
        """Return the names of the head's arrays."""
        return head_arrays(model)
