"""FedProto (Tan et al., AAAI 2022), with averaged models."""

from typing import Annotated, Any

from torch import Tensor

from fairflower.arguments import Range, Search
from fairflower.exchanges.stored import Prototypes
from fairflower.training.features import PrototypeTrainer


class FedProto(PrototypeTrainer):
    """Local training that pulls each feature vector towards the prototype of its class.

    The loss is the cross entropy plus ``lambda * mean ||z - c_y||^2 / d``, where z are the features
    of an image and c_y [d] is the prototype of its class, the mean feature vector over all clients.
    The mean in the loss is over the batch, as in the released code (in the paper's Eq. 7, z are
    class means). An image whose class has no prototype adds nothing.

    Models are averaged as well, as in the tables of FedHEAL and FedEquilibria; in the paper, only
    prototypes are shared.

    Parameters
    ----------
    lambda_
        Weight of the prototype loss. Default 1 (FedEquilibria, Table 5; ``ld`` in the paper's
        code).

    See Also
    --------
    FedProc : A contrastive loss with class prototypes.
    FedLSA : Class anchors that the server learns.

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

    def terms(self, z: Tensor, y: Tensor, prototypes: Tensor) -> tuple[Tensor]:
        distance = (z - prototypes[y]).square().mean(1)
        return (self.lambda_ * (distance * self.known[y]).mean(),)
