"""FedDyn (Acar et al., ICLR 2021)."""

from __future__ import annotations

from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.exchanges.regulariser import DynamicRegulariser
from fairflower.training.trainer import Trainer


class FedDyn(Trainer):
    """Local training whose objective changes until local and global optima agree.

    Minimises, theta_t being the received model (their Eq. 1)::

        L_k(theta) - <g_k, theta> + alpha/2 ||theta - theta_t||^2
        g_k <- g_k - alpha (theta_k - theta_t)                       afterwards, from 0

    The client keeps g_k as s_k = -g_k / alpha, the sum of all its updates, so each
    gradient gets ``alpha (s_k + theta - theta_t)``; the server corrects the merged
    model by its own sum of updates (``DynamicRegulariser``). Where it converges,
    g_k is the gradient of L_k, weight decay included, at the common model.
    ``train_loss`` is of L_k alone. Buffers are averaged and not regularised. (A penalty
    written on the global model's parameters, as in code around FedHEAL, has no gradient
    here: that is FedAvg.)

    Parameters
    ----------
    alpha
        Default 0.01 (the original's for most experiments).
    """

    paper = "Acar et al., ICLR 2021"
    exchanges = (DynamicRegulariser,)

    def __init__(
        self,
        *args: Any,
        alpha: Annotated[float, Range(1e-12), Search(0.001, 0.1, log=True)] = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.alpha = alpha

    def begin(self, server_round: int) -> None:
        self.received = self.copy_trainable()
        self.s = self.from_named(self.state.get("updates", {}))

    def adjust_gradients(self) -> None:
        """Add ``alpha (s_k + theta - theta_t)``."""
        moved = zip(self.drift(self.received), self.s, strict=True)
        self.add_to_gradients((drift + s for drift, s in moved), self.alpha)

    def end(self, server_round: int) -> None:
        now = zip(self.s, self.trainable, self.received, strict=True)
        self.state["updates"] = self.to_named([s + p.detach() - w for s, p, w in now])
