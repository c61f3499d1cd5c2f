"""FedGCR's network: a frozen Vision Transformer that is told by prompts what to look for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.errors import ConfigError
from fairflower.models import Classifier, recall

if TYPE_CHECKING:  # it takes two seconds to import, and every command asks FedGC for its arguments
    from torchvision.models import VisionTransformer

#: Global prompts (released code; the paper does not say).
NUM_PROMPTS = 4


class PromptViT(Classifier):
    """The FedGC model (Cheng et al., AAAI 2024): global prompts, customised to each image.

    With ViT(x) the class token of the frozen transformer after its last norm, and
    ViT(x | p) that with prompts at the end of the sequence of tokens::

        z_raw = ViT(x)                                   first stage, no gradient
        h     = GC-Net(z_raw)                            type-specific prompt
        z     = ViT(x | p_1 + h, ..., p_4 + h)           second stage
        y     = head(z)

    Every image has its own h. Trained, and sent, are the prompts p, GC-Net and the head
    alone; the transformer is everybody's from the start. Because z_raw of an image never
    changes, it is computed once and then recalled (`fairflower.clients.Images`), for
    which images are not augmented.

    Without GC-Net, h is 0 and what is left is visual prompt tuning (Jia et al., ECCV 2022),
    on which FedGC builds: the base of the paper's ablation (Table 5), and what a rule is to
    be run on that is compared with FedGC. It starts from the same prompts and head as the
    network with GC-Net of the same seed, and sees the same images.

    Where the paper is silent, the released code decides: four prompts drawn from
    N(0, 0.02^2), which get no positional embedding; GC-Net d -> 4 d -> d with a ReLU; a
    linear head (the paper: "MLP"). Its 10 % dropout of z is left out, and its mixing of
    the h of a batch is not repeated: there sample b gets the h of four other samples.

    The ``vit`` loses its own head. It sees images resized to its size, grey ones in three
    channels, normalised as the data set says; with others than 1 or 3 it is a ConfigError.
    """

    two_stages = True
    gc_net: nn.Sequential | None

    def __init__(
        self,
        vit: VisionTransformer,
        num_classes: int,
        shape: tuple[int, int, int],
        gc_net: bool = True,
    ) -> None:
        super().__init__()
        if shape[0] not in (1, 3):
            raise ConfigError(
                f"A ViT needs grey or colour images, and these have {shape[0]} channels. "
                "Choose another model.name."
            )
        d = vit.hidden_dim
        self.prompts = nn.Parameter(torch.empty(NUM_PROMPTS, d).normal_(std=0.02))
        # Drawn even if it is dropped, so that a seed gives both networks the same head.
        drawn = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))
        self.gc_net = drawn if gc_net else None
        self.head = nn.Linear(d, num_classes)
        vit.heads = nn.Identity()
        self.vit = vit.requires_grad_(False).eval()

    def first_stage(self, x: Tensor) -> Tensor:
        """Give z_raw [N, d] of normalised images [N, C, H, W]; recalled where it is known.

        It has a gradient where the images have one, which are then looked at anew.
        """
        known = None if x.requires_grad else recall(x)
        if known is not None:
            return known
        with torch.set_grad_enabled(x.requires_grad and torch.is_grad_enabled()):
            return self._class_token(x)

    def customise(self, x: Tensor) -> Tensor:
        """The type-specific prompt h [N, d] of each image; 0 without GC-Net."""
        if self.gc_net is None:
            return x.new_zeros(x.shape[0], self.prompts.shape[1])
        h: Tensor = self.gc_net(self.first_stage(x))
        return h

    def prompted(self, x: Tensor, h: Tensor) -> Tensor:
        """See images with the prompts p + h, h being [N, d]: z [N, d]."""
        return self._class_token(x, self.prompts + h[:, None])

    def features(self, x: Tensor) -> Tensor:
        """Normalised images [N, C, H, W] to the second stage's class token z [N, d]."""
        return self.prompted(x, self.customise(x))

    def represent(self, x: Tensor) -> Tensor:
        """Images to what tells their client's type: h [N, d], averaged to h~ in the paper's Eq. 4.

        Without GC-Net it is z_raw [N, d], the only thing that h was made of: unlike z, no
        training for the classes changes it, and it is known from the first batch on.
        """
        return self.first_stage(x) if self.gc_net is None else self.customise(x)

    def travelling(self) -> dict[str, Tensor]:
        """All arrays but the transformer's."""
        state = self.state_dict()
        return {name: array for name, array in state.items() if not name.startswith("vit.")}

    def train(self, mode: bool = True) -> PromptViT:
        """Set the mode of all but the transformer, which stays in eval mode."""
        super().train(mode)
        self.vit.eval()
        return self

    def _class_token(self, x: Tensor, prompts: Tensor | None = None) -> Tensor:
        vit = self.vit
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        size = (vit.image_size, vit.image_size)
        if x.shape[2:] != size:
            x = F.interpolate(x, size, mode="bilinear", antialias=True)
        patches = vit.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([vit.class_token.expand(x.shape[0], -1, -1), patches], 1)
        tokens = tokens + vit.encoder.pos_embedding
        if prompts is not None:
            tokens = torch.cat([tokens, prompts], 1)
        encoded: Tensor = vit.encoder.ln(vit.encoder.layers(vit.encoder.dropout(tokens)))
        return encoded[:, 0]
