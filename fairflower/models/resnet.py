"""ResNets of basic blocks (He et al. 2016): the papers' small ones and torchvision's 18."""

from __future__ import annotations

from collections.abc import Sequence

import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from fairflower.models import Classifier


class ResNet(Classifier):
    """torchvision's ResNet of basic blocks, its last layer set apart as ``head``.

    Parameters
    ----------
    blocks
        Basic blocks in each of the four stages (64, 128, 256, 512 channels).
    num_classes
        Width of the head.
    """

    def __init__(self, blocks: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.body = torchvision.models.ResNet(BasicBlock, list(blocks), num_classes)
        self.head = self.body.fc
        self.body.fc = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        """Normalised images [N, C, H, W] to the mean of the last feature maps [N, 512]."""
        features: Tensor = self.body(x)
        return features


def resnet10(num_classes: int, shape: tuple[int, int, int]) -> ResNet:
    """FedHEAL's and FedEquilibria's network: one block a stage, for small images.

    4,903,242 parameters for colour images and ten classes.
    """
    return _small_image_resnet((1, 1, 1, 1), num_classes, shape)


def resnet12(num_classes: int, shape: tuple[int, int, int]) -> ResNet:
    """ResNet-10 with a second block in the first stage; 4,977,226 parameters."""
    return _small_image_resnet((2, 1, 1, 1), num_classes, shape)


def resnet18(num_classes: int, shape: tuple[int, int, int]) -> ResNet:
    """Torchvision's ResNet-18, not pre-trained: a 7x7 stem of stride 2 and a max-pool."""
    model = ResNet((2, 2, 2, 2), num_classes)
    if shape[0] != 3:
        model.body.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.body.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model


def _small_image_resnet(
    blocks: Sequence[int], num_classes: int, shape: tuple[int, int, int]
) -> ResNet:
    """Make one with a 3x3 stem of stride 1, no max-pool and PyTorch's default weights.

    torchvision draws convolutions from another distribution (He et al. 2015,
    fan-out); FedHEAL's released network keeps PyTorch's own.
    """
    model = ResNet(blocks, num_classes)
    model.body.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    model.body.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
            module.reset_parameters()
    return model
