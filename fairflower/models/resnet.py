"""ResNets with basic blocks (He et al. 2016): the papers' small ResNets and ResNet-18."""

from collections.abc import Sequence

import torchvision
from torch import nn
from torchvision.models import ResNet18_Weights
from torchvision.models.resnet import BasicBlock

from fairflower.errors import ConfigError
from fairflower.models import PlainNetwork
from fairflower.models.pretrained import copy_into, load_weights


class ResNet(PlainNetwork):
    """torchvision's ResNet with basic blocks; its last layer is the ``head``.

    ``blocks`` are the numbers of blocks in the four stages (64, 128, 256 and 512 channels). The
    features are the means of the last feature maps, [N, 512].
    """

    def __init__(self, blocks: Sequence[int], num_classes: int) -> None:
        network = torchvision.models.ResNet(BasicBlock, list(blocks), num_classes)
        head, network.fc = network.fc, nn.Identity()
        super().__init__(network, head)


def resnet10(num_classes: int, shape: tuple[int, int, int]) -> ResNet:
    """Build ResNet-10 for small images, the network of FedHEAL and FedEquilibria.

    It has one block per stage, and 4,903,242 parameters for color images and ten classes.
    """
    return _small_image_resnet((1, 1, 1, 1), num_classes, shape)


def resnet12(num_classes: int, shape: tuple[int, int, int]) -> ResNet:
    """Build ResNet-12: ResNet-10 with a second block in the first stage, 4,977,226 parameters."""
    return _small_image_resnet((2, 1, 1, 1), num_classes, shape)


def resnet18(num_classes: int, shape: tuple[int, int, int], weights: str = "") -> ResNet:
    """Build torchvision's ResNet-18, the network of FedISM, with a 7x7 stem and a max-pool.

    ``weights`` are ``imagenet`` for torchvision's ``IMAGENET1K_V1``, which are downloaded once to
    torch's cache; a file with the state dict of a ``resnet18``, whose head is ignored; or empty for
    random weights. The ImageNet weights expect images that are normalized with ImageNet's mean and
    standard deviation. Of the built-in data sets, digits, office-caltech, pacs, ham10000, isic2019
    and rsna-ich are normalized in this way.

    Raises ``ConfigError`` if the weights are missing or belong to another network, or the images do
    not have 3 channels.
    """
    model = ResNet((2, 2, 2, 2), num_classes)
    if weights:
        if shape[0] != 3:
            raise ConfigError(
                f"model.weights = {weights!r}: these weights are for images with 3 channels, but "
                f"the data have {shape[0]}. Leave model.weights empty."
            )
        arrays = load_weights(weights, ResNet18_Weights.IMAGENET1K_V1)
        copy_into(model.body, arrays, "fc.", "torchvision's resnet18", weights)
    elif shape[0] != 3:
        model.body.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.body.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model


vars(resnet18).update(sent_whole=True)


def _small_image_resnet(
    blocks: Sequence[int], num_classes: int, shape: tuple[int, int, int]
) -> ResNet:
    """Build a ResNet with a 3x3 stem, without max-pool and with PyTorch's initialization.

    The stem has stride 1. torchvision initializes convolutions from another distribution (He et al.
    2015, fan-out), but FedHEAL's released network uses PyTorch's default.
    """
    model = ResNet(blocks, num_classes)
    model.body.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    model.body.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
            module.reset_parameters()
    return model
