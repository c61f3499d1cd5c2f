"""ResNets of basic blocks (He et al. 2016): the papers' small ones and torchvision's 18."""

from __future__ import annotations

from collections.abc import Sequence

import torchvision
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights
from torchvision.models.resnet import BasicBlock

from fairflower.errors import ConfigError
from fairflower.models import Classifier
from fairflower.models.weights import copy_into, from_file, from_torchvision


class ResNet(Classifier):
    """torchvision's ResNet of basic blocks, its last layer set apart as ``head``.

    ``blocks`` are those in each of the four stages (64, 128, 256, 512 channels).
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


def resnet18(num_classes: int, shape: tuple[int, int, int], weights: str = "") -> ResNet:
    """Torchvision's ResNet-18: a 7x7 stem of stride 2 and a max-pool; FedISM's network.

    Its ``weights`` are ``imagenet``, torchvision's ``IMAGENET1K_V1``, downloaded once to torch's
    cache; or a file with the state dict of a ``resnet18``, whose head is left out. Empty: drawn at
    random. ImageNet's expect its mean and standard deviation, by which digits, office-caltech,
    pacs, ham10000, isic2019 and rsna-ich are normalised here, and the other data sets are not.
    ``ConfigError`` on weights that are not there or another network's, or images without colour.
    """
    model = ResNet((2, 2, 2, 2), num_classes)
    if weights:
        if shape[0] != 3:
            raise ConfigError(
                f"model.weights = {weights!r}: they are for images of 3 channels, and these have "
                f"{shape[0]}. Leave it empty."
            )
        published = ResNet18_Weights.IMAGENET1K_V1
        arrays = from_torchvision(published) if weights == "imagenet" else from_file(weights)
        copy_into(model.body, arrays, "fc.", "torchvision's resnet18", weights)
    elif shape[0] != 3:
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
