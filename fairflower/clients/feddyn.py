"""FedDyn (Acar et al., ICLR 2021)."""

from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.exchanges.stored import DynamicRegularizer
from fairflower.training.trainer import Trainer


class FedDyn(Trainer):
    """Local training with a dynamic regularizer that makes local and global optima agree.

    Let theta_t be the received model. The client minimizes (Eq. 1)::

        L_k(theta) - <g_k, theta> + alpha/2 ||theta - theta_t||^2
        g_k <- g_k - alpha (theta_k - theta_t)      after the round; g_k = 0 initially

    The client stores s_k = -g_k / alpha, the sum of all its updates, and adds
    ``alpha (s_k + theta - theta_t)`` to each gradient. The server corrects the merged model with a
    sum of updates as well (``DynamicRegularizer``). At convergence, g_k is the gradient of L_k,
    including weight decay, at the common model. ``train_loss`` is L_k alone. Buffers are averaged
    and not regularized.

    Parameters
    ----------
    alpha
        Weight of the regularizer. Default 0.01 (the paper's value in most experiments).

    See Also
    --------
    SCAFFOLD : Corrects local gradients with control variates.
    FedProx : Only the quadratic penalty.

    Notes
    -----
    The code of FedHEAL's group applies the penalty to the global model's parameters. The penalty
    then has no gradient with respect to the local model, and the method is equivalent to FedAvg.

    Examples
    --------
    >>> from fairflower.clients.feddyn import FedDyn
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedDyn(tiny_model(), data(), SETTINGS, client_id=0, seed=0, alpha=0.1)
    >>> before = client.send()
    >>> _ = client.train(server_round=1)
    >>> update = client.send()["head.bias"] - before["head.bias"]
    >>> bool((client.state["updates"]["head.bias"] == update).all())
    True
    """

    paper = "Acar et al., ICLR 2021"
    exchanges = (DynamicRegularizer,)

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
