"""Segmentation networks, with a vector of logits at each pixel, and a small U-Net."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.arguments import Range
from fairflower.errors import ConfigError
from fairflower.models import Model
from fairflower.models.small import check_pixels, norm_layer


class Segmenter(Model):
    """Base class of networks that map images [N, C, H, W] to logits [N, classes, H, W].

    A subclass defines `maps` for images whose height and width are multiples of ``stride``. Other
    images are padded with zeros at the right and at the bottom, and the logits are cut to their
    size.
    """

    output_dims = (3,)

    #: Height and width of images in `maps` are multiples of this number of pixels.
    stride: int = 1

    def maps(self, x: Tensor) -> Tensor:
        """Map normalized images to logits of the same height and width."""
        raise NotImplementedError(f"{type(self).__name__}: define the method maps.")

    def forward(self, x: Tensor) -> Tensor:
        """Map normalized images [N, C, H, W] to logits [N, classes, H, W]."""
        height, width = x.shape[2:]
        right, below = -width % self.stride, -height % self.stride
        if right or below:
            x = F.pad(x, (0, right, 0, below))
        return self.maps(x)[..., :height, :width]


class UNet(Segmenter):
    """U-Net (Ronneberger, Fischer, Brox, MICCAI 2015) with three resolutions.

    Each resolution has two 3x3 convolutions with norm and ReLU, ``width``, ``2 width`` and
    ``4 width`` channels. Max-pooling halves the resolution; a transposed 2x2 convolution doubles
    it, and its result is joined with the features of the encoder. Unlike the paper's, convolutions
    are padded, so that the output is as large as the image. Images must be at least 8x8 pixels.

    Group norm (Wu & He 2018, four groups) does not store statistics of a client's data, so
    averaging the parameters averages the whole model. ``norm = "batch"`` is for methods that handle
    BatchNorm layers, such as FedBN and SiloBN.
    """

    kinds: ClassVar[tuple[str, ...]] = ("images",)
    stride = 4

    def __init__(
        self,
        num_classes: int,
        shape: tuple[int, int, int],
        *,
        width: Annotated[int, Range(4, 1024)] = 16,
        norm: Literal["group", "batch"] = "group",
    ) -> None:
        super().__init__()
        channels, *size = shape
        check_pixels("unet", *size)
        if width % 4:
            raise ConfigError(
                f"model.name = 'unet:width={width}': expected a multiple of 4, the number of "
                "groups that are normalized."
            )
        widths = [width, 2 * width, 4 * width]
        ins = [channels, *widths]
        self.down = nn.ModuleList(map(_block, ins, widths, [norm] * 3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in widths[-2::-1])
        self.merge = nn.ModuleList(_block(2 * n, n, norm) for n in widths[-2::-1])
        self.last = nn.Conv2d(width, num_classes, 1)

    def maps(self, x: Tensor) -> Tensor:
        *shallow, deepest = self.down
        kept = []
        for block in shallow:
            kept.append(block(x))
            x = F.max_pool2d(kept[-1], 2)
        x = deepest(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return self.last(x)


def _block(inputs: int, outputs: int, norm: Literal["group", "batch"]) -> nn.Sequential:
    """Return two 3x3 convolutions, each with norm and ReLU."""
    layers: list[nn.Module] = []
    for n in (inputs, outputs):
        layers += [
            nn.Conv2d(n, outputs, 3, padding=1, bias=False),
            norm_layer(norm, outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
