"""SiloBN (Andreux et al., DART 2020)."""

from __future__ import annotations

from torch import nn

from fairflower.models.norms import norm_arrays
from fairflower.training.local_arrays import LocalArraysTrainer


class SiloBN(LocalArraysTrainer):
    """Plain local training, with running statistics that stay with the client.

    As `FedBN`, but only the running mean, the running variance and the number of batches of
    normalization layers are local. Their scale and shift are merged like all other arrays. Layers
    are recognized by their type.

    The server tests with the initial statistics, mean 0 and variance 1. ``test`` also reports
    ``personal_accuracy``, with the client's statistics on its test examples. It runs with
    ``evaluate.by = "clients"`` or ``"both"``. In a network without running statistics, such as
    ``cnn``, this is ``sgd``.

    See Also
    --------
    FedBN : Keeps scale and shift, too.

    Examples
    --------
    >>> from fairflower.clients.silobn import SiloBN
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = SiloBN(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> sorted(client.state["local"])
    ['norm.num_batches_tracked', 'norm.running_mean', 'norm.running_var']
    """

    paper = "Andreux et al., DART 2020"

    @classmethod
    def local_arrays(cls, model: nn.Module) -> list[str]:
        """Return the names of the running statistics of normalization layers."""
        return norm_arrays(model, affine=False)
