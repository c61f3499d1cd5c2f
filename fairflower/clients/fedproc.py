"""FedProc (Mu et al., Future Generation Computer Systems 2023)."""

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range
from fairflower.exchanges.stored import Prototypes
from fairflower.training.features import PrototypeTrainer


class FedProc(PrototypeTrainer):
    """Local training that moves from a prototype loss to the cross entropy over the rounds.

    Let z [d] be the features of an image, and c_j the prototypes scaled to unit norm. After t of
    T rounds, the loss is::

        L = a L_proc + (1 - a) L_CE,    a = 1 - t/T
        L_proc = mean -log( e^<z, c_y> / sum_j e^<z, c_j> )

    Features are not scaled, and there is no temperature, as in the authors' code. L_proc ignores
    classes without a prototype. In round 1 no class has a prototype, and the loss is L_CE.

    Parameters
    ----------
    rounds
        T. 0, the default, means the run's number of rounds or, if it is unknown, 100 (as in the
        authors' code).

    See Also
    --------
    FedProto : A quadratic loss with class prototypes.
    MOON : A contrastive loss between models.

    Notes
    -----
    In the code of FedHEAL's group, a = 1 in round 1 as well, so that nothing is trained in it.

    Examples
    --------
    >>> from fairflower.clients.fedproc import FedProc
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedProc(tiny_model(), data(), SETTINGS, client_id=0, seed=0, rounds=10)
    >>> for server_round in (1, 6):
    ...     _ = client.train(server_round)
    ...     print(client.a, sorted(client.returns))
    1.0 ['prototypes']
    0.5 ['prototypes']
    """

    paper = "Mu et al., FGCS 2023"
    exchanges = (Prototypes,)

    def __init__(self, *args: Any, rounds: Annotated[int, Range(0)] = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rounds = rounds

    def begin(self, server_round: int) -> None:
        super().begin(server_round)
        done = (server_round - 1) / (self.rounds or self.num_rounds or 100)
        self.a = max(0.0, 1 - done)
        if self.prototypes is not None:
            self.directions = F.normalize(self.prototypes)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, logits = self.outputs(x)
        if self.prototypes is None:
            return self.criterion(logits, y)
        similarity = (z @ self.directions.T.to(z.dtype)).masked_fill(~self.known, float("-inf"))
        labels = torch.where(self.known[y], y, -100)  # cross_entropy ignores -100
        contrast = F.cross_entropy(similarity, labels, reduction="sum")
        return self.a * contrast / len(y) + (1 - self.a) * self.criterion(logits, y)
