"""Ditto (Li et al., ICML 2021)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer


class Ditto(Trainer):
    """Plain local training, and beside it a personal model that stays with the client.

    The global track is that of ``sgd``. The personal model v_k takes the same batches,
    as often, from where it was (at first from the received model w_t), by the gradient
    of their Eq. 2, ``grad F_k(v) + lambda (v - w_t)``: lambda = 0 is training alone,
    a large one holds v at the global model. Gradient steps need ``lr * lambda < 2``.
    Buffers are the personal model's own.

    ``test`` also reports ``personal_accuracy``: v_k on the client's own test images (the
    received model's before the client has trained). It is asked for by ``evaluate.by =
    "clients"`` or ``"both"``. A round costs twice the time.

    FedHEAL's Table 3 has a row of Ditto "with personalized models aggregated into global
    model", which the original never does. No code of it was released, lambda is not
    given, and the words have several readings: personal models that go on from where
    they were, averaged in place of the global track, which ``share = "personal"`` does
    (mean-regularised multi-task learning: Liu et al., NeurIPS 2022); personal models that
    start from w_t in every round, which is ``fedprox`` with ``mu = lambda``; an average
    that is tested and not sent back. So the row cannot be made as it was.

    Parameters
    ----------
    lambda_
        Default 1 (the original picks one of 0.1, 1 and 2 by validation).
    share
        ``"global"`` (default, the original) or ``"personal"``: what goes to the server.
        With ``"personal"`` there is no global track, and a round costs its time once.
    """

    paper = "Li et al., ICML 2021"

    def __init__(
        self,
        *args: Any,
        lambda_: Annotated[float, Range(0), Search(0.01, 10, log=True)] = 1.0,
        share: Literal["global", "personal"] = "global",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.lambda_, self.share = lambda_, share
        self.personal = False

    def begin(self, server_round: int) -> None:
        self.received = self.copy_trainable()
        self.start = self.state.get("personal") or self.send()
        self.personal = self.share == "personal"
        if self.personal:
            self.receive(self.start)

    def adjust_gradients(self) -> None:
        """On the personal track add ``lambda (v - w_t)``."""
        if self.personal:
            self.add_to_gradients(self.drift(self.received), self.lambda_)

    def end(self, server_round: int) -> None:
        if self.personal:
            self.state["personal"] = self.send()
            return
        trained, steps = self.send(), self.steps
        self.receive(self.start)
        self.personal = True
        self.descend(server_round)
        self.state["personal"] = self.send()
        self.receive(trained)
        self.steps = steps  # of the model that is sent

    def test(self) -> dict[str, float]:
        metrics = super().test()
        received = self.send()
        self.receive(self.state.get("personal") or received)
        metrics["personal_accuracy"] = self.measure(self.test_images)[1]
        self.receive(received)
        return metrics
