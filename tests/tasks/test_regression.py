"""Regression: losses and scores against torch, scikit-learn and closed forms."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn import metrics
from torch.autograd import gradcheck
from torch.nn import functional as F

from fairflower.errors import ConfigError
from fairflower.tasks import task_of
from fairflower.tasks.regression import Regression

LOSSES = ("squared", "huber", "absolute", "quantile:q=0.9", "poisson")
rng = np.random.default_rng(0)


def scored(task: Any, output: torch.Tensor, y: torch.Tensor, size: int = 7) -> dict[str, float]:
    """Return the scores of examples that are tested in batches."""
    batches = zip(output.split(size), y.split(size), strict=True)
    sums = [{k: v.double().numpy() for k, v in task.sums(o, t).items()} for o, t in batches]
    means = {name: sum(batch[name] for batch in sums) / len(y) for name in sums[0]}
    scores: dict[str, float] = task.score(means)
    return scores


def numbers(*shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape))


@pytest.mark.parametrize("width", [1, 3])
def test_scores_of_batches_equal_those_of_scikit_learn(width: int) -> None:
    task = Regression(center=2000.0, scale=50.0)
    output = numbers(60, width)
    y = (2000 + 50 * numbers(60, width)).float()
    y = y[:, 0] if width == 1 else y
    scores, guess = scored(task, output, y), task.predict(output).numpy()
    assert guess.shape == y.shape
    true = y.double().numpy()
    assert scores["rmse"] == pytest.approx(metrics.mean_squared_error(true, guess) ** 0.5)
    assert scores["mae"] == pytest.approx(metrics.mean_absolute_error(true, guess))
    assert scores["r2"] == pytest.approx(metrics.r2_score(true, guess))
    np.testing.assert_array_equal(task.for_users(output), guess)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_r2_is_undefined_and_not_0_if_all_targets_are_equal(value: float) -> None:
    scores = scored(Regression(), numbers(50, 1), torch.full((50,), value))
    assert np.isnan(scores["r2"])
    assert scores["rmse"] > 0
    one_of_two = torch.stack([torch.full((50,), value), torch.arange(50.0)], 1)
    assert np.isnan(scored(Regression(), numbers(50, 2), one_of_two)["r2"])


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("text", LOSSES)
def test_losses_are_at_least_0_and_have_the_gradients_of_differences(text: str, width: int) -> None:
    task = task_of(f"regression:loss={text}:scale=2")
    y = numbers(5, width).abs()
    y = y[:, 0] if width == 1 else y
    output = numbers(5, width).requires_grad_()
    losses = task.losses(output, y)
    assert losses.shape == (5,)
    assert (losses >= 0).all()
    assert gradcheck(lambda o: task.losses(o, y), output)
    torch.testing.assert_close(task.loss(output, y), losses.mean())
    torch.testing.assert_close(task.loss(output, y, "sum"), losses.sum())


def loss(text: str, output: torch.Tensor, y: torch.Tensor) -> NDArray[np.float64]:
    losses: NDArray[np.float64] = task_of(f"regression:loss={text}").losses(output, y).numpy()
    return losses


def test_losses_equal_those_of_torch_and_scikit_learn() -> None:
    o, y = numbers(40, 1), numbers(40)
    t = (y - 1) / 3
    scaled = ":center=1:scale=3"
    np.testing.assert_allclose(loss(f"squared{scaled}", o, y), (o[:, 0] - t).square())
    huber = F.huber_loss(o[:, 0], t, reduction="none")
    np.testing.assert_allclose(loss(f"huber{scaled}", o, y), huber)
    for q in (0.5, 0.9):
        pinball = metrics.mean_pinball_loss(t, o[:, 0], alpha=q)
        assert loss(f"quantile:q={q}{scaled}", o, y).mean() == pytest.approx(pinball)
    absolute = metrics.mean_absolute_error(t, o[:, 0])
    assert loss(f"absolute{scaled}", o, y).mean() == pytest.approx(absolute)
    counts = torch.from_numpy(rng.poisson(2, 40).astype(float))
    deviance = metrics.mean_poisson_deviance(counts, 3 * o[:, 0].exp())
    assert loss("poisson:scale=3", o, counts).mean() == pytest.approx(deviance / 2)
    torch_loss = F.poisson_nll_loss(o[:, 0], counts, full=False, reduction="none")
    constant = torch.xlogy(counts, counts) - counts  # the deviance of a perfect prediction is 0
    np.testing.assert_allclose(loss("poisson", o, counts), torch_loss + constant, atol=1e-12)


def test_the_poisson_loss_is_finite_for_tiny_means() -> None:
    assert loss(
        "poisson", torch.tensor([[-800.0], [-800.0]]), torch.tensor([0.0, 1.0])
    ).tolist() == [
        0,
        799,
    ]


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([[1.0], [np.nan]], "found nan for example 1; expected finite numbers"),
        ([1.0, np.inf], "found inf for example 1; expected finite numbers"),
        ([1e38, -1e39], "found -1e[+]39 for example 1; expected finite numbers"),  # in float32
        (["1", "2"], "found <U1"),
        ([[[1.0]]], r"found float64 \[1, 1, 1\]; expected finite numbers \[N\] or \[N, D\]"),
    ],
)
def test_targets_that_are_no_numbers_are_refused(values: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Regression().read(np.array(values))


def test_other_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"found -1.0 for example 1; expected finite numbers >= 0"):
        Regression(loss="poisson").read(np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match="found 2 targets per example; expected 1"):
        Regression().read(np.zeros((3, 2)), 1)


@pytest.mark.parametrize("text", ["loss=poisson:center=1", "q=0.9", "loss=huber:q=0.1"])
def test_an_argument_without_effect_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"does not use (q|center)\. Remove"):
        task_of(f"regression:{text}")


def test_a_column_is_a_vector_of_targets() -> None:
    for values, dtype in product(([[1], [2]], [1, 2]), (np.int64, np.float64)):
        assert Regression().read(np.array(values, dtype)).tolist() == [1.0, 2.0]
    assert Regression().read(np.zeros((3, 2))).shape == (3, 2)
