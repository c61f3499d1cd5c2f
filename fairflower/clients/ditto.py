"""Ditto (Li et al., ICML 2021)."""

from __future__ import annotations

from typing import Any

import torch

from fairflower.clients.base import Trainer


class Ditto(Trainer):
    """Plain local training, and beside it a personal model that never leaves the client.

    The global track is that of ``sgd``. The personal model v_k takes the same batches,
    as often, from where it was (at first from the received model w_t), by the gradient
    of their Eq. 2, ``grad F_k(v) + lambda (v - w_t)``: lambda = 0 is training alone,
    a large one holds v at the global model. Gradient steps need ``lr * lambda < 2``.
    Buffers are the personal model's own.

    ``test`` also reports ``personal_accuracy``: v_k on the client's own test images (the
    received model's before the client has trained). It is asked for by ``evaluate.by =
    "clients"`` or ``"both"``. A round costs twice the time. (FedHEAL's table averages the
    personal models; here, as in the original, the global track is averaged.)

    Parameters
    ----------
    lambda_
        Default 1 (the original picks one of 0.1, 1 and 2 by validation).
    """

    def __init__(self, *args: Any, lambda_: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lambda_ = lambda_
        self.personal = False

    def begin(self, server_round: int) -> None:
        """Remember the received model."""
        self.received = self.copy_trainable()
        self.start = self.state.get("personal") or self.send()

    def adjust_gradients(self) -> None:
        """On the personal track add ``lambda (v - w_t)``."""
        if not self.personal:
            return
        with torch.no_grad():
            for p, received in zip(self.trainable, self.received, strict=True):
                if p.grad is not None:
                    p.grad.add_(p - received, alpha=self.lambda_)

    def end(self, server_round: int) -> None:
        """Train the personal model, and keep it."""
        trained = self.snapshot()
        self.receive(self.start)
        self.personal = True
        try:
            self.descend(server_round)
        finally:
            self.personal = False
        self.state["personal"] = self.send()
        self.restore(trained)

    def test(self) -> dict[str, float]:
        """Test the global and the personal model."""
        metrics = super().test()
        received = self.snapshot()
        self.receive(self.state.get("personal") or self.send())
        metrics["personal_accuracy"] = self.measure(self.test_images)[1]
        self.restore(received)
        return metrics
