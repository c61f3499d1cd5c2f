"""Image classifiers from timm (``model.name = "timm:NAME"``), and ViTs from timm with prompts."""

from __future__ import annotations

import difflib
import sys
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fairflower.arguments import Range
from fairflower.errors import ConfigError, require
from fairflower.models.bodies import BodyClassifier, as_rgb, resized, same_for_every_seed
from fairflower.models.prompt_vit import PromptViT
from fairflower.models.weights import copy_into, load_weights_file
from fairflower.registry import RANDOM_WEIGHTS


class TimmClassifier(BodyClassifier):
    """A network from timm with a linear head.

    Gray images get three channels. Images are resized to ``image_size`` or, if the network accepts
    only a single size, to that size. They are normalized as the data set specifies, even if the
    network was pretrained with a different normalization.
    """

    def __init__(self, body: nn.Module, num_classes: int, size: tuple[int, int] | None) -> None:
        width = getattr(body, "head_hidden_size", None) or body.num_features
        super().__init__(body, int(width), num_classes)  # type: ignore[arg-type]
        self.size = size

    def features(self, x: Tensor) -> Tensor:
        """Map normalized images [N, C, H, W] to the pooled features [N, D]."""
        return self.to_head(self.body(resized(as_rgb(x, "A network from timm"), self.size)))


class TimmPromptViT(PromptViT):
    """FedGCR's prompts for a frozen ViT from timm; see `PromptViT`.

    Prompts follow the tokens of the image. If a ViT averages tokens, it averages only the tokens of
    the image.
    """

    def __init__(
        self, vit: Any, num_classes: int, shape: tuple[int, int, int], gc_net: bool = True
    ) -> None:
        vit.hidden_dim = vit.embed_dim
        super().__init__(vit, num_classes, shape, gc_net)

    def _class_token(self, x: Tensor, prompts: Tensor | None = None) -> Tensor:
        vit: Any = self.vit
        x = resized(as_rgb(x, "A ViT"), tuple(vit.patch_embed.img_size))
        tokens = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x))))
        count = tokens.shape[1]
        if prompts is not None:
            tokens = torch.cat([tokens, prompts], 1)
        for block in vit.blocks:
            tokens = block(tokens)
        z: Tensor = vit.forward_head(vit.norm(tokens)[:, :count], pre_logits=True)
        return z


def timm(
    name: str,
    num_classes: int,
    shape: tuple[int, ...],
    weights: str = "",
    *,
    image_size: Annotated[int, Range(0)] = 0,
) -> TimmClassifier:
    """Build the network for ``model.name = "timm:NAME"``.

    ``weights`` are empty for timm's pretrained weights in the local cache of the Hugging Face Hub
    (nothing is downloaded), a .safetensors or .pth file with weights of the network, or ``random``
    for random weights. ``image_size`` is the width and height to which images are resized. 0 means
    the network's size or, if it accepts any size, the size of the data.

    Raises ``ConfigError`` if timm does not have this network, or the weights are not available or
    belong to another network, and ``NotInstalled`` if timm is not installed.
    """
    body = _body(name, weights, image_size)
    return TimmClassifier(body, num_classes, _fixed_size(body, image_size))


vars(timm).update(sent_whole=True, adaptable=True)


def prompt_timm(
    name: str,
    num_classes: int,
    shape: tuple[int, int, int],
    weights: str = "",
    gc_net: bool = True,
    *,
    image_size: Annotated[int, Range(0)] = 0,
) -> TimmPromptViT:
    """Build the network for ``model.name = "prompt-timm:NAME"``.

    ``weights`` and ``image_size`` are as in `timm`.

    Raises ``ConfigError`` if NAME is not a Vision Transformer in timm.
    """
    body = _body(name, weights, image_size)
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(body, VisionTransformer):
        raise ConfigError(
            f"model.name = 'prompt-timm:{name}': prompts need a Vision Transformer (vit_*, "
            f"deit_*), but this is a {type(body).__name__}. Choose a Vision Transformer, or "
            f"model.name = 'timm:{name}'."
        )
    return TimmPromptViT(body, num_classes, shape, gc_net)


def vpt_timm(
    name: str,
    num_classes: int,
    shape: tuple[int, int, int],
    weights: str = "",
    *,
    image_size: Annotated[int, Range(0)] = 0,
) -> TimmPromptViT:
    """Build the network for ``model.name = "vpt-timm:NAME"``, without GC-Net."""
    return prompt_timm(name, num_classes, shape, weights, gc_net=False, image_size=image_size)


def _body(name: str, weights: str, image_size: int) -> nn.Module:
    """Build a network from timm without its head."""
    require("timm", f"The network {name!r} from timm")
    import timm as library

    if not library.is_model(name):
        near = difflib.get_close_matches(name, library.list_models(), n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else "See timm.list_models()."
        raise ConfigError(f"model.name: timm {library.__version__} has no network {name!r}. {hint}")
    options: dict[str, Any] = {"img_size": image_size} if image_size else {}
    with same_for_every_seed():
        try:
            body: nn.Module = library.create_model(name, num_classes=0, **options)
        except TypeError:
            if not options:
                raise
            body = library.create_model(name, num_classes=0)  # it takes images of any size
    if weights != RANDOM_WEIGHTS:
        _load(body, name, weights)
    return body


def _load(body: Any, name: str, weights: str) -> None:
    """Copy pretrained weights into a network, converted to timm's names and shapes."""
    config = body.pretrained_cfg
    arrays = load_weights_file(weights or _cached(config.get("hf_hub_id"), name))
    convert = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        arrays = convert(arrays, body)
    head = config.get("classifier") or "head"
    heads = tuple(f"{one}." for one in ([head] if isinstance(head, str) else head))
    copy_into(body, arrays, heads, f"timm's {name}", weights)


def _cached(repository: str | None, name: str) -> str:
    """Return the file with a network's weights in the local cache of the Hugging Face Hub."""
    from huggingface_hub import try_to_load_from_cache

    if not repository:
        raise ConfigError(
            f"model.weights = '': timm has no pretrained weights for {name!r}. Set model.weights "
            "to a weights file, or to random."
        )
    cached = try_to_load_from_cache(repository, "model.safetensors")
    if not isinstance(cached, str):
        raise ConfigError(
            f"The weights of {name!r} are not on this machine, and runs do not download "
            f"weights. Download them on every machine that trains or tests: hf download "
            f"{repository} model.safetensors. Or set model.weights to a file with these weights, "
            "or to random."
        )
    return cached


def _fixed_size(body: Any, image_size: int) -> tuple[int, int] | None:
    """Return the height and width of the images that a network accepts; None means any size."""
    size = getattr(getattr(body, "patch_embed", None), "img_size", None)
    if body.pretrained_cfg.get("fixed_input_size") and size:
        return int(size[0]), int(size[1])
    return (image_size, image_size) if image_size else None
