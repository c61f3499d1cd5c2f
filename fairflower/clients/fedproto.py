"""FedProto (Tan et al., AAAI 2022), with averaged models."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from fairflower.arguments import Range, Search
from fairflower.exchanges.prototypes import Prototypes
from fairflower.training.features import PrototypeTrainer


class FedProto(PrototypeTrainer):
    """Local training that pulls each feature vector to the prototype of its class.

    Adds ``lambda * mean ||z - c_y||^2 / d`` to the cross entropy, with z the features of an image
    and c_y [d] the mean over all clients of the features of its class. The mean is over the batch,
    as in the original's released code (its Eq. 7 has class means for z). An image whose class has
    no prototype adds nothing.

    Models are averaged, too, as in the tables of FedHEAL and FedEquilibria; the original shares
    only prototypes.

    Parameters
    ----------
    lambda_
        Weight of the prototype loss. Default 1 (FedEquilibria, Table 5; the original's ``ld``).

    See Also
    --------
    FedProc : A contrastive loss with class prototypes.
    FedLSA : Class anchors learnt by the server.

    Examples
    --------
    >>> from fairflower.clients.fedproto import FedProto
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedProto(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> {name: array.shape for name, array in client.returns["prototypes"].items()}
    {'mean': (4, 6), 'count': (4,)}
    """

    paper = "Tan et al., AAAI 2022"
    exchanges = (Prototypes,)

    def __init__(
        self,
        *args: Any,
        lambda_: Annotated[float, Range(0), Search(0.01, 10, log=True)] = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.lambda_ = lambda_

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, logits = self.outputs(x)
        loss = self.criterion(logits, y)
        if self.prototypes is None:
            return loss
        distance = (z - self.prototypes[y]).square().mean(1)
        return loss + self.lambda_ * (distance * self.known[y]).mean()
