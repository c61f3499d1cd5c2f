"""Segmentation networks of segmentation-models-pytorch: ``model.name = "smp:NAME"``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fairflower.errors import ConfigError, require
from fairflower.models.pretrained import copy_into, load_weights_file
from fairflower.models.unet import Segmenter
from fairflower.registry import RANDOM_WEIGHTS


class SMPSegmenter(Segmenter):
    """A network of segmentation-models-pytorch, ``body``."""

    def __init__(self, body: nn.Module, stride: int) -> None:
        super().__init__()
        self.body, self.stride = body, stride

    def maps(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


def smp(
    name: str,
    num_classes: int,
    shape: tuple[int, int, int],
    weights: str = "",
    *,
    encoder: str = "resnet18",
) -> SMPSegmenter:
    """Build the network for ``model.name = "smp:NAME"``, such as ``smp:Unet:encoder=resnet18``.

    NAME is one of the library's architectures, for example Unet, UnetPlusPlus, FPN or DeepLabV3Plus
    and ``encoder`` one of its encoders. ``weights`` are empty or ``random`` for random weights, or
    a .safetensors or .pth file: the state dict of the encoder, or of the whole network, whose
    ``segmentation_head`` is ignored.

    Raises ``ConfigError`` if the library does not have this network or the weights belong to
    another one, and ``NotInstalled`` if segmentation-models-pytorch is not installed.
    """
    require("smp", f"The network {name!r} from segmentation-models-pytorch")
    import segmentation_models_pytorch as library

    sizes = {"in_channels": shape[0], "classes": num_classes}
    try:
        body: Any = library.create_model(name, encoder, encoder_weights=None, **sizes)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"model.name = 'smp:{name}:encoder={encoder}': {error.args[0]}"
        ) from error
    if weights not in ("", RANDOM_WEIGHTS):
        arrays = load_weights_file(weights)
        if any(key.startswith("encoder.") for key in arrays):
            head = "segmentation_head."
            arrays |= {k: v for k, v in body.state_dict().items() if k.startswith(head)}
            copy_into(body, arrays, (), f"smp's {name}", weights)
        else:
            copy_into(body.encoder, arrays, ("fc.", "classifier."), f"smp's {encoder}", weights)
    return SMPSegmenter(body, int(body.encoder.output_stride))


vars(smp).update(output_dims=(3,), sent_whole=True)
