"""A small causal transformer, which predicts the next token at each place of a text."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.arguments import Range
from fairflower.errors import ConfigError
from fairflower.models import Classifier
from fairflower.models.small import mean_of_places


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
        return self.norm(x)  # type: ignore[no-any-return]

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
        return x + self.layer2(hidden)  # type: ignore[no-any-return]
