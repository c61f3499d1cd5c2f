"""FedMix's averaged images (Yoon et al., ICLR 2021)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.records import InvalidReply


class AveragedBatches(Exchange):
    """Averages of batches of every client's images and labels, sent to all clients.

    Clients return ``images`` [M, C, H, W] and ``labels`` [M, classes]. The server sends the latest
    arrays of every client that has been in a cohort, concatenated in the order of client ids.
    """

    name = "averages"
    mean_of = "batch"
    STATE = ("images", "labels")

    def __init__(self) -> None:
        self.images: dict[int, NDArray[np.float32]] = {}  # client -> [M, C, H, W]
        self.labels: dict[int, NDArray[np.float32]] = {}  # client -> [M, classes]

    def broadcast(self, server_round: int) -> Arrays:
        clients = sorted(self.images)
        if not clients:
            return {}
        return {
            "images": np.concatenate([self.images[k] for k in clients]),
            "labels": np.concatenate([self.labels[k] for k in clients]),
        }

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        if set(arrays) != {"images", "labels"}:
            raise InvalidReply(f"expected the arrays 'images' and 'labels', got {sorted(arrays)}")
        images, labels = arrays["images"], arrays["labels"]
        if images.ndim != 4 or labels.ndim != 2 or len(images) != len(labels):
            raise InvalidReply(
                f"'images' has shape {images.shape} and 'labels' {labels.shape}, expected "
                "[M, C, H, W] and [M, classes]"
            )
        if len(images) > num_examples:
            raise InvalidReply(
                f"it sent {len(images)} averages, more than its {num_examples:.0f} images"
            )
        for kept, got in ((self.images, images), (self.labels, labels)):
            shape = next(iter(kept.values())).shape[1:] if kept else got.shape[1:]
            if got.shape[1:] != shape:
                raise InvalidReply(
                    f"its averages have shape {got.shape[1:]}, but other clients sent {shape}"
                )
        for name, array in arrays.items():
            if array.dtype != np.float32 or not np.isfinite(array).all():
                raise InvalidReply(f"{name!r} holds values that are not finite 32-bit numbers")
        if (labels < 0).any() or not np.allclose(labels.sum(1), 1, atol=1e-4):
            raise InvalidReply("each row of 'labels' must hold non-negative numbers that sum to 1")
        return arrays

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        return (*arrays["images"].shape[1:], *arrays["labels"].shape[1:])

    def collect(self, cohort: Cohort) -> None:
        for client, arrays in zip(cohort.client_ids, cohort.measured[self.name], strict=True):
            self.images[client] = np.array(arrays["images"])
            self.labels[client] = np.array(arrays["labels"])
