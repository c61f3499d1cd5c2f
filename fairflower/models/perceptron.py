"""Multilayer perceptron, the default model for features."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from torch import Tensor, nn

from fairflower.arguments import Range
from fairflower.models import Classifier


class MLP(Classifier):
    """Two hidden layers with ReLU, for features or the flattened pixels of an image.

    The network has no norm layers, because batch statistics depend on a client's data and their
    averages do not fit any client. Features must therefore be standardized
    (`fairflower.data.FeatureSet`).

    Parameters
    ----------
    hidden
        Width of both hidden layers. Default 64.
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
        return self.layer2(self.layer1(x.flatten(1)).relu()).relu()  # type: ignore[no-any-return]
