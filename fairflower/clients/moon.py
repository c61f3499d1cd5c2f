"""MOON (Li et al., CVPR 2021)."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range, Search
from fairflower.training.features import FeatureTrainer


class MOON(FeatureTrainer):
    """Local training that keeps the features like the global model's, not like last time's.

    Adds to the cross entropy, with z, z_glob, z_prev the features of the model in
    training, the received one, and the client's own at the end of its last round
    (their Eq. 3)::

        mu * mean -log( e^(sim(z, z_glob)/tau) / (e^(sim(z, z_glob)/tau) + e^(sim(z, z_prev)/tau)) )

    sim being the cosine. In a client's first round there is no z_prev and the term is
    left out; the original starts with z_prev = z_glob, where its gradient is zero. The
    two other models are frozen: eval mode, no gradients. (Code around FedHEAL leaves
    them in training mode, where their batch statistics move, and starts z_prev from
    differently initialised networks.)

    Features are what the head sees, as in FedHEAL's group's code; the original has a
    projection head between them. The client keeps its last model.

    Parameters
    ----------
    mu
        Default 5 (FedEquilibria, Table 5; the original tries 0.1, 1, 5 and 10).
    tau
        Default 0.5 (both).
    """

    paper = "Li et al., CVPR 2021"

    def __init__(
        self,
        *args: Any,
        mu: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 5.0,
        tau: Annotated[float, Range(1e-6), Search(0.1, 1, log=True)] = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.mu, self.tau = mu, tau

    def begin(self, server_round: int) -> None:
        self.received = self.snapshot()
        self.previous = self.to_device(self.state.get("previous", {}))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, logits = self.outputs(x)
        loss = self.criterion(logits, y)
        if not self.previous:
            return loss
        near = F.cosine_similarity(z, self.frozen_features(self.received, x))
        far = F.cosine_similarity(z, self.frozen_features(self.previous, x))
        # -log(e^a / (e^a + e^b)) = softplus(b - a)
        return loss + self.mu * F.softplus((far - near) / self.tau).mean()

    def end(self, server_round: int) -> None:
        self.state["previous"] = self.send()
