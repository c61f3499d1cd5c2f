"""FedBN (Li et al., ICLR 2021)."""

from __future__ import annotations

from torch import nn

from fairflower.models.norms import norm_arrays
from fairflower.training.local_arrays import LocalArraysTrainer


class FedBN(LocalArraysTrainer):
    """Plain local training, with normalization layers that stay with the client.

    A network has arrays ``(w, b)``; b are scale, shift and running statistics of all normalization
    layers. Client k trains ``(w, b_k)`` in every round and sends only w, which the strategy merges.
    b_k is in no message, and begins with the network's initial values. Layers are recognized by
    their type (batch, group, layer, instance and RMS norm), also in shortcuts of a ResNet.

    There is no usable global model: the server tests w with the initial b. ``test`` also
    reports ``personal_accuracy``, of ``(w, b_k)`` on the client's test examples. It runs with
    ``evaluate.by = "clients"`` or ``"both"``. In a network without normalization this is ``sgd``.

    See Also
    --------
    SiloBN : Keeps only the running statistics.
    Ditto : A whole personal model.

    Notes
    -----
    The released code keeps what has "bn" in its name, which misses shortcuts named otherwise, and
    averages w with equal weights, which is the strategy ``uniform``.

    With ``model.weights``, every client reads the pretrained weights, as it needs their b.

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
