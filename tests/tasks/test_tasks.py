"""The seam of tasks: every built-in task holds what `check_task` asks, and broken ones do not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fairflower.data.federation import check_known
from fairflower.errors import ConfigError
from fairflower.numerics.scores import Score, as_numbers, from_numbers
from fairflower.registry import TASKS
from fairflower.tasks import Task, task_of
from fairflower.testing import check_task

LOSSES = ("squared", "huber", "absolute", "quantile", "poisson")


class Mean(Task):
    """Numbers, scored by their mean loss."""

    scores = (Score("cost", better=-1, unit="", high=float("inf")),)

    def predict(self, output: Tensor) -> Tensor:
        return output[:, 0]

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return (output[:, 0] - y).square()

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(output, y, "sum")}

    def score(self, means: Mapping[str, Any]) -> dict[str, float]:
        return {"cost": means["loss"]}


class Centered(Mean):
    """Its losses depend on the batch."""

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return (output[:, 0] - y.mean()).square()


class Signed(Mean):
    """Its losses may be negative."""

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return output[:, 0] - y


class Averaged(Mean):
    """Its sums are means."""

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(output, y, "sum"), "mean": y.mean()}


class Unscored(Mean):
    """It computes another score than its primary one."""

    def score(self, means: Mapping[str, Any]) -> dict[str, float]:
        return {"price": means["loss"]}


class Unlabeled(Mean):
    """It declares a score of each label and does not compute it."""

    label_scores = Mean.scores


class Undrawn(Mean):
    """Its true numbers are no columns."""

    draws = "points"

    def points(self, y: Any, predictions: Any) -> Any:
        return y, predictions.reshape(-1, 1), y > 0


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("outputs", [2, 5])
def test_every_task_is_consistent(name: str, outputs: int) -> None:
    arguments = {"horizon": 10.0, "intervals": outputs} if name == "survival" else {}
    shape = (outputs, 6) if name == "next-token" else (3, 8, 8)
    check_task(TASKS[name], num_outputs=outputs, shape=shape, **arguments)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_of_a_regression_is_consistent(loss: str) -> None:
    center = {} if loss == "poisson" else {"center": 0.5}
    check_task(TASKS["regression"], num_outputs=1, loss=loss, scale=2.0, **center)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Centered, "a loss depends on the other examples of its batch"),
        (Signed, "a loss is below 0"),
        (Averaged, "sums: mean does not add over batches"),
        (Unscored, "no cost, the primary score, is computed"),
        (Unlabeled, r"\['cost_0'\] of label_scores are not computed"),
        (Undrawn, r"points returned \[\(12,\), \(12, 1\), \(12,\)\], not \[N, D\]"),
    ],
)
def test_broken_tasks_are_found(kind: type[Task], problem: str) -> None:
    check_task(Mean, num_outputs=1)
    with pytest.raises(AssertionError, match=f"{kind.__name__}: {problem}"):
        check_task(kind, num_outputs=1)


def test_arrays_of_means_are_sent_as_single_numbers() -> None:
    means = {"loss": 0.5, "error": [1.0, 2.0], "one": [3.0]}
    assert as_numbers(means) == {"loss": 0.5, "error/0": 1.0, "error/1": 2.0, "one/0": 3.0}
    assert from_numbers(as_numbers(means)) == means
    many = {"hit": [float(k) for k in range(12)]}  # "hit/10" is before "hit/2" in sorted texts
    assert from_numbers(dict(sorted(as_numbers(many).items()))) == many


def test_a_text_of_another_machine_imports_no_code(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "evil_task.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    for text in ("evil_task:X", "antigravity:X", "evil_task:X:loss=huber"):
        with pytest.raises(ValueError, match=r"not the task of this run's data or data\.task"):
            check_known(text)
    check_known("evil_task:X", own="evil_task:X")
    check_known("regression:loss=huber")
    check_known(f"{__name__}:Mean")  # in use


def test_tasks_are_named_with_their_arguments() -> None:
    task = task_of("regression:loss=huber:unit=days")
    assert (task.kind, task.primary.unit) == ("huber", "days")  # type: ignore[attr-defined]
    assert task is task_of("regression:loss=huber:unit=days")
    with pytest.raises(ConfigError, match="Unknown task 'regresion'"):
        task_of("regresion")
    with pytest.raises(ConfigError, match="loss"):
        task_of("regression:loss=cubic")


def test_the_classification_counts_what_numpy_counts() -> None:
    task, rng = task_of("classification"), np.random.default_rng(0)
    logits, y = rng.standard_normal((50, 4)), rng.integers(4, size=50)
    sums = task.sums(torch.tensor(logits), torch.tensor(y))
    assert int(sums["accuracy"]) == (logits.argmax(1) == y).sum()
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert float(sums["loss"]) == pytest.approx(-log_p[np.arange(50), y].sum())
    assert task.guess(4) == pytest.approx(np.log(4))


@pytest.mark.parametrize("values", [np.array([0.5, 1.0]), np.zeros((2, 2), np.int64)])
def test_targets_that_are_no_classes_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="expected whole-number labels"):
        task_of("classification").read(values)
