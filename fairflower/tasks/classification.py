"""One class per example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairflower.numerics import Vector, metrics
from fairflower.numerics.scores import ACCURACY, BALANCED_ACCURACY
from fairflower.tasks import Means, Reduction, Targets, Task, Tensor

#: Upper bound on labels if the number of classes is not declared.
MAX_CLASSES = 2**16


class Classification(Task):
    """One class per example: targets int64 [N], cross entropy of logits [B, classes].

    The primary score is accuracy. Balanced accuracy is the mean recall over a domain's classes; the
    server also computes the one-vs-one AUC with ``evaluate.auc``.
    """

    scores = ACCURACY, BALANCED_ACCURACY
    dtype = np.int64
    classes = True
    keeps = "predictions"

    def read(self, values: Targets, num_outputs: int | None = None) -> Targets:
        if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
            found = f"found {values.dtype} {list(values.shape)}; expected whole-number labels [N]"
            other = " (or another task, such as data.task = 'regression')"
            raise ValueError(found + other * (values.dtype.kind == "f"))
        most = (num_outputs or MAX_CLASSES) - 1
        if len(values) and not 0 <= values.min() <= values.max() <= most:
            found = f"labels from {values.min()} to {values.max()}"
            raise ValueError(f"found {found}; expected 0 to {most}, the class numbers")
        return values.astype(np.int64, copy=False)

    def num_outputs(self, targets: Targets) -> int:
        return 1 + int(targets.max(initial=-1))

    def strata(self, targets: Targets) -> Targets:
        return targets

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        from torch.nn import functional as F

        if y.ndim != 1 or y.is_floating_point():
            raise ValueError(
                f"A batch has labels of shape {tuple(y.shape)} and type {y.dtype}: expected class "
                "numbers [B], integers."
            )
        if output.ndim != 2 or output.shape[1] < 2:  # of one logit it would always be 0
            raise ValueError(
                f"The network returns logits of shape {tuple(output.shape)}: expected [B, classes] "
                "with at least two classes. For two classes, return two logits."
            )
        return F.cross_entropy(output, y, reduction=reduction)

    def predict(self, output: Tensor) -> Tensor:
        return output.argmax(1)

    def table(self, output: Tensor, names: Sequence[str]) -> dict[str, Any]:
        shares = output.double().softmax(1).numpy().T
        found = np.array(names, object)[self.predict(output).numpy()]
        each = zip(names, shares, strict=True)
        return {"prediction": found, **{f"probability of {name}": p for name, p in each}}

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().sums(output, y) | {"accuracy": (self.predict(output) == y).sum()}

    def score(self, means: Means) -> dict[str, float]:
        return {"accuracy": means["accuracy"]}

    def whole(self, y: Targets, predictions: Targets, outputs: Vector) -> dict[str, float]:
        return {"balanced_accuracy": metrics.balanced_accuracy(y, predictions)}

    def guess(self, num_outputs: int) -> float | None:
        return math.log(num_outputs)
