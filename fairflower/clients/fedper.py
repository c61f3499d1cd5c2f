"""FedPer (Arivazhagan et al., 2019)."""

from typing import ClassVar

from torch import nn

from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.models import head_and_body


class FedPer(LocalArraysTrainer):
    """Plain local training, with a head that stays with the client.

    Client k trains body and head together in every round. It sends the body, which the strategy
    merges, and keeps its head, which starts with the network's initial values. The head is the
    layer ``model.head``; in the paper the last blocks of a ResNet also stay with the client.

    The server tests with the initial head, so the global model is no better than chance. ``test``
    also reports ``personal_accuracy``, the accuracy with the client's own head on its test
    examples. Clients are tested if ``evaluate.by`` is ``"clients"`` or ``"both"``. ``ConfigError``
    is raised if the network has no layer named ``head``, or no other layer.

    Parameters
    ----------
    keep
        Where the client's head is kept between rounds: ``"client"`` (default) or ``"server"``; see
        `LocalArraysTrainer`.

    See Also
    --------
    FedRep : Trains the head first, then the body.
    LGFedAvg : The reverse, a local body with a global head.

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
    needed = "head"
    local_part: ClassVar[str] = "the head"

    @classmethod
    def local_arrays(cls, model: nn.Module) -> list[str]:
        """Return the names of the head's arrays."""
        return head_and_body(model)[0]
