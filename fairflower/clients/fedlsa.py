"""FedLSA (Fu et al., AAAI 2025)."""

from typing import Annotated, Any

from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range, Search
from fairflower.exchanges.anchors import SemanticAnchors
from fairflower.training.features import FeatureTrainer


class FedLSA(FeatureTrainer):
    """Local training that pulls normalized features towards class anchors from the server.

    Let h = z / ||z|| be the normalized features of an image, and a_c the anchor of class c, which
    the server learns (``SemanticAnchors``). The loss is (Eqs. 8 to 10)::

        L = L_CE + lambda * mean -log( e^(<a_y, h>/tau) / sum_c e^(<a_c, h>/tau) )

    In round 1 the server has no trained classifier and sends no anchors, so the loss is L_CE.

    Parameters
    ----------
    lambda_
        Weight of the anchor loss. Default 0.1 (FedEquilibria, Table 5, Digits and PACS; 0.7 on
        Office-Caltech).
    tau
        Temperature of the loss, and of the anchors' separation at the server. Default 0.1 (the same
        table).
    alpha
        Weight of the anchors' separation at the server, an argument of `SemanticAnchors`.

    See Also
    --------
    FedProto : Class prototypes averaged over clients.
    FedProc : A contrastive loss with class prototypes.

    Notes
    -----
    In the paper, a projector computes h, and the head gets h. Here h is computed directly from the
    features, and the head gets z, so that the network is the same as for every other trainer. (No
    code was published.)

    Examples
    --------
    >>> import numpy as np
    >>> from fairflower.clients.fedlsa import FedLSA
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedLSA(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> client.shared = {"anchors": {"anchors": np.eye(4, 6, dtype=np.float32)}}
    >>> round(client.train(server_round=2)["train_loss"], 2)
    1.91
    """

    paper = "Fu et al., AAAI 2025"
    needed = "classes"
    exchanges = (SemanticAnchors,)

    def __init__(
        self,
        *args: Any,
        lambda_: Annotated[float, Range(0), Search(0.01, 1, log=True)] = 0.1,
        tau: Annotated[float, Range(1e-6), Search(0.02, 1, log=True)] = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.lambda_, self.tau = lambda_, tau

    def begin(self, server_round: int) -> None:
        self.anchors = self.to_device(self.shared.get("anchors", {})).get("anchors")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, logits = self.outputs(x)
        loss = self.criterion(logits, y)
        if self.anchors is None:
            return loss
        similarity = F.normalize(z) @ self.anchors.T.to(z.dtype) / self.tau
        return loss + self.lambda_ * F.cross_entropy(similarity, y)
