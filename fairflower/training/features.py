"""Base classes of trainers that use features, and the mean representation of a client."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fairflower.models import Classifier, exchanged_arrays, require_classifier
from fairflower.training.device import float64_on
from fairflower.training.gradients import Batches, batches_of, checked_count
from fairflower.training.modes import at_least_float32, eval_mode
from fairflower.training.trainer import Trainer


class FeatureTrainer(Trainer):
    """Base class of trainers whose loss uses the network's features z [B, d] and its logits.

    Raises ``TypeError`` if the model is not a `fairflower.models.Classifier`.
    """

    model: Classifier
    needed = "head"

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(require_classifier(model, type(self).__name__), *args, **options)
        self._extractor = _Features(self.model)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, d] and logits [B, classes] of a forward pass."""
        z = at_least_float32(self.model.features(x))
        return z, self.model.head(z.to(self.model.head.weight.dtype))

    def features_with(self, arrays: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the network's features [B, d] with other arrays, in eval mode, without gradients.

        The arrays replace those of the model during the call, without a copy. Batch norm uses their
        running statistics and does not update them.
        """
        own = exchanged_arrays(self.model)  # bfloat16 was sent and stored as float32
        lent = {f"model.{name}": tensor.to(own[name].dtype) for name, tensor in arrays.items()}
        with torch.no_grad(), eval_mode(self.model):
            return at_least_float32(functional_call(self._extractor, lent, (x,)))


class PrototypeTrainer(FeatureTrainer):
    """Base class of trainers with class prototypes (`Prototypes`, their first exchange).

    After training, the client returns, for each class, the number of its training images and the
    mean of their features, which the trained network computes in eval mode, without augmentation.
    """

    needed = "classes"

    #: Prototypes from the server, [C, d]; None before any client has returned prototypes.
    prototypes: Tensor | None
    #: Whether each class has a prototype, bool [C].
    known: Tensor

    def begin(self, server_round: int) -> None:
        """Read the server's prototypes from ``shared``."""
        arrays = self.to_device(self.shared.get("prototypes", {}))
        self.prototypes = None
        if arrays and arrays["count"].any():
            self.prototypes, self.known = arrays["mean"], arrays["count"] > 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy and, if there are prototypes, with `terms` added in order."""
        z, logits = self.outputs(x)
        loss = self.criterion(logits, y)
        return loss if self.prototypes is None else sum(self.terms(z, y, self.prototypes), loss)

    def terms(self, z: Tensor, y: Tensor, prototypes: Tensor) -> Iterable[Tensor]:
        """Return what prototypes add to the loss of features z [B, d] of classes y [B]."""
        return ()

    def end(self, server_round: int) -> None:
        """Write the class means ``mean`` [C, d], 0 for absent classes, and ``count`` [C]."""
        batches = self.train_examples.eval_batches(self.eval_batch_size)
        with torch.no_grad(), eval_mode(self.model):
            pairs = ((self.model.features(x), y) for x, y in batches)
            total, count = _class_sums(pairs, self.data.num_classes)
        mean = total / count.clamp(min=1)[:, None]
        arrays = {"mean": mean.float(), "count": count.long()}
        sent = {name: array.cpu().numpy() for name, array in arrays.items()}
        self.returns[self.exchanges[0].name] = sent


class ClusterTrainer(PrototypeTrainer):
    """Base class of trainers with several prototypes, [P, d], for a class (`ClusterPrototypes`)."""

    #: The prototypes' classes, [P].
    label: Tensor
    #: The mean of each class's prototypes, [C, d].
    unbiased: Tensor

    def begin(self, server_round: int) -> None:
        """Read the server's prototypes from ``shared``."""
        arrays = self.to_device(self.shared.get(self.exchanges[0].name, {}))
        self.prototypes = arrays.get("mean")
        if self.prototypes is not None:
            self.label = arrays["label"]
            members = F.one_hot(self.label, self.data.num_classes).T.to(self.prototypes.dtype)
            self.known = members.any(1)
            self.unbiased = members @ self.prototypes / members.sum(1, keepdim=True).clamp(min=1)

    def contrast(self, similarity: Tensor, y: Tensor) -> Tensor:
        """Return mean -log( sum_{p of class y} e^s_p / sum_p e^s_p ) for similarities s [B, P].

        An example whose class has no prototype adds 0 to the mean.
        """
        known = self.known[y]
        own = similarity[known].masked_fill(self.label != y[known, None], float("-inf"))
        return (similarity[known].logsumexp(1) - own.logsumexp(1)).sum() / len(y)


@torch.no_grad()
def mean_representation(
    model: nn.Module, data: Batches, represent: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return FedGCR's h~ (Eq. 4), [d]: the mean representation of a client, balanced over classes.

    ``h = 1/C sum_c 1/n_c sum_{x of class c} represent(x)`` over the client's C classes, so that h
    does not depend on the class frequencies. The measurement ``received_representation`` is h
    before training, and ``representation`` is h after training. ``represent`` computes
    representations [B, d] of inputs; by default `Classifier.represent`. The model is in eval mode
    during the call, and is unchanged. For ``model``, ``data`` and errors see
    `fairflower.training.gradients.mean_gradient`.
    """
    represent = represent or require_classifier(model, "A representation").represent
    with eval_mode(model):
        pairs = [(represent(x), y) for x, y in batches_of(model, data)]
    checked_count(len(pairs))
    total, count = _class_sums(pairs, 1 + max(int(y.max()) for _, y in pairs))
    held = count > 0
    return {"h": (total[held] / count[held, None]).mean(0).float()}


def _class_sums(pairs: Iterable[tuple[Tensor, Tensor]], classes: int) -> tuple[Tensor, Tensor]:
    """Return the sum of features and the number of examples per class, [C, d] and [C], float64."""
    total = count = torch.zeros((), dtype=torch.float64)
    for z, y in pairs:
        wide = float64_on(z.device)
        members = F.one_hot(y, classes).to(wide)
        # A matrix product, because index_add on a GPU adds in random order.
        total = total + members.T @ z.to(wide)
        count = count + members.sum(0)
    return total, count


class _Features(nn.Module):
    """Module whose ``forward`` is the model's ``features``, for functional_call."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.features(x)
