"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from typing import Any

from fairflower.exchanges.control import ControlVariates
from fairflower.training.trainer import Trainer


class SCAFFOLD(Trainer):
    """Local steps corrected by how the client's gradients differ from everybody's.

    ``w <- w - lr (g - c_k + c)`` (their Eq. 3) and, after S steps from w_t, option II
    of Eq. 4: ``c_k+ = c_k - c + (w_t - w) / (S lr)``. The client keeps c_k, zero at
    first; the server's c comes with the model and ``c_k+ - c_k`` goes back
    (``ControlVariates``).

    The correction enters the gradient, so momentum and weight decay apply, and c_k is
    an estimate of the gradient with weight decay. Option II takes ``(w_t - w) / (S lr)``
    for the mean gradient. Momentum makes the way up to ``1 / (1 - momentum)`` times
    longer, so it is divided by its length for a constant gradient of one instead: S lr
    without momentum, and with it still a mean of gradients, the early ones counting
    more. Adam's steps are no sum of gradients: ``train.optimizer`` has to be ``sgd``.

    Raises
    ------
    ConfigError
        With another optimiser.
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
        length = self._length_of_steps()
        moves = [w_t - p.detach() for w_t, p in zip(self.received, self.trainable, strict=True)]
        # No steps, or of length zero: nothing was learnt about the gradient.
        new = [
            c_k - c + move / length if length else c_k
            for c_k, c, move in zip(self.c_k, self.c, moves, strict=True)
        ]
        change = [after - c_k for after, c_k in zip(new, self.c_k, strict=True)]
        self.state["control"] = self.to_named(new)
        self.returns["control"] = self.to_named(change)

    def _length_of_steps(self) -> float:
        """Distance that S steps go along a constant gradient of length 1; S lr without momentum."""
        lr, momentum = self.settings.lr, self.settings.momentum
        length, velocity = 0.0, 0.0
        for _ in range(self.steps):
            velocity = momentum * velocity + 1
            length += lr * velocity
        return length
