"""FedProc (Mu et al., Future Generation Computer Systems 2023)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range
from fairflower.exchanges.prototypes import Prototypes
from fairflower.training.features import PrototypeTrainer


class FedProc(PrototypeTrainer):
    """Local training that moves from prototypes to labels over the rounds.

    With z [d] the features of an image, c_j the prototypes scaled to length one, and
    t the rounds done of T::

        L = a L_proc + (1 - a) L_CE,    a = 1 - t/T
        L_proc = mean -log( e^<z, c_y> / sum_j e^<z, c_j> )

    Features are not scaled and there is no temperature, as in the authors' released
    code. Classes without prototype are left out of L_proc; in round 1, where nobody has
    one, the loss is L_CE, as theirs. (Code around FedHEAL keeps a = 1 there and trains
    nothing.)

    Parameters
    ----------
    rounds
        T. Default 0: the run's number of rounds, or where that is not known 100 (the
        authors' code).
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
        likeness = (z @ self.directions.T).masked_fill(~self.known, float("-inf"))
        labels = torch.where(self.known[y], y, -100)  # which cross_entropy ignores
        contrast = F.cross_entropy(likeness, labels, reduction="sum")
        return self.a * contrast / len(y) + (1 - self.a) * self.criterion(logits, y)
