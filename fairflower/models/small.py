"""The default models, small networks for images, features, texts, and the next token of a text."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.arguments import Range
from fairflower.errors import ConfigError
from fairflower.models import Classifier

_SMALLEST = 8  # pixels, which three poolings reduce to 1


def check_pixels(name: str, height: int, width: int) -> None:
    """Raise ``ConfigError`` if images are smaller than 8x8 pixels."""
    if min(height, width) < _SMALLEST:
        raise ConfigError(
            f"model.name = {name!r} needs images of at least {_SMALLEST}x{_SMALLEST} pixels, but "
            f"the images are {height}x{width}. Increase data.image-size."
        )


def norm_layer(kind: Literal["group", "batch"], channels: int) -> nn.Module:
    """Return batch norm, or group norm with four groups (Wu & He 2018)."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(4, channels)


def mean_of_places(features: Tensor, x: Tensor) -> Tensor:
    """Return the mean of features [N, L, D] over places at which x [N, L] is no padding, [N, D]."""
    there = (x > 0).unsqueeze(-1)
    return (features * there).sum(1) / there.sum(1).clamp(min=1)


class CNN(Classifier):
    """Three 3x3 convolutions with 16, 32 and 64 channels, each followed by pooling, norm and ReLU.

    Group norm (Wu & He 2018) does not store statistics of a client's data, so averaging the
    parameters averages the whole model. Pooling comes before the norm instead of after the ReLU.
    The norm therefore processes a quarter of the pixels, and a training step takes up to 30 % less
    time. The head uses all positions of the feature maps; a head on their mean is far less accurate
    on digits after 15 rounds. Images must be at least 8x8 pixels. ``norm = "batch"`` is for methods
    that handle BatchNorm layers, such as FedBN.
    """

    def __init__(
        self,
        num_classes: int,
        shape: tuple[int, int, int],
        *,
        norm: Literal["group", "batch"] = "group",
    ) -> None:
        super().__init__()
        channels, height, width = shape
        check_pixels("cnn", height, width)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm1 = norm_layer(norm, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, 32)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm3 = norm_layer(norm, 64)
        self.head = nn.Linear(64 * (height // 8) * (width // 8), num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Map normalized images [N, C, H, W] to flattened feature maps [N, 64 * H/8 * W/8]."""
        x = F.relu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        x = F.relu(self.norm2(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.norm3(F.max_pool2d(self.conv3(x), 2)))
        return x.flatten(1)


class MLP(Classifier):
    """Two hidden layers with ReLU, for features or the flattened pixels of an image.

    The network has no norm layers, because batch statistics depend on a client's data and their
    averages do not fit any client. Features must therefore be standardized
    (`fairflower.data.FeatureSet`). Both hidden layers have ``hidden`` units.
    """

    kinds: ClassVar[tuple[str, ...]] = ("features", "images")

    def __init__(
        self,
        num_classes: int,
        shape: tuple[int, ...],
        *,
        hidden: Annotated[int, Range(1, 16384)] = 64,
    ) -> None:
        super().__init__()
        self.layer1 = nn.Linear(math.prod(shape), hidden)
        self.layer2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Map normalized features [N, D], or images [N, C, H, W], to [N, hidden]."""
        return self.layer2(self.layer1(x.flatten(1)).relu()).relu()


class EmbeddingBag(Classifier):
    """Linear classifier on the mean token embedding of a text, as in fastText.

    A. Joulin, E. Grave, P. Bojanowski, T. Mikolov, *Bag of tricks for efficient text
    classification* (EACL 2017), without n-grams. The order of the tokens does not matter. Zeros,
    which pad short texts, are ignored. An embedding has ``width`` dimensions.
    """

    kinds: ClassVar[tuple[str, ...]] = ("tokens",)

    def __init__(
        self,
        num_classes: int,
        shape: tuple[int, int],
        *,
        width: Annotated[int, Range(1, 16384)] = 64,
    ) -> None:
        super().__init__()
        vocabulary, _ = shape
        # nn.EmbeddingBag is not used, because a GPU sums its gradients in random order.
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Map token ids, int64 [N, L], to the mean of their embeddings [N, width]."""
        # Without padding, whose row is 0 only until a strategy adds noise to it.
        return mean_of_places(self.tokens(x), x)


class GPT(Classifier):
    """A causal transformer with norms before its layers, as in GPT-2, and learnt positions.

    A. Radford et al., *Language models are unsupervised multitask learners* (2019). ``width`` is
    the number of dimensions of a token, ``layers`` are those of attention and of a hidden layer of
    four times the width, and ``heads`` those of attention. There is no dropout, and the head has
    weights of its own. Its output for an example is logits [L, vocabulary].
    """

    kinds: ClassVar[tuple[str, ...]] = ("tokens",)
    output_dims = (2,)

    def __init__(
        self,
        num_classes: int,
        shape: tuple[int, int],
        *,
        width: Annotated[int, Range(1, 16384)] = 64,
        layers: Annotated[int, Range(1, 256)] = 2,
        heads: Annotated[int, Range(1, 256)] = 4,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"model.name = 'gpt': width = {width} is not divisible by heads = {heads}. Set "
                "width to a multiple of heads."
            )
        vocabulary, length = shape
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():  # as GPT-2
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def features(self, x: Tensor) -> Tensor:
        """Map token ids, int64 [N, L], to a vector for each place, [N, L, width]."""
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def represent(self, x: Tensor) -> Tensor:
        """Map token ids to the mean of the vectors at their places, without padding, [N, width]."""
        return mean_of_places(self.features(x), x)


class _Block(nn.Module):
    """Attention to the places up to each place, and a hidden layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layer1, self.layer2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [N, heads, L, width / heads]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.layer1(self.norm2(x)), approximate="tanh")
        return x + self.layer2(hidden)
