"""FedProto (Tan et al., AAAI 2022), with averaged models."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from fairflower.arguments import Range, Search
from fairflower.exchanges.prototypes import Prototypes
from fairflower.training.features import PrototypeTrainer


class FedProto(PrototypeTrainer):
    """Local training that draws every feature vector to its class's prototype.

    Adds ``lambda * mean ||z - c_y||^2 / d`` to the cross entropy: z the features of an
    image, c_y [d] the mean over all clients of the features of its class, and the mean
    over the batch, as the original's released code does (its Eq. 7 takes class means
    for z). An image whose class has no prototype yet adds nothing.

    Models are averaged, too, as in the tables of FedHEAL and FedEquilibria; the
    original shares prototypes alone.

    Parameters
    ----------
    lambda_
        Default 1 (FedEquilibria, Table 5; the original's ``ld``).
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
