"""FedBN (Li et al., ICLR 2021)."""

from torch import nn

from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.models import norm_arrays


class FedBN(LocalArraysTrainer):
    """Plain local training, with normalization layers that stay with the client.

    Let b be the scale, shift and running statistics of all normalization layers, and w all other
    arrays. In every round, client k trains ``(w, b_k)`` and sends only w, which the strategy
    merges. b_k starts with the network's initial values, and is never sent unless ``keep`` is
    ``"server"``. Normalization layers are recognized by type (batch, group, layer, instance and
    RMS norm), including those in a ResNet's shortcuts.

    There is no usable global model: the server tests w with the initial b. ``test`` also reports
    ``personal_accuracy``, the accuracy of ``(w, b_k)`` on the client's test examples. Clients are
    tested if ``evaluate.by`` is ``"clients"`` or ``"both"``. For a network without normalization
    layers, this trainer is equivalent to ``sgd``.

    Parameters
    ----------
    keep
        Where the client's arrays are kept between rounds: ``"client"`` (default) or ``"server"``;
        see `LocalArraysTrainer`.

    See Also
    --------
    SiloBN : Only the running statistics stay with the client.
    Ditto : The client keeps a whole personal model.

    Notes
    -----
    The released code recognizes these layers by "bn" in their name, which misses shortcuts with
    other names. It averages w with equal weights, as the strategy ``uniform`` does.

    If ``model.weights`` is set, every client loads the pretrained weights to initialize b_k.

    Examples
    --------
    >>> from fairflower.clients.fedbn import FedBN
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedBN(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> sorted(client.send())
    ['head.bias', 'head.weight', 'layer.bias', 'layer.weight']
    >>> sorted(client.state["local"])[:3]
    ['norm.bias', 'norm.num_batches_tracked', 'norm.running_mean']
    """

    paper = "Li et al., ICLR 2021"

    @classmethod
    def local_arrays(cls, model: nn.Module) -> list[str]:
        """Return the names of all arrays of normalization layers."""
        return norm_arrays(model, affine=True)
