"""Ditto (Li et al., ICML 2021)."""

from typing import Annotated, Any, Literal

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer, personal_score


class Ditto(Trainer):
    """Plain local training, and a personal model that stays with the client.

    The global model is trained as with ``sgd``. Then the personal model v_k is trained on the same
    batches with the gradient of Eq. 2, ``grad F_k(v) + lambda (v - w_t)``. It starts from its
    values after the client's last round, or initially from the received model w_t. With lambda = 0
    the client trains alone; a large lambda keeps v_k near the global model. Training is stable only
    if ``lr * lambda < 2``. The personal model has its own buffers. A round takes twice as long as
    with ``sgd``.

    ``test`` also reports ``personal_accuracy``: the accuracy of v_k on the client's test examples,
    or of the received model before the client has trained. Clients are tested if ``evaluate.by`` is
    ``"clients"`` or ``"both"``.

    Parameters
    ----------
    lambda_
        Weight of the distance from the global model. Default 1 (the paper selects 0.1, 1 or 2 by
        validation).
    share
        Model that is sent to the server: ``"global"`` (default, as in the paper) or ``"personal"``.
        With ``"personal"`` no global model is trained, and a round takes as long as with ``sgd``.

    See Also
    --------
    FedProx : The same penalty on the global model.

    Notes
    -----
    FedHEAL's Table 3 has a row for Ditto "with personalized models aggregated into global model",
    which Ditto's paper never does. Neither code nor lambda was released, and the phrase can mean
    three methods: (1) personal models continue from their last values and are averaged instead of
    the global model, as with ``share = "personal"`` (mean-regularized multi-task learning: Liu et
    al., NeurIPS 2022); (2) personal models start from w_t in every round, as ``fedprox`` does with
    ``mu = lambda``; (3) their average is tested but not sent back. Therefore this row cannot be
    reproduced.

    Examples
    --------
    >>> from fairflower.clients.ditto import Ditto
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = Ditto(tiny_model(), data(), SETTINGS, client_id=0, seed=0, lambda_=0.1)
    >>> _ = client.train(server_round=1)
    >>> sorted(client.state), sorted(client.test())
    (['personal'], ['accuracy', 'eval_loss', 'personal_accuracy'])
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
        """Add ``lambda (v - w_t)`` while the personal model is trained."""
        if self.personal:
            self.add_to_gradients(self.drift(self.received), self.lambda_)

    def end(self, server_round: int) -> None:
        if self.personal:
            self.state["personal"] = self.send()
            return
        trained, steps = self.send(), self.steps
        self.receive(self.start)
        self.personal = True
        self.run_epochs(server_round)
        self.state["personal"] = self.send()
        self.receive(trained)
        self.steps = steps  # steps of the model that is sent

    def test(self) -> dict[str, float]:
        metrics = super().test()
        received = self.send()
        self.receive(self.state.get("personal") or received)
        metrics |= personal_score(self)
        self.receive(received)
        return metrics
