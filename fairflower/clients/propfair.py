"""PropFair (Zhang, Malekmohammadi, Chen, Yu, TMLR 2023)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer


class PropFair(Trainer):
    """Local training for proportional fairness, the largest product of the clients' gains.

    Minimises ``-log(1 - l / M)``, where ``l`` is a batch's mean cross entropy, and from
    ``l = M - epsilon`` on the tangent, so that no loss is too large. To be averaged by
    samples, which is the strategy ``fedavg``. The gradient is ``1 / (M - l)`` times the
    cross entropy's, at most ``1 / epsilon`` times; ``train_loss`` is of this objective.

    Of the paper's text the abstract was at hand; the objective and the tangent ("Huber") are
    in the authors' code.

    Parameters
    ----------
    M
        The loss at which a client has nothing. Default 5, as of the strategy ``propfair``.
    epsilon
        Default 0.2 (the authors' code).
    variant
        ``"released"``: beyond ``M - epsilon`` the loss is ``l / M``, which is what the authors'
        code does unless it is told ``huber``. It falls there, and so does its slope.
    """

    paper = "Zhang et al., TMLR 2023"

    def __init__(
        self,
        *args: Any,
        M: Annotated[float, Range(above=0), Search(1, 10, log=True)] = 5.0,
        epsilon: Annotated[float, Range(above=0), Search(0.05, 0.5, log=True)] = 0.2,
        variant: Literal["paper", "released"] = "paper",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.M, self.epsilon, self.variant = M, epsilon, variant

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        entropy = super().loss(x, y)
        room = self.M - entropy
        gain = -torch.log(room.clamp(min=self.epsilon) / self.M)
        if self.variant == "released":
            return torch.where(room < self.epsilon, entropy / self.M, gain)
        return gain + (self.epsilon - room).clamp(min=0) / self.epsilon
