"""FedProx (Li et al., MLSys 2020)."""

from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer


class FedProx(Trainer):
    """Local training with a penalty on the distance from the global model.

    The client minimizes ``F_k(w) + mu/2 ||w - w_t||^2`` (Eq. 2), where w_t is the received model.
    The penalty's gradient ``mu (w - w_t)`` is added to the loss's gradient, so ``train_loss`` is
    F_k alone. Buffers have no penalty.

    Parameters
    ----------
    mu
        Weight of the penalty. Default 1 (FedEquilibria, Table 5; the paper tries 0.001 to 1). The
        code of FedHEAL's group also multiplies mu by 0.01: its mu = 0.01 is 1e-4 here.

    See Also
    --------
    FedDyn : A penalty whose optimum is that of the global objective.
    Ditto : The same penalty on a personal model.

    Examples
    --------
    >>> from fairflower.clients.fedprox import FedProx
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> for mu in (0.0, 5.0):
    ...     client = FedProx(tiny_model(), data(), SETTINGS, client_id=0, seed=0, mu=mu)
    ...     before = client.copy_trainable()
    ...     _ = client.train(server_round=1)
    ...     print(mu, round(sum(d.square().sum().item() for d in client.drift(before)), 3))
    0.0 0.146
    5.0 0.122
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
