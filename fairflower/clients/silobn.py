"""SiloBN (Andreux et al., DART 2020)."""

from torch import nn

from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.models import norm_arrays


class SiloBN(LocalArraysTrainer):
    """Plain local training, with running statistics that stay with the client.

    Like `FedBN`, but only the running mean, the running variance and the number of batches of
    normalization layers stay with the client. Their scale and shift are merged like all other
    arrays. Normalization layers are recognized by type.

    The server tests with the initial statistics, mean 0 and variance 1. ``test`` also reports
    ``personal_accuracy``, the accuracy with the client's own statistics on its test examples.
    Clients are tested if ``evaluate.by`` is ``"clients"`` or ``"both"``. For a network without
    running statistics, such as ``cnn``, this trainer is equivalent to ``sgd``.

    Parameters
    ----------
    keep
        Where the client's arrays are kept between rounds: ``"client"`` (default) or ``"server"``;
        see `LocalArraysTrainer`.

    See Also
    --------
    FedBN : Scale and shift stay with the client as well.

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
