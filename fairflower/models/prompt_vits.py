"""FedGCR's networks by name: torchvision's Vision Transformers, with prompts (`PromptViT`)."""

from __future__ import annotations

from functools import cache
from importlib import resources

from torch import Tensor, nn
from torchvision.models import VisionTransformer, ViT_B_16_Weights, vit_b_16
from torchvision.models.vision_transformer import ConvStemConfig

from fairflower.errors import ConfigError
from fairflower.models.prompt_vit import PromptViT
from fairflower.models.weights import copy_into, from_file, from_text, from_torchvision


def prompt_vit_tiny(
    num_classes: int, shape: tuple[int, int, int], weights: str = "", gc_net: bool = True
) -> PromptViT:
    """``model.name = "prompt-vit-tiny"``; without ``weights``, those shipped here.

    0.76 M frozen parameters; 0.13 M are trained, for ten classes. The weights were
    pretrained on characters of matplotlib's fonts (``experiments/pretrain_vit_tiny.py``).
    """
    if weights == "imagenet":
        raise ConfigError(
            "model.weights = 'imagenet': there are none for the tiny ViT. Leave it empty for the "
            "weights that it comes with, or name a file."
        )
    vit = vit_tiny()
    arrays = from_file(weights) if weights else _shipped()
    _load(vit, arrays, "vit_tiny of this module", weights)
    return PromptViT(vit, num_classes, shape, gc_net)


def vpt_vit_tiny(num_classes: int, shape: tuple[int, int, int], weights: str = "") -> PromptViT:
    """``model.name = "vpt-vit-tiny"``: ``prompt-vit-tiny`` without GC-Net, 1,802 are trained."""
    return prompt_vit_tiny(num_classes, shape, weights, gc_net=False)


def prompt_vit_b_16(
    num_classes: int, shape: tuple[int, int, int], weights: str = "", gc_net: bool = True
) -> PromptViT:
    """``model.name = "prompt-vit-b-16"``, the paper's; without ``weights``, ImageNet's.

    85.8 M frozen parameters; 4.73 M are trained. ImageNet's weights are torchvision's
    ``IMAGENET1K_V1``, downloaded once to torch's cache.
    """
    vit = vit_b_16()
    published = ViT_B_16_Weights.IMAGENET1K_V1
    own = weights in ("", "imagenet")
    arrays = from_torchvision(published) if own else from_file(weights)
    _load(vit, arrays, "torchvision's vit_b_16", weights)
    return PromptViT(vit, num_classes, shape, gc_net)


def vpt_vit_b_16(num_classes: int, shape: tuple[int, int, int], weights: str = "") -> PromptViT:
    """``model.name = "vpt-vit-b-16"``: ``prompt-vit-b-16`` without GC-Net, 10,762 are trained."""
    return prompt_vit_b_16(num_classes, shape, weights, gc_net=False)


def vit_tiny(num_classes: int = 1) -> VisionTransformer:
    """Make torchvision's ViT at a CPU's size: 16 tokens of a 32x32 image, 5 layers, d = 128.

    Patches of 8x8 pixels go through three convolutions of stride 2 first, which lets a
    small transformer learn from few images (Xiao et al., NeurIPS 2021).
    """
    return VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=5,
        num_heads=4,
        hidden_dim=128,
        mlp_dim=256,
        num_classes=num_classes,
        conv_stem_configs=[ConvStemConfig(channels, 3, 2) for channels in (32, 64, 96)],
    )


@cache
def _shipped() -> dict[str, Tensor]:
    """Weights of the tiny ViT, 3 MB; to decode them takes longer than to train with them."""
    file = resources.files(__package__).joinpath("vit_tiny.json")
    return from_text(file.read_text(encoding="ascii"))


def _load(vit: VisionTransformer, arrays: dict[str, Tensor], kind: str, source: str) -> None:
    vit.heads = nn.Identity()
    copy_into(vit, arrays, "heads.", kind, source)
