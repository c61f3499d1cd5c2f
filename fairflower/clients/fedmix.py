"""FedMix (Yoon, Shin, Hwang, Yang, ICLR 2021)."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairflower.arguments import Range
from fairflower.exchanges.averages import AveragedBatches
from fairflower.training.trainer import Arrays, Trainer


class FedMix(Trainer):
    """Mixup with averages of other clients' images, which therefore leave the clients.

    With an averaged image x' and its averaged label y', their loss is Mixup's, expanded
    to first order in lambda::

        (1 - lambda) CE(f(u), y) + lambda CE(f(u), y') + lambda <d CE(f(u), y) / du, x'>

    at ``u = (1 - lambda) x``, averaged over the batch. Each step takes one of the averages
    that the server shares, all of them in random order; without any (the first round),
    it is the cross entropy. The last term is differentiated twice: about three times
    the work of a plain step.

    **An average of a batch is sent to all clients**, images and labels. Each is over
    ``train.batch-size`` images, all of them where a client has fewer, and always over the
    same ones. A client with a single image sends none.

    Parameters
    ----------
    lambda_
        Default 0.05 (the comparison in FedGCR; the original: 0.05 and more).
    batches
        Averages that a client sends, at most. Default 2 (likewise).
    """

    paper = "Yoon et al., ICLR 2021"
    kinds = ("images",)
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
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels cannot be differentiated twice
            logits = self.model(u)
            own = self.criterion(logits, y)
            # Of the mean: every image's gradient is already divided by their number.
            (slope,) = torch.autograd.grad(own, u, create_graph=True)
        # The client's class frequencies say nothing of others' labels: no adjustment.
        mixed = F.cross_entropy(logits, label)
        along = (slope * other).sum()
        return (1 - self.lambda_) * own + self.lambda_ * (mixed + along)

    def end(self, server_round: int) -> None:
        self.returns["averages"] = self.averages()

    def averages(self) -> Arrays:
        """``images`` [M, C, H, W], normalised, and ``labels`` [M, classes], both float32."""
        x, y = self.data.train
        classes = self.data.num_classes
        size = max(min(self.settings.batch_size, len(y)), 2)
        count = min(self.batches, len(y) // size)
        # Round 0: the same images in every round, as more averages would tell more of them.
        draws = np.random.default_rng(self.derive_seed(0, "averages"))
        groups = draws.permutation(len(y))[: count * size].reshape(count, size)
        mean, std = (np.reshape(a, (-1, 1, 1)) for a in (self.data.mean, self.data.std))
        images = [(x[group].mean(0) / 255 - mean) / std for group in groups]
        labels = [np.bincount(y[group], minlength=classes) / size for group in groups]
        return {
            "images": np.array(images, np.float32).reshape(count, *x.shape[1:]),
            "labels": np.array(labels, np.float32).reshape(count, classes),
        }
