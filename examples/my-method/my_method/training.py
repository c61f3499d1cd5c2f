import math
from typing import Annotated

from torch import nn
from torch.nn import functional as F

from fairflower.arguments import Range
from fairflower.clients import Trainer
from fairflower.models import Classifier


class Smooth(Trainer):
    """Train on smoothed labels."""

    def __init__(self, *args, smoothing: Annotated[float, Range(0, 1)] = 0.1, **options):
        super().__init__(*args, **options)
        self.smoothing = smoothing

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y, label_smoothing=self.smoothing)


class Shallow(Classifier):
    """One hidden layer."""

    def __init__(self, classes, shape, *, hidden: Annotated[int, Range(1)] = 32):
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), hidden)
        self.head = nn.Linear(hidden, classes)

    def features(self, x):
        return self.layer(x.flatten(1)).relu()
