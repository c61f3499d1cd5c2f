"""Several labels for each example, of which some may be unknown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fairflower.numerics import Vector
from fairflower.numerics.metrics import auc_ovo
from fairflower.numerics.scores import AUC, F1, MACRO_F1, by_label
from fairflower.tasks import Means, Targets, Task, Tensor, check_numbers


class MultiLabel(Task):
    """Several labels for each example: targets 0, 1 or NaN (unknown), float32 [N, C].

    A logit per label; the loss of an example is the mean binary cross entropy of its known labels,
    and 0 if it has none. The primary score is the mean AUC over labels, which leaves out labels
    that are all 0 or all 1 in a domain. Macro F1 is the mean over labels of
    ``2 TP / (2 TP + FP + FN)`` of the predictions (a logit above 0), without labels for which all
    three are 0. ``auc_<k>`` and ``f1_<k>`` are those of label k, from 0.
    """

    scores = AUC, MACRO_F1
    label_scores = AUC, F1
    keeps = "outputs"
    undefined: ClassVar = {
        "auc": "no label is known to be 0 and 1",
        "macro_f1": "no label is known or predicted to be 1",
    }

    def read(self, values: Targets, num_outputs: int | None = None) -> Targets:
        expected = f"0, 1 or NaN for an unknown label [N, {num_outputs or 'labels'}]"
        shaped = values.ndim == 2 and values.shape[1] == (num_outputs or values.shape[1]) > 0
        check_numbers(values, expected, shaped, missing=True)
        if wrong := np.setdiff1d(values[~np.isnan(values)], (0, 1)).tolist():
            raise ValueError(f"found {wrong[0]}; expected {expected}")
        return values.astype(np.float32)

    def num_outputs(self, targets: Targets) -> int:
        return int(targets.shape[1])

    def made_up(self, n: int, num_outputs: int, shape: tuple[int, ...]) -> Targets:
        return np.arange(n * num_outputs, dtype=np.float32).reshape(n, num_outputs) % 2

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        from torch.nn import functional as F

        known = ~y.isnan()
        each = F.binary_cross_entropy_with_logits(output, y.nan_to_num(), reduction="none")
        return (each * known).sum(1) / known.sum(1).clamp(min=1)

    def predict(self, output: Tensor) -> Tensor:
        return (output > 0).to(output.dtype)

    def table(self, output: Tensor, names: Sequence[str]) -> dict[str, Any]:
        shares = output.double().sigmoid().numpy().T
        return {f"probability of {name}": p for name, p in zip(names, shares, strict=True)}

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        guess = output > 0
        return super().sums(output, y) | {
            "true_positives": (guess & (y == 1)).sum(0),
            "wrong": ((guess & (y == 0)) | (~guess & (y == 1))).sum(0),
        }

    def score(self, means: Means) -> dict[str, float]:
        right, wrong = np.asarray(means["true_positives"]), np.asarray(means["wrong"])
        with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: undefined
            each = 2 * right / (2 * right + wrong)
        found = by_label({"f1": each})
        return {"macro_f1": found.pop("f1")} | found

    def whole(self, y: Targets, predictions: Targets, outputs: Vector) -> dict[str, float]:
        known = enumerate(~np.isnan(y.T))
        # Of two columns, the second counts, and logits order examples as their probabilities do.
        each = [auc_ovo(y[rows, k], outputs[:, [k, k]][rows]) for k, rows in known]
        return by_label({"auc": np.array(each)})

    def count_label(self, y: Targets, k: int) -> dict[str, int]:
        return {"known": int((~np.isnan(y[:, k])).sum()), "positive": int((y[:, k] == 1).sum())}

    def guess(self, num_outputs: int) -> float | None:
        return math.log(2)
