"""FedGCR's networks by name: torchvision's Vision Transformers with prompts (`PromptViT`)."""

from __future__ import annotations

from functools import cache
from importlib import resources

from torch import Tensor, nn
from torchvision.models import VisionTransformer, ViT_B_16_Weights, vit_b_16
from torchvision.models.vision_transformer import ConvStemConfig

from fairflower.errors import ConfigError
from fairflower.models.prompt_vit import PromptViT
from fairflower.models.weights import (
    copy_into,
    decode_json_weights,
    from_torchvision,
    load_weights_file,
)


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
    vit = vit_tiny()
    arrays = load_weights_file(weights) if weights else _shipped()
    _load(vit, arrays, "fairflower.models.prompt_vits.vit_tiny", weights)
    return PromptViT(vit, num_classes, shape, gc_net)


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
    vit = vit_b_16()
    published = ViT_B_16_Weights.IMAGENET1K_V1
    imagenet = weights in ("", "imagenet")
    arrays = from_torchvision(published) if imagenet else load_weights_file(weights)
    _load(vit, arrays, "torchvision's vit_b_16", weights)
    return PromptViT(vit, num_classes, shape, gc_net)


def vpt_vit_b_16(num_classes: int, shape: tuple[int, int, int], weights: str = "") -> PromptViT:
    """Build ``vpt-vit-b-16``, without GC-Net; it has 10,762 trained parameters."""
    return prompt_vit_b_16(num_classes, shape, weights, gc_net=False)


def vit_tiny(num_classes: int = 1) -> VisionTransformer:
    """Build a small torchvision ViT for CPUs: 16 tokens of a 32x32 image, 5 layers, d = 128.

    Patches of 8x8 pixels first pass through three convolutions with stride 2, which help a small
    transformer to learn from few images (Xiao et al., NeurIPS 2021).
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
    """Return the included weights of the tiny ViT (3 MB); cached, because decoding is slow."""
    file = resources.files(__package__).joinpath("vit_tiny.json")
    return decode_json_weights(file.read_text(encoding="ascii"))


def _load(vit: VisionTransformer, arrays: dict[str, Tensor], kind: str, source: str) -> None:
    vit.heads = nn.Identity()
    copy_into(vit, arrays, "heads.", kind, source)
