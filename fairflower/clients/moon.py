"""MOON (Li et al., CVPR 2021)."""

from typing import Annotated, Any

from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range, Search
from fairflower.training.features import FeatureTrainer


class MOON(FeatureTrainer):
    """Local training with a contrastive loss that keeps features near those of the global model.

    Let z, z_glob and z_prev be the features of the model in training, of the received model, and of
    the client's model at the end of its last round. A term is added to the cross entropy (Eq. 3)::

        mu * mean -log( e^(sim(z, z_glob)/tau) / (e^(sim(z, z_glob)/tau) + e^(sim(z, z_prev)/tau)) )

    where sim is the cosine similarity. In a client's first round there is no z_prev, and the term
    is omitted; in the paper, z_prev is initially z_glob, so that the term has a zero gradient. The
    received and the previous model are in eval mode and get no gradients. The client stores its
    last model.

    Parameters
    ----------
    mu
        Weight of the contrastive loss. Default 5 (FedEquilibria, Table 5; the paper tries 0.1, 1, 5
        and 10).
    tau
        Temperature. Default 0.5 (as in the paper and in FedEquilibria).

    See Also
    --------
    FedProc : A contrastive loss with class prototypes.
    FedProto : A quadratic loss with class prototypes.

    Notes
    -----
    Features are the input to the head, as in the code of FedHEAL's group; the paper has a
    projection head in between. That group's code leaves the two other models in training mode, so
    that their BatchNorm statistics change, and initially takes z_prev from networks with different
    initial weights.

    Examples
    --------
    >>> from fairflower.clients.moon import MOON
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = MOON(tiny_model(), data(), SETTINGS, client_id=0, seed=0, mu=1.0)
    >>> for server_round in (1, 2):
    ...     print(sorted(client.state), round(client.train(server_round)["train_loss"], 2))
    [] 1.66
    ['previous'] 1.97
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
        near = F.cosine_similarity(z, self.features_with(self.received, x))
        far = F.cosine_similarity(z, self.features_with(self.previous, x))
        # -log(e^a / (e^a + e^b)) = softplus(b - a)
        return loss + self.mu * F.softplus((far - near) / self.tau).mean()

    def end(self, server_round: int) -> None:
        self.state["previous"] = self.send()
