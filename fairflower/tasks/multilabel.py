"""Several labels for each example, of which some may be unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fairflower.numerics import Vector
from fairflower.numerics.scores import AUC, Score
from fairflower.tasks import Targets, Task, check_numbers

if TYPE_CHECKING:
    from torch import Tensor

MACRO_F1 = Score("macro_f1", title="F1", phrase="macro F1")


class MultiLabel(Task):
    """Several labels for each example: targets 0, 1 or NaN (unknown), float32 [N, C].

    A logit per label; the loss of an example is the mean binary cross entropy of its known labels,
    and 0 if it has none. The primary score is the mean AUC over labels, which leaves out labels
    that are all 0 or all 1 in a domain; with ``evaluate.by = "clients"`` it is the mean of the
    clients' AUCs. Macro F1 is the mean over labels of ``2 TP / (2 TP + FP + FN)`` of the
    predictions (a logit above 0), without labels for which all three are 0. ``auc_<k>`` and
    ``f1_<k>`` are those of label k, from 0.
    """

    scores = AUC, MACRO_F1
    label_scores = AUC, replace(MACRO_F1, name="f1", phrase="F1")
    keeps = "outputs"
    undefined: ClassVar = {
        "auc": "no label is known to be 0 and 1",
        "macro_f1": "no label is known or predicted to be 1",
    }

    def read(self, values: NDArray[Any], num_outputs: int | None = None) -> Targets:
        expected = f"0, 1 or NaN for an unknown label [N, {num_outputs or 'labels'}]"
        shaped = values.ndim == 2 and values.shape[1] == (num_outputs or values.shape[1]) > 0
        check_numbers(values, expected, shaped, missing=True)
        known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
        if wrong := np.setdiff1d(known, (0, 1)).tolist():
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

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        guess = output > 0
        return super().sums(output, y) | {
            "true_positives": (guess & (y == 1)).sum(0),
            "wrong": ((guess & (y == 0)) | (~guess & (y == 1))).sum(0),
        }

    def score(self, means: Mapping[str, Any]) -> dict[str, float]:
        right, wrong = np.asarray(means["true_positives"]), np.asarray(means["wrong"])
        with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: undefined
            each = 2 * right / (2 * right + wrong)
        f1 = each[right + wrong > 0]
        of_labels = {f"f1_{k}": float(value) for k, value in enumerate(each)}
        return {"macro_f1": float(f1.mean()) if len(f1) else np.nan} | of_labels

    def whole(self, y: Targets, predictions: Targets, outputs: Vector) -> dict[str, float]:
        from sklearn.metrics import roc_auc_score  # late: it takes a second to import

        each = {f"auc_{k}": np.nan for k in range(y.shape[1])}
        for name, labels, logits in zip(each, y.T, outputs.T, strict=True):
            known = ~np.isnan(labels)
            if len(np.unique(labels[known])) == 2 and np.isfinite(logits[known]).all():
                each[name] = float(roc_auc_score(labels[known], logits[known]))
        values = [value for value in each.values() if not np.isnan(value)]
        return {"auc": float(np.mean(values)) if values else np.nan} | each

    def count_label(self, y: Targets, k: int) -> dict[str, int]:
        return {"known": int((~np.isnan(y[:, k])).sum()), "positive": int((y[:, k] == 1).sum())}

    def guess(self, num_outputs: int) -> float | None:
        return math.log(2)
