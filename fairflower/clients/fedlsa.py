"""FedLSA (Fu et al., AAAI 2025)."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range, Search
from fairflower.exchanges.anchors import SemanticAnchors
from fairflower.training.features import FeatureTrainer


class FedLSA(FeatureTrainer):
    """Local training that draws features on the unit sphere to anchors from the server.

    With h = z / ||z|| the features of an image and a_c the anchors of the classes, which
    the server learns (``SemanticAnchors``; their Eqs. 8 to 10)::

        L = L_CE + lambda * mean -log( e^(<a_y, h>/tau) / sum_c e^(<a_c, h>/tau) )

    The server sends no anchors in round 1, as it has no trained classifier yet.

    The original has a projector under the sphere, and a head that sees h. Here h is of
    the features themselves, and the head sees z: the network that is trained and tested
    is that of every other method (inferred; no code was published).

    Parameters
    ----------
    lambda_
        Default 0.1 (FedEquilibria, Table 5, Digits and PACS; 0.7 on Office-Caltech).
    tau
        Default 0.1 (the same).
    """

    paper = "Fu et al., AAAI 2025"
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
        likeness = F.normalize(z) @ self.anchors.T / self.tau
        return loss + self.lambda_ * F.cross_entropy(likeness, y)
