"""Class prototypes (FedProto, Tan et al., AAAI 2022; FedProc, Mu et al., FGCS 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.bounds import clip_factors
from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.records import InvalidReply, NotFinite, is_real

#: Largest count of a class on a client; sums of larger counts would overflow.
MAX_IMAGES = 2**40


class Prototypes(Exchange):
    """Mean feature vector of every class over all clients' images.

    Clients return the class means of their images, ``mean`` [C, d], and the numbers of images,
    ``count`` [C]. The server averages the means with these counts as weights (FedProto's Eq. 6; its
    released code weights clients equally) and sends ``mean`` and ``count``. A class without images
    in a round keeps its prototype. A class without a prototype has count 0.
    """

    name = "prototypes"
    mean_of = "class"
    STATE = ("mean", "count")

    def __init__(self) -> None:
        self.mean: NDArray[np.float32] | None = None
        self.count: NDArray[np.int64] | None = None

    def broadcast(self, server_round: int) -> Arrays:
        if self.mean is None or self.count is None:
            return {}
        return {"mean": self.mean, "count": self.count}

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        if set(arrays) != {"mean", "count"}:
            raise InvalidReply(f"expected the arrays 'mean' and 'count', got {sorted(arrays)}")
        mean, count = arrays["mean"], arrays["count"]
        # The linear head of a network has one row per class and one column per feature.
        known = [a.shape for a in trained.values() if a.ndim == 2]
        shapes = known if self.mean is None else [self.mean.shape]
        if mean.shape not in shapes or count.shape != mean.shape[:1]:
            raise InvalidReply(
                f"'mean' has shape {mean.shape} and 'count' {count.shape}, expected one row per "
                f"class and one column per feature, {' or '.join(map(str, shapes))}"
            )
        with np.errstate(over="ignore"):
            finite = is_real(mean) and np.isfinite(mean.astype(np.float32)).all()
        if not finite:
            wrong = NotFinite if is_real(mean) else InvalidReply
            raise wrong("'mean' holds values that are not finite 32-bit numbers")
        if count.dtype.kind != "i" or (count < 0).any():
            raise InvalidReply("'count' must hold non-negative integers")
        if (count > MAX_IMAGES).any():
            raise InvalidReply(
                f"'count' has {count.max()} images for a class; expected at most 2**40"
            )
        if count.sum() > num_examples:
            raise InvalidReply(f"'count' has {count.sum()} images in total, above num-examples")
        return arrays

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        return arrays["mean"].shape

    def bound(self, returned: Sequence[Arrays], median: float) -> Sequence[Arrays]:
        # The longest prototype of each client, so that each client counts once in the median.
        norms = [
            np.linalg.norm(r["mean"][r["count"] > 0].astype(np.float64), axis=1).max(initial=0)
            for r in returned
        ]
        factors = clip_factors(np.array(norms), median=median)
        return [
            {**r, "mean": np.asarray(f * r["mean"], r["mean"].dtype)}
            for f, r in zip(factors, returned, strict=True)
        ]

    def collect(self, cohort: Cohort) -> None:
        returned = cohort.measured[self.name]
        total = np.zeros(returned[0]["mean"].shape, np.float64)
        count = np.zeros(len(total), np.int64)
        for arrays in returned:
            total += arrays["count"][:, None] * arrays["mean"].astype(np.float64)
            count += arrays["count"]
        if self.mean is None or self.count is None:
            self.mean, self.count = np.zeros(total.shape, np.float32), np.zeros_like(count)
        seen = count > 0
        self.mean, self.count = self.mean.copy(), self.count.copy()
        self.mean[seen] = total[seen] / count[seen, None]
        self.count[seen] = count[seen]
