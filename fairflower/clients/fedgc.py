"""FedGC, the local training of FedGCR (Cheng, Yeh, Chen, Pastor, Chen, AAAI 2024)."""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.arguments import Range, Search
from fairflower.errors import ConfigError
from fairflower.exchanges.centers import ClusterCenters
from fairflower.files import Arrays
from fairflower.models import to_numpy
from fairflower.models.prompt_vit import PromptViT
from fairflower.numerics.clustering import Variant
from fairflower.training.features import FeatureTrainer
from fairflower.training.measurements import representation, requested
from fairflower.training.modes import at_least_float32

Similarity = Literal["variant", "cosine", "dot"]


class FedGC(FeatureTrainer):
    """Local training of FedGCR, which adapts the prompts of a `PromptViT` to the client's cluster.

    Let h be the type-specific prompt of an image and z its representation (`PromptViT`). The
    exchange ``centers`` provides the centers H_1 ... H_T' of the clusters of clients, and the
    number i of the client's cluster. h_prev is the client's mean prompt in its last round (Eq. 4).
    z_0 and z_prev are the image's representations in the received model and in the client's last
    model::

        loss = CE + lambda1 L_GC + lambda2 L_RA                               (Eq. 6)
        L_GC = -log( e^(h.H_i/tau) / (e^(h.h_prev/tau) + sum_t e^(h.H_t/tau)) )   (Eq. 7)
        L_RA = -log( e^(z.z_0/tau) / (e^(z.z_0/tau) + e^(z.z_prev/tau)) )         (Eq. 8)

    The loss is averaged over the batch. The variants have the same names as in the strategy
    ``FedGCR``, whose table describes the server's part. The default, ``"adapted"``, is this
    project's own::

                              paper                released                adapted
        a.b (Eq. 7, 8)        inner product        cosine                  cosine
        tau                   in both              not in L_RA             in both
        lambda1, lambda2      .5, .1               .5 (1 + (r-1)/R) / 10,  .5, .1
                                                   .1 / 2
        h_prev (1)            as sent              received model          as sent
        z_0                   received model       model received in the   received model
                                                   previous round
        loss, no cluster yet  CE                   CE + CE without h       CE
        train_loss            all of Eq. 6         CE                      CE

    (1) The model that computes h_prev in the client's last round. "As sent": h_prev is the
    representation that the client sent: of the trained model if the server's variant is
    ``"paper"``, else of the received model.

    A client has no cluster in its first round, or if the server shares no centers. It then trains
    with the cross entropy alone, as in Algorithm 1 while H is NULL. No gradient flows through z_0
    and z_prev. The client stores the prompts, GC-Net and head of its last model.

    The paper uses AdamW with learning rate 0.001: ``train.optimizer = "adamw"``,
    ``train.lr = 0.001``.

    Raises ``ConfigError`` if the network is not a `PromptViT` with a GC-Net.

    Parameters
    ----------
    lambda1, lambda2
        Weights of L_GC and L_RA. Defaults 0.5 and 0.1 (paper).
    tau
        Temperature. Default 0.5 (paper).
    similarity
        Similarity a.b: ``"cosine"``, or ``"dot"`` for inner products. Default ``"variant"``, see
        the table.
    variant
        ``"adapted"`` (default), ``"paper"`` or ``"released"``, see the table.

    See Also
    --------
    fairflower.strategies.fedgcr.FedGCR : The server's part.

    Notes
    -----
    The inner products of the printed equations are of the order of d, because z is the output of a
    layer norm with Euclidean norm sqrt(d), so that they outweigh the cross entropy. ``"adapted"``
    therefore uses cosines, as the authors' code does (see ``FedGCR`` for results of all variants).
    It reports the cross entropy, so that the server can compare clients: Eq. 6 has more terms for a
    client with a cluster than for a client without one. Four features of the released code are
    omitted: dropout, the mixing of h within a batch, AdamW moments that persist between rounds, and
    separate learning rates.

    Examples
    --------
    >>> from torchvision.models import VisionTransformer
    >>> from fairflower.clients.fedgc import FedGC
    >>> from fairflower.models.prompt_vit import PromptViT
    >>> from fairflower.testing.federations import SETTINGS, data
    >>> model = PromptViT(VisionTransformer(8, 4, 1, 2, 8, 16), num_classes=4, shape=(1, 8, 8))
    >>> client = FedGC(model, data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> sorted({name.partition('.')[0] for name in client.send()})
    ['gc_net', 'head', 'prompts']
    """

    paper = "Cheng et al., AAAI 2024 (FedGCR)"
    needed = "classes"
    exchanges = (ClusterCenters,)
    models = ("prompt-vit-tiny", "prompt-vit-b-16", "prompt-timm:NAME")

    model: PromptViT

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        lambda1: Annotated[float, Range(0), Search(0.05, 5, log=True)] = 0.5,
        lambda2: Annotated[float, Range(0), Search(0.01, 1, log=True)] = 0.1,
        tau: Annotated[float, Range(1e-6), Search(0.05, 2, log=True)] = 0.5,
        similarity: Similarity = "variant",
        variant: Variant = "adapted",
        **options: Any,
    ) -> None:
        if not isinstance(model, PromptViT) or model.gc_net is None:
            raise ConfigError(
                "client.name = 'fedgc' needs a PromptViT with a GC-Net, but the model is a "
                f"{type(model).__name__} without a GC-Net. Set model.name to prompt-vit-tiny or "
                "prompt-vit-b-16."
            )
        super().__init__(model, *args, **options)
        self.losses: list[Tensor] = []
        self.lambda1, self.lambda2, self.tau = lambda1, lambda2, tau
        if similarity == "variant":
            similarity = "dot" if variant == "paper" else "cosine"
        self.similarity, self.variant = similarity, variant

    def begin(self, server_round: int) -> None:
        self.received = self.snapshot()
        weight1, weight2 = self.lambda1, self.lambda2
        if self.variant == "released":
            elapsed = (server_round - 1) / self.num_rounds if self.num_rounds else 0.0
            weight1, weight2 = weight1 * (1 + elapsed) / 10, weight2 / 2
        self.weights = weight1, weight2
        asked = requested(self.round_config)
        trained = "representation" in asked or "received_representation" not in asked
        received = self.variant == "released" or not trained
        self.represented = self._representation() if received else None
        centers, cluster = self.shared.get("centers"), self.round_config.get("cluster")
        self.ready = False
        if centers is None or cluster is None or "previous" not in self.state:
            return
        self.ready = True
        self.H = torch.tensor(centers["H"], device=self.device)
        self.cluster = int(cluster)
        self.h_prev = torch.tensor(self.state["h"]["h"], device=self.device)
        self.previous = self.to_device(self.state["previous"])
        self.anchor = (
            self.to_device(self.state["anchor"]) if self.variant == "released" else self.received
        )

    def step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Take a step on Eq. 6; return the loss before the step, for ``train_loss``."""
        self.losses = []
        super().step(optimizer, x, y)
        return self.losses[0]  # sharpness-aware steps compute a second loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of Eq. 6 for a batch."""
        h = at_least_float32(self.model.type_prompt(x))
        z = at_least_float32(self.model.prompted(x, h))
        loss = entropy = self.criterion(self.model.head(z), y)
        if self.ready:
            weight1, weight2 = self.weights
            z_0, z_prev = (self.features_with(a, x) for a in (self.anchor, self.previous))
            loss = (
                loss
                + weight1 * self.customization(h, self.H, self.cluster, self.h_prev)
                + weight2 * self.alignment(z, z_0, z_prev)
            )
        elif self.variant == "released":
            z = self.model.prompted(x, torch.zeros_like(h))
            loss = loss + self.criterion(self.model.head(z), y)
        self.losses.append((loss if self.variant == "paper" else entropy).detach())
        return loss

    def customization(self, h: Tensor, H: Tensor, cluster: int, h_prev: Tensor) -> Tensor:
        """Return L_GC for prompts h [B, d], centers H [T', d] and the last mean prompt [d]."""
        logits = self._similarity(h[:, None], torch.cat([H, h_prev[None]])) / self.tau
        return F.cross_entropy(logits, torch.full((len(h),), cluster, device=h.device))

    def alignment(self, z: Tensor, z_0: Tensor, z_prev: Tensor) -> Tensor:
        """Return L_RA for representations of shape [B, d]."""
        tau = 1.0 if self.variant == "released" else self.tau
        # -log(e^a / (e^a + e^b)) = softplus(b - a)
        return F.softplus((self._similarity(z, z_prev) - self._similarity(z, z_0)) / tau).mean()

    def end(self, server_round: int) -> None:
        self.state["h"] = self.represented or self._representation()
        self.state["previous"] = self.send()
        if self.variant == "released":
            self.state["anchor"] = {k: to_numpy(a) for k, a in self.received.items()}

    def _similarity(self, a: Tensor, b: Tensor) -> Tensor:
        if self.similarity == "dot":
            return (a * b).sum(-1)
        return F.cosine_similarity(a, b, dim=-1)

    def _representation(self) -> Arrays:
        return {name: to_numpy(h) for name, h in representation(self).items()}
