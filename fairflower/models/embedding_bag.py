"""Bag of embeddings, the default model for texts."""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch import Tensor, nn

from fairflower.arguments import Range
from fairflower.models import Classifier


class EmbeddingBag(Classifier):
    """Linear classifier on the mean token embedding of a text, as in fastText.

    A. Joulin, E. Grave, P. Bojanowski, T. Mikolov, *Bag of tricks for efficient text
    classification* (EACL 2017), without n-grams. The order of the tokens does not matter. Zeros,
    which pad short texts, are ignored.

    Parameters
    ----------
    width
        Dimension of an embedding. Default 64.
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
        there = x > 0
        # The row of padding is 0 until a strategy adds noise to it.
        mean: Tensor = (self.tokens(x) * there.unsqueeze(-1)).sum(1)
        return mean / there.sum(1, keepdim=True).clamp(min=1)
