"""LG-FedAvg (Liang et al., 2020)."""

from typing import ClassVar

from torch import nn

from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.models import head_and_body


class LGFedAvg(LocalArraysTrainer):
    """Plain local training, with a body that stays with the client and a global head.

    Client k trains body and head together in every round. It sends the layer ``model.head``, which
    the strategy merges. All other layers, the body, stay with the client and start with the
    network's initial values. Messages are as small as the head.

    The server tests with the initial body, so the global model is no better than chance. ``test``
    also reports ``personal_accuracy``, the accuracy with the client's own body on its test
    examples. Clients are tested if ``evaluate.by`` is ``"clients"`` or ``"both"``. ``ConfigError``
    is raised if the network has no layer named ``head``, or no other layer.

    Parameters
    ----------
    keep
        Where the client's body is kept between rounds: ``"client"`` (default) or ``"server"``; see
        `LocalArraysTrainer`.

    See Also
    --------
    FedPer : The reverse, a local head on a global body.

    Notes
    -----
    The authors' experiments start from a model that FedAvg has trained; here all clients start from
    the initial network. The paper's auxiliary losses on local representations are not included.

    Examples
    --------
    >>> from fairflower.clients.lgfedavg import LGFedAvg
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = LGFedAvg(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> sorted(client.send())
    ['head.bias', 'head.weight']
    """

    paper = "Liang et al., 2020"
    needed = "head"
    local_part: ClassVar[str] = "the body"

    @classmethod
    def local_arrays(cls, model: nn.Module) -> list[str]:
        """Return the names of all arrays except those of the head."""
        return head_and_body(model)[1]
