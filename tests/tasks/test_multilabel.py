"""Several labels: losses and scores against torch and scikit-learn, with unknown labels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import f1_score, roc_auc_score
from torch.autograd import gradcheck
from torch.nn import functional as F

from fairflower.tasks.multilabel import MultiLabel

rng = np.random.default_rng(0)
TASK = MultiLabel()


def examples(n: int = 80, labels: int = 4) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return logits and targets, of which a fifth is unknown."""
    y = rng.integers(0, 2, (n, labels)).astype(float)
    y[rng.random((n, labels)) < 0.2] = np.nan
    return rng.normal(size=(n, labels)), y


def scored(logits: NDArray[np.float64], y: NDArray[np.float64], size: int = 7) -> dict[str, float]:
    """Return all scores of examples that are tested in batches."""
    o, t = torch.from_numpy(logits), torch.from_numpy(y)
    sums = [TASK.sums(*batch) for batch in zip(o.split(size), t.split(size), strict=True)]
    means = {name: sum(batch[name].double().numpy() for batch in sums) / len(y) for name in sums[0]}
    return TASK.score(means) | TASK.whole(y, TASK.predict(o).numpy(), logits)


def by_scikit_learn(logits: NDArray[np.float64], y: NDArray[np.float64]) -> dict[str, float]:
    """Return the means of scikit-learn's scores over the labels for which they are defined."""
    f1, auc = [], []
    for true, logit in zip(y.T, logits.T, strict=True):
        known = ~np.isnan(true)
        true, logit = true[known].astype(int), logit[known]
        f1.append(f1_score(true, logit > 0, zero_division=np.nan) if len(true) else np.nan)
        auc.append(roc_auc_score(true, logit) if len(set(true)) == 2 else np.nan)
    each = {f"f1_{k}": value for k, value in enumerate(f1)}
    each |= {f"auc_{k}": value for k, value in enumerate(auc)}
    return {"macro_f1": float(np.nanmean(f1)), "auc": float(np.nanmean(auc))} | each


def test_scores_equal_those_of_scikit_learn_over_the_known_labels() -> None:
    logits, y = examples()
    assert scored(logits, y) == pytest.approx(by_scikit_learn(logits, y), nan_ok=True)


def test_scores_without_unknown_labels_are_scikit_learns_macro_means() -> None:
    logits, y = examples()
    y = np.nan_to_num(y)
    scores = scored(logits, y)
    assert scores["macro_f1"] == pytest.approx(f1_score(y, logits > 0, average="macro"))
    assert scores["auc"] == pytest.approx(roc_auc_score(y, logits, average="macro"))


def test_a_label_that_nobody_has_is_left_out() -> None:
    logits, y = examples()
    y[:, 1] = np.where(np.isnan(y[:, 1]), np.nan, 0)
    logits[:, 2], y[:, 2] = -1, 0  # neither true nor predicted
    y[:, 3] = np.nan
    assert scored(logits, y) == pytest.approx(by_scikit_learn(logits, y), nan_ok=True)


def test_scores_are_undefined_and_not_0_without_any_known_label() -> None:
    logits, y = examples()
    scores = scored(logits, np.full_like(y, np.nan))
    assert {"auc", "macro_f1", "auc_0", "f1_3"} < scores.keys()
    assert all(map(math.isnan, scores.values()))


def test_an_example_has_the_mean_loss_of_its_known_labels() -> None:
    logits, y = map(torch.from_numpy, examples())
    y[0] = math.nan
    losses = TASK.losses(logits, y)
    assert losses[0] == 0
    for loss, o, t in zip(losses[1:], logits[1:], y[1:], strict=True):
        known = ~t.isnan()
        expected = F.binary_cross_entropy_with_logits(o[known], t[known])
        torch.testing.assert_close(loss, expected)


def test_losses_have_the_gradients_of_differences_and_none_for_unknown_labels() -> None:
    logits, y = (torch.from_numpy(a[:6]).requires_grad_(k == 0) for k, a in enumerate(examples()))
    assert gradcheck(lambda o: TASK.losses(o, y), logits)
    (gradient,) = torch.autograd.grad(TASK.loss(logits, y), logits)
    assert (gradient[y.isnan()] == 0).all()


def test_the_loss_of_guessing_is_that_of_logits_0() -> None:
    y = torch.from_numpy(np.nan_to_num(examples()[1]))
    assert TASK.loss(torch.zeros_like(y), y).item() == pytest.approx(TASK.guess(4))


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([[0, 1], [2, 0]], r"found 2; expected 0, 1 or NaN for an unknown label \[N, 2\]"),
        ([[0.0, np.inf]], r"found inf for example 0; expected 0, 1 or NaN"),
        ([0, 1], r"found int64 \[2\]; expected 0, 1 or NaN"),
        ([[0, 1, 0]], r"found int64 \[1, 3\]; expected 0, 1 or NaN for an unknown label \[N, 2\]"),
    ],
)
def test_wrong_targets_are_refused(values: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        TASK.read(np.array(values), 2)
