"""Base of the methods that look at the representation, and what they share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fairflower.models import Classifier
from fairflower.training.gradients import Batches, batches_of
from fairflower.training.modes import at_least_float32, eval_mode
from fairflower.training.trainer import Trainer


class FeatureTrainer(Trainer):
    """Local training whose loss sees a network's features z [B, d] beside its logits.

    The model has to be a `fairflower.models.Classifier`, which tells the two apart, or it
    is a ``TypeError``.
    """

    model: Classifier

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(require_classifier(model, type(self).__name__), *args, **options)
        self._extractor = _Features(self.model)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, d] and logits [B, classes] of one pass through the network."""
        z = at_least_float32(self.model.features(x))
        return z, self.model.head(z)

    def frozen_features(self, arrays: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Features [B, d] that the network has with other arrays: eval mode, no gradient.

        The arrays are lent to the worker's one model for the call, so that nothing is
        copied, and batch norm uses, and leaves alone, their running statistics.
        """
        lent = {f"model.{name}": tensor for name, tensor in arrays.items()}
        with torch.no_grad(), eval_mode(self.model):
            z: Tensor = functional_call(self._extractor, lent, (x,))
        return at_least_float32(z)


class PrototypeTrainer(FeatureTrainer):
    """Local training with class prototypes (the exchange ``prototypes``).

    Afterwards the client returns its class means: of the trained network's features,
    in eval mode, of the training images as they are, with the number of images.
    """

    #: The server's, [C, d]; None before anybody has returned any.
    prototypes: Tensor | None
    #: Which classes have one, bool [C].
    known: Tensor

    def begin(self, server_round: int) -> None:
        """Read the prototypes."""
        arrays = self.to_device(self.shared.get("prototypes", {}))
        self.prototypes = None
        if arrays and arrays["count"].any():
            self.prototypes, self.known = arrays["mean"], arrays["count"] > 0

    def end(self, server_round: int) -> None:
        """Return ``mean`` [C, d], zero for an absent class, and ``count`` [C] of images."""
        batches = self.train_examples.eval_batches(self.eval_batch_size)
        with torch.no_grad(), eval_mode(self.model):
            pairs = ((self.model.features(x), y) for x, y in batches)
            total, count = _class_sums(pairs, self.data.num_classes)
        mean = total / count.clamp(min=1)[:, None]
        arrays = {"mean": mean.float(), "count": count.long()}
        self.returns["prototypes"] = {name: array.cpu().numpy() for name, array in arrays.items()}


@torch.no_grad()
def mean_representation(
    model: nn.Module, data: Batches, represent: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Mean of what tells a client's type, balanced over its classes: FedGCR's h~ (Eq. 4), [d].

    ``h = 1/C sum_c 1/n_c sum_{x of class c} represent(x)``, over the C classes that the client
    has, so that it does not show how often it has them. Taken before training it is
    ``received_representation``, and after it ``representation``. ``represent`` gives features
    [B, d] of inputs; by default a `Classifier`'s own. The model is in eval mode for it and is
    left as it was found. ``model``, ``data`` and errors are those of
    `fairflower.training.gradients.mean_gradient`.
    """
    represent = represent or require_classifier(model, "A representation").represent
    with eval_mode(model):
        pairs = [(represent(x), y) for x, y in batches_of(model, data)]
    if not pairs:
        raise ValueError("There are no samples to represent. Give at least one.")
    total, count = _class_sums(pairs, 1 + max(int(y.max()) for _, y in pairs))
    held = count > 0
    return {"h": (total[held] / count[held, None]).mean(0).float()}


def _class_sums(pairs: Iterable[tuple[Tensor, Tensor]], classes: int) -> tuple[Tensor, Tensor]:
    """Sums [C, d] over each class of features [B, d] and labels [B], and counts [C]; float64."""
    total = count = torch.zeros((), dtype=torch.float64)
    for z, y in pairs:
        members = F.one_hot(y, classes).double()
        # A product, since index_add on a GPU adds in any order.
        total = total + members.T @ z.double()
        count = count + members.sum(0)
    return total, count


def require_classifier(model: nn.Module, who: str) -> Classifier:
    """Give the model back if it tells features from logits; raise ``TypeError`` if not."""
    if not isinstance(model, Classifier):
        raise TypeError(
            f"{who} looks at a network's features, and {type(model).__name__} does not say "
            "which they are. Make it a fairflower.models.Classifier: set head, define features(x)."
        )
    return model


class _Features(nn.Module):
    """Calls ``features`` where functional_call only knows ``forward``."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.features(x)
