"""FedRep (Collins et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.clients.fedper import FedPer
from fairflower.training.modes import frozen


class FedRep(FedPer):
    """Local training of a head that stays with the client, and then of the body alone.

    As `FedPer`, but a round has two phases: ``head_epochs`` epochs of the head on the received
    body, and ``train.local-epochs`` epochs of the body under the new head. The first phase adds to
    the time of a round. ``train_loss`` is the mean over both. Running statistics of BatchNorm move
    in both phases.

    Parameters
    ----------
    head_epochs
        Epochs in which the head alone is trained. Default 10 (the paper's, with 1 or 5 of the
        body).

    See Also
    --------
    FedPer : Trains head and body together.

    Examples
    --------
    >>> from fairflower.clients.fedrep import FedRep
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedRep(tiny_model(), data(), SETTINGS, client_id=0, seed=0, head_epochs=2)
    >>> _ = client.train(server_round=1)
    >>> client.steps  # of the body, an epoch of two
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
        settings, own = self.settings, set(self.local_arrays(self.model))
        if settings.local_epochs == 0:
            return super().run_epochs(server_round)
        self.settings = replace(settings, local_epochs=self.head_epochs)
        try:
            with frozen(p for name, p in self.model.named_parameters() if name not in own):
                first = super().run_epochs(server_round)
        finally:
            self.settings = settings
        self.steps = 0  # of the model that is sent
        with frozen(p for name, p in self.model.named_parameters() if name in own):
            second = super().run_epochs(server_round)
        total = self.head_epochs * first + settings.local_epochs * second
        return total / (self.head_epochs + settings.local_epochs)
