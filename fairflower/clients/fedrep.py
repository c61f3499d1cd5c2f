"""FedRep (Collins et al., ICML 2021)."""

from dataclasses import replace
from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.clients.fedper import FedPer
from fairflower.training.modes import frozen, temporarily


class FedRep(FedPer):
    """Local training of the head, which stays with the client, and then of the body.

    Like `FedPer`, but each round trains the head for ``head_epochs`` epochs, and then the body for
    ``train.local-epochs`` epochs. Both phases update BatchNorm statistics, use the same order of
    batches, and start with a new optimizer; ``train_loss`` is the mean over both. With
    ``train.local-epochs = 0`` neither is trained.

    Parameters
    ----------
    head_epochs
        Number of epochs that train the head. Default 10 (paper, with 1 or 5 epochs for the body).
    keep
        Where the client's head is kept between rounds: ``"client"`` (default) or ``"server"``; see
        `LocalArraysTrainer`.

    See Also
    --------
    FedPer : Trains head and body together.

    Examples
    --------
    >>> from fairflower.clients.fedrep import FedRep
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedRep(tiny_model(), data(), SETTINGS, client_id=0, seed=0, head_epochs=2)
    >>> _ = client.train(server_round=1)
    >>> client.steps  # one epoch of the body
    2
    """

    paper = "Collins et al., ICML 2021"

    def __init__(
        self, *args: Any, head_epochs: Annotated[int, Range(1), Search(1, 10)] = 10, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.head_epochs = head_epochs

    def run_epochs(self, server_round: int) -> float:
        """Train the head and then the body; return the mean loss of all epochs."""
        epochs, own = self.settings.local_epochs, set(self.local_arrays(self.model))
        if epochs == 0:
            return super().run_epochs(server_round)
        settings = replace(self.settings, local_epochs=self.head_epochs)
        body = (p for name, p in self.model.named_parameters() if name not in own)
        with temporarily([(self, "settings", settings)]), frozen(body):
            first = super().run_epochs(server_round)
        self.steps = 0  # count only steps of the body, which is sent
        with frozen(p for name, p in self.model.named_parameters() if name in own):
            second = super().run_epochs(server_round)
        return (self.head_epochs * first + epochs * second) / (self.head_epochs + epochs)
