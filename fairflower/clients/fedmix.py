"""FedMix (Yoon, Shin, Hwang, Yang, ICLR 2021)."""

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range
from fairflower.exchanges.stored import AveragedBatches
from fairflower.files import Arrays
from fairflower.training.modes import plain_attention
from fairflower.training.trainer import Trainer


class FedMix(Trainer):
    """Local training with Mixup of the client's images and averages of other clients' images.

    Let x' be an averaged image and y' its averaged label. The loss is that of Mixup, expanded to
    first order in lambda at ``u = (1 - lambda) x``, and averaged over the batch::

        (1 - lambda) CE(f(u), y) + lambda CE(f(u), y') + lambda <d CE(f(u), y) / du, x'>

    Each step uses the next of the averages that the server shares, in random order. Without
    averages, as in the first round, the loss is the cross entropy. The last term needs second
    derivatives, so a step costs about as much as three plain steps.

    **Privacy: averages of images and labels are sent to all clients.** Each average is over
    ``train.batch-size`` images, or over all images of a client that has fewer. A client averages
    the same images in every round. A client with a single image sends no average.

    Parameters
    ----------
    lambda_
        Weight of the averages. Default 0.05 (as in FedGCR's comparison; the paper uses 0.05 and
        larger values).
    batches
        Maximum number of averages that a client sends. Default 2 (as in FedGCR's comparison).

    See Also
    --------
    HarmoFL : Shares amplitudes of images instead of images.

    Examples
    --------
    >>> from fairflower.clients.fedmix import FedMix
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedMix(tiny_model(), data(train=16), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> {name: array.shape for name, array in client.returns["averages"].items()}
    {'images': (2, 1, 8, 8), 'labels': (2, 4)}
    """

    paper = "Yoon et al., ICLR 2021"
    kinds = ("images",)
    needed = "classes"
    exchanges = (AveragedBatches,)

    def __init__(
        self,
        *args: Any,
        lambda_: Annotated[float, Range(0, 1)] = 0.05,
        batches: Annotated[int, Range(1)] = 2,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.lambda_ = lambda_
        self.batches = int(batches)

    def begin(self, server_round: int) -> None:
        self.images: Tensor | None = None
        arrays = self.shared.get("averages")
        if arrays is None or not len(arrays["images"]):
            return
        draws = torch.Generator().manual_seed(self.derive_seed(server_round, "averages"))
        order = torch.randperm(len(arrays["images"]), generator=draws).numpy()
        self.images = torch.tensor(arrays["images"][order], device=self.device)
        self.labels = torch.tensor(arrays["labels"][order], device=self.device)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.images is None:
            return super().loss(x, y)
        other = self.images[self.steps % len(self.images)]
        label = self.labels[self.steps % len(self.images)].expand(len(x), -1)
        u = ((1 - self.lambda_) * x.detach()).requires_grad_()
        with plain_attention():
            logits = self.model(u)
            local = self.criterion(logits, y)
            # Gradient of the batch mean: already divided by the batch size.
            (slope,) = torch.autograd.grad(local, u, create_graph=True)
        # No logit adjustment: the client's class frequencies do not apply to others' labels.
        mixed = F.cross_entropy(logits, label)
        along = (slope * other).sum()
        return (1 - self.lambda_) * local + self.lambda_ * (mixed + along)

    def end(self, server_round: int) -> None:
        self.returns["averages"] = self.averages()

    def averages(self) -> Arrays:
        """Return ``images`` [M, C, H, W], normalized, and ``labels`` [M, classes], both float32."""
        x, y = self.data.train
        classes = self.data.num_classes
        size = max(min(self.settings.batch_size, len(y)), 2)
        count = min(self.batches, len(y) // size)
        # Round 0 in the seed selects the same images in every round, because different averages of
        # these images would reveal more about them.
        draws = np.random.default_rng(self.derive_seed(0, "averages"))
        groups = draws.permutation(len(y))[: count * size].reshape(count, size)
        mean, std = (np.reshape(a, (-1, 1, 1)) for a in (self.data.mean, self.data.std))
        images = [(x[group].mean(0) / 255 - mean) / std for group in groups]
        labels = [np.bincount(y[group], minlength=classes) / size for group in groups]
        return {
            "images": np.array(images, np.float32).reshape(count, *x.shape[1:]),
            "labels": np.array(labels, np.float32).reshape(count, classes),
        }
