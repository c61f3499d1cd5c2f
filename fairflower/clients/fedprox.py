"""FedProx (Li et al., MLSys 2020)."""

from __future__ import annotations

from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer


class FedProx(Trainer):
    """Local training that is held near the global model.

    Minimises ``F_k(w) + mu/2 ||w - w_t||^2`` (their Eq. 2), w_t being the received
    model. The penalty's gradient ``mu (w - w_t)`` is added to the loss's, so
    ``train_loss`` is of F_k alone. Buffers are not held.

    Parameters
    ----------
    mu
        Default 1 (FedEquilibria, Table 5; the original tries 0.001 to 1). Code around
        FedHEAL has a stray factor of 0.01 here, which makes its 0.01 a 1e-4.
    """

    paper = "Li et al., MLSys 2020"

    def __init__(
        self,
        *args: Any,
        mu: Annotated[float, Range(0), Search(0.001, 1, log=True)] = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.mu = mu

    def begin(self, server_round: int) -> None:
        self.received = self.copy_trainable()

    def adjust_gradients(self) -> None:
        """Add ``mu (w - w_t)``."""
        self.add_to_gradients(self.drift(self.received), self.mu)
