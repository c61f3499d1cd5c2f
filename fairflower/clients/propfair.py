"""PropFair (Zhang, Malekmohammadi, Chen, Yu, TMLR 2023)."""

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer


class PropFair(Trainer):
    """Local training for proportional fairness: it maximizes the product of the clients' gains.

    The client minimizes ``-log(1 - l / M)``, where l is the mean loss of a batch. Above
    ``l = M - epsilon``, the objective is linear: it continues along its tangent, so that any loss
    is allowed. The gradient is that of the loss times ``1 / (M - l)``, or at most
    ``1 / epsilon``. ``train_loss`` is this objective. In the paper, the strategy is ``fedavg``.

    Parameters
    ----------
    M
        Loss at which a client's gain is 0. Default 5 or the task's, as for the strategy
        ``propfair``.
    epsilon
        Lower bound on M - l in the gradient. Default 0.2 (the authors' code).
    variant
        With ``"released"``, the objective for l above ``M - epsilon`` is ``l / M``, as in the
        authors' code without its option ``huber``. The objective and its slope drop at that point.

    See Also
    --------
    fairflower.strategies.propfair.PropFair : The same objective on the server.

    Notes
    -----
    Only the paper's abstract was available; the objective and the tangent ("Huber") are from the
    authors' code.

    Examples
    --------
    >>> from fairflower.clients.propfair import PropFair
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = PropFair(tiny_model(), data(), SETTINGS, client_id=0, seed=0, M=5.0)
    >>> round(client.train(server_round=1)["train_loss"], 2)
    0.42
    """

    paper = "Zhang et al., TMLR 2023"
    task_defaults: ClassVar = {"M": "loss_range"}

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
