"""FedGCR's network, a frozen Vision Transformer with trained prompts, and its versions by name."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fairflower.errors import ConfigError
from fairflower.models import Classifier, cached_first_stage
from fairflower.models.pretrained import (
    as_rgb,
    copy_into,
    decode_json_weights,
    load_weights,
    load_weights_file,
    resized,
)

if TYPE_CHECKING:  # two seconds to import, and every command reads FedGC's arguments
    from torchvision.models import VisionTransformer

NUM_PROMPTS = 4  # number of global prompts (from the released code; the paper gives no number)


class PromptViT(Classifier):
    """Frozen Vision Transformer with global prompts, adapted to each image (FedGCR, AAAI 2024).

    Let ViT(x) be the class token of the frozen transformer after its last norm, and ViT(x | p) the
    class token if prompts p are appended to the sequence of tokens::

        z_raw = ViT(x)                                   first stage, no gradient
        h     = GC-Net(z_raw)                            type-specific prompt
        z     = ViT(x | p_1 + h, ..., p_4 + h)           second stage
        y     = head(z)

    Every image has its own h. The prompts p, GC-Net and the head are trained and exchanged; all
    clients have the same transformer from the start. Because z_raw of an image never changes, it is
    computed once and cached (`fairflower.clients.Images`). Images are therefore not augmented.

    Images of ``shape`` (C, H, W) are resized to the transformer's input size, and gray images get
    three channels; other numbers of channels raise ``ConfigError``. The head of ``vit``, the
    pretrained transformer, is removed.

    Without ``gc_net``, h = 0, as in visual prompt tuning (Jia et al., ECCV 2022). This is the
    baseline in the paper's ablation (Table 5) and the model for strategies that are compared with
    FedGC. With the same seed, the initial prompts and head are the same with and without GC-Net.

    Details that the paper does not give follow the released code: four prompts drawn from N(0,
    0.02^2) without positional embedding, a GC-Net d -> 4 d -> d with a ReLU, and a linear head (the
    paper says "MLP"). Two parts of the released code are omitted: the 10 % dropout of z, and the
    mixing of h within a batch, where sample b gets the h of four other samples.
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
        as_rgb(torch.empty(1, *shape), "A ViT")  # raises for other numbers of channels
        d = vit.hidden_dim
        self.prompts = nn.Parameter(torch.empty(NUM_PROMPTS, d).normal_(std=0.02))
        # GC-Net is always drawn, so that a seed gives the same head with and without GC-Net.
        drawn = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))
        self.gc_net = drawn if gc_net else None
        self.head = nn.Linear(d, num_classes)
        vit.heads = nn.Identity()
        self.vit = vit.requires_grad_(False).eval()

    def first_stage(self, x: Tensor) -> Tensor:
        """Return z_raw [N, d] of normalized images [N, C, H, W], from the cache if possible.

        For images that require gradients, the cache is not used, and z_raw has a gradient.
        """
        cached = None if x.requires_grad else cached_first_stage(x)
        if cached is not None:
            return cached
        with torch.set_grad_enabled(x.requires_grad and torch.is_grad_enabled()):
            return self._class_token(x)

    def type_prompt(self, x: Tensor) -> Tensor:
        """Return the type-specific prompt h [N, d] of each image, which is 0 without GC-Net."""
        if self.gc_net is None:
            return x.new_zeros(x.shape[0], self.prompts.shape[1])
        return self.gc_net(self.first_stage(x))

    def prompted(self, x: Tensor, h: Tensor) -> Tensor:
        """Return z [N, d] of images for the prompts p + h, where h has the shape [N, d]."""
        return self._class_token(x, self.prompts + h[:, None])

    def features(self, x: Tensor) -> Tensor:
        """Map normalized images [N, C, H, W] to the second stage's class token z [N, d]."""
        return self.prompted(x, self.type_prompt(x))

    def represent(self, x: Tensor) -> Tensor:
        """Map images to h [N, d]; a client's representation is the mean of h (the paper's Eq. 4).

        Without GC-Net, images are mapped to z_raw [N, d], the input of GC-Net, which unlike z does
        not change during training.
        """
        return self.first_stage(x) if self.gc_net is None else self.type_prompt(x)

    def exchanged_arrays(self) -> dict[str, Tensor]:
        """Return all arrays except the transformer's."""
        state = self.state_dict()
        return {name: array for name, array in state.items() if not name.startswith("vit.")}

    def train(self, mode: bool = True) -> PromptViT:
        """Set the mode of all layers except the transformer, which stays in eval mode."""
        super().train(mode)
        self.vit.eval()
        return self

    def _class_token(self, x: Tensor, prompts: Tensor | None = None) -> Tensor:
        vit = self.vit
        x = resized(as_rgb(x, "A ViT"), (vit.image_size, vit.image_size))
        patches = vit.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([vit.class_token.expand(x.shape[0], -1, -1), patches], 1)
        tokens = tokens + vit.encoder.pos_embedding
        if prompts is not None:
            tokens = torch.cat([tokens, prompts], 1)
        encoded: Tensor = vit.encoder.ln(vit.encoder.layers(vit.encoder.dropout(tokens)))
        return encoded[:, 0]


def prompt_vit_tiny(
    num_classes: int, shape: tuple[int, int, int], weights: str = "", gc_net: bool = True
) -> PromptViT:
    """Build ``prompt-vit-tiny``; fairflower includes its default weights.

    The network has 0.76 M frozen parameters and, for ten classes, 0.13 M trained parameters. The
    weights were pretrained on characters in matplotlib's fonts
    (``experiments/pretrain_vit_tiny.py``).
    """
    if weights == "imagenet":
        raise ConfigError(
            "model.weights = 'imagenet': prompt-vit-tiny has no ImageNet weights. Leave "
            "model.weights empty for the included weights, or set it to a file."
        )
    arrays = load_weights_file(weights) if weights else _shipped()
    model = PromptViT(vit_tiny(), num_classes, shape, gc_net)
    copy_into(model.vit, arrays, "heads.", "fairflower.models.prompt_vit.vit_tiny", weights)
    return model


def vpt_vit_tiny(num_classes: int, shape: tuple[int, int, int], weights: str = "") -> PromptViT:
    """Build ``vpt-vit-tiny``, without GC-Net; it has 1,802 trained parameters."""
    return prompt_vit_tiny(num_classes, shape, weights, gc_net=False)


def prompt_vit_b_16(
    num_classes: int, shape: tuple[int, int, int], weights: str = "", gc_net: bool = True
) -> PromptViT:
    """Build ``prompt-vit-b-16``, the network of the paper.

    The network has 85.8 M frozen parameters and, for ten classes, 4.73 M trained parameters. The
    default weights are torchvision's ``IMAGENET1K_V1``, which are downloaded once to torch's cache.
    """
    from torchvision.models import ViT_B_16_Weights, vit_b_16

    arrays = load_weights(weights, ViT_B_16_Weights.IMAGENET1K_V1)
    model = PromptViT(vit_b_16(), num_classes, shape, gc_net)
    copy_into(model.vit, arrays, "heads.", "torchvision's vit_b_16", weights)
    return model


def vpt_vit_b_16(num_classes: int, shape: tuple[int, int, int], weights: str = "") -> PromptViT:
    """Build ``vpt-vit-b-16``, without GC-Net; it has 10,762 trained parameters."""
    return prompt_vit_b_16(num_classes, shape, weights, gc_net=False)


def vit_tiny(num_classes: int = 1) -> VisionTransformer:
    """Build a small torchvision ViT for CPUs: 16 tokens of a 32x32 image, 5 layers, d = 128.

    Patches of 8x8 pixels first pass through three convolutions with stride 2, which help a small
    transformer to learn from few images (Xiao et al., NeurIPS 2021).
    """
    from torchvision.models import VisionTransformer
    from torchvision.models.vision_transformer import ConvStemConfig

    stem = [ConvStemConfig(channels, 3, 2) for channels in (32, 64, 96)]
    return VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=5,
        num_heads=4,
        hidden_dim=128,
        mlp_dim=256,
        num_classes=num_classes,
        conv_stem_configs=stem,
    )


@cache
def _shipped() -> dict[str, Tensor]:
    """Return the included weights of the tiny ViT (3 MB); cached, because decoding is slow."""
    file = resources.files(__package__).joinpath("vit_tiny.json")
    return decode_json_weights(file.read_text(encoding="ascii"))
