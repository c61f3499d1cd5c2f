"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from typing import Any

from fairflower.exchanges.stored import ControlVariates
from fairflower.training.trainer import Trainer


class SCAFFOLD(Trainer):
    """Local training corrected by control variates, which estimate the clients' gradients.

    Steps are ``w <- w - lr (g - c_k + c)`` (Eq. 3). After S steps from w_t, option II of Eq. 4
    gives ``c_k+ = c_k - c + (w_t - w) / (S lr)``. The client keeps c_k, initially zero; the server
    sends c with the model and receives ``c_k+ - c_k`` (``ControlVariates``).

    Momentum and weight decay are applied to the corrected gradient, so c_k estimates the gradient
    including weight decay. With momentum, S lr is replaced by the distance that S steps cover if
    the gradient is always 1; the estimate is then still a weighted mean of gradients.

    With strategies that weigh clients, see the remark on weights in ``ControlVariates``.

    Raises ``ConfigError`` if ``train.optimizer`` is not ``sgd``, because other optimizers' steps
    are not sums of gradients.

    See Also
    --------
    FedDyn : A dynamic regularizer with the same purpose.

    Examples
    --------
    >>> from fairflower.clients.scaffold import SCAFFOLD
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = SCAFFOLD(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> sorted(client.state), client.returns["control"]["head.bias"].shape
    (['control'], (4,))
    """

    paper = "Karimireddy et al., ICML 2020"
    exchanges = (ControlVariates,)
    optimizer = "sgd"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.check_steps(self.settings)

    def begin(self, server_round: int) -> None:
        self.received = self.copy_trainable()
        self.c = self.from_named(self.shared.get("control", {}))
        self.c_k = self.from_named(self.state.get("control", {}))
        self.correction = [c - c_k for c, c_k in zip(self.c, self.c_k, strict=True)]

    def adjust_gradients(self) -> None:
        """Add ``c - c_k``."""
        self.add_to_gradients(self.correction)

    def end(self, server_round: int) -> None:
        total = self._total_step_size()
        moves = [w_t - p.detach() for w_t, p in zip(self.received, self.trainable, strict=True)]
        # Without steps, or with lr = 0, the estimate does not change.
        new = [
            c_k - c + move / total if total else c_k
            for c_k, c, move in zip(self.c_k, self.c, moves, strict=True)
        ]
        change = [after - c_k for after, c_k in zip(new, self.c_k, strict=True)]
        self.state["control"] = self.to_named(new)
        self.returns["control"] = self.to_named(change)

    def _total_step_size(self) -> float:
        """Return the sum of the sizes of S steps: the distance they cover if the gradient is 1."""
        lr, momentum = self.settings.lr, self.settings.momentum
        total, velocity = 0.0, 0.0
        for _ in range(self.steps):
            velocity = momentum * velocity + 1
            total += lr * velocity
        return total
