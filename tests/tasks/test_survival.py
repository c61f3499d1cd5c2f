"""Survival: the loss against definitions, and the model that it fits against Kaplan and Meier."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sksurv.metrics import concordance_index_censored
from sksurv.nonparametric import kaplan_meier_estimator
from torch.autograd import gradcheck

from fairflower.errors import ConfigError
from fairflower.numerics.survival import propose_cuts
from fairflower.tasks import task_of
from fairflower.tasks.survival import Survival

TASK = Survival(cuts="10;20;40")
rng = np.random.default_rng(0)


def examples(n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets of which some are after the last cut, and some are 0."""
    time, event = (rng.exponential(25, n) * (rng.random(n) < 0.9)).round(1), rng.random(n) < 0.6
    y = np.stack([time, event], 1)
    return torch.from_numpy(rng.normal(size=(n, 3))), torch.from_numpy(y)


def log_likelihood(hazards: NDArray[np.float64], time: float, event: bool) -> float:
    """Return the log-likelihood of an example as the docstring defines it, in a loop."""
    total, start = 0.0, 0.0
    for hazard, end in zip(hazards, (10, 20, 40), strict=True):
        if event and time <= end:
            return total + math.log(hazard)
        if not event and time < (start + end) / 2:
            return total
        total, start = total + math.log(1 - hazard), end
    return total


def test_the_loss_is_the_negative_log_likelihood() -> None:
    logits, y = examples()
    hazards = torch.sigmoid(logits).numpy()
    expected = [-log_likelihood(h, *row) for h, row in zip(hazards, y.tolist(), strict=True)]
    np.testing.assert_allclose(TASK.losses(logits, y), expected)
    assert min(expected) >= 0
    torch.testing.assert_close(TASK.sums(logits, y)["loss"], TASK.losses(logits, y).sum())


def test_the_loss_has_the_gradients_of_differences() -> None:
    logits, y = examples(8)
    assert gradcheck(lambda o: TASK.losses(o, y), logits.requires_grad_())


def test_the_best_hazards_without_features_give_the_curve_of_kaplan_and_meier() -> None:
    """For times at the cuts; others are grouped."""
    time = rng.choice([10.0, 20.0, 40.0, 50.0], 200)
    event = rng.random(200) < 0.5
    y = torch.from_numpy(np.stack([time, event], 1))
    logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=100, tolerance_grad=1e-10)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = TASK.loss(logits.expand(200, 3), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    times, curve = kaplan_meier_estimator(event, time)
    assert times.tolist() == [10, 20, 40, 50]
    np.testing.assert_allclose(TASK.survival(logits.detach())[0], curve[:3], rtol=1e-4)


def test_a_prediction_is_the_area_below_the_curve_and_the_events_until_its_end() -> None:
    logits, _ = examples(4)
    fine = np.linspace(0, 40, 40001)
    for row, (mean, dead) in zip(logits, TASK.predict(logits).tolist(), strict=True):
        curve = [1, *np.cumprod(1 - torch.sigmoid(row).numpy())]
        area = np.trapezoid(np.interp(fine, [0, 10, 20, 40], curve), fine)
        assert mean == pytest.approx(area, rel=1e-6)
        assert dead == pytest.approx(1 - curve[-1])
    np.testing.assert_array_equal(TASK.for_users(logits), TASK.predict(logits))


def test_the_primary_score_is_the_concordance_of_predicted_times() -> None:
    logits, y = examples()
    time, event = y.numpy().T
    scores = TASK.whole(y.numpy(), TASK.predict(logits).numpy(), logits.numpy())
    assert list(scores) == [score.name for score in TASK.scores]
    predicted = TASK.predict(logits)[:, 0].numpy()
    expected = concordance_index_censored(event == 1, time, -predicted)[0]
    assert scores[TASK.primary.name] == pytest.approx(expected)
    assert all(0 < value < 1 for value in scores.values())


def test_scores_are_undefined_and_not_0_without_events_or_for_a_diverged_model() -> None:
    logits, y = (tensor.numpy() for tensor in examples())
    for o, t in ((logits, y * [1, 0]), (logits * np.nan, y)):
        scores = TASK.whole(t, t, o)
        assert len(scores) == 3
        assert all(map(math.isnan, scores.values()))


def test_divisions_keep_the_share_of_events_and_made_up_targets_are_valid() -> None:
    _, y = examples()
    assert TASK.strata(y.numpy()).tolist() == y[:, 1].tolist()
    made_up = TASK.made_up(7, 3, (5,))
    np.testing.assert_array_equal(TASK.read(made_up, TASK.num_outputs(made_up)), made_up)
    assert TASK.guess(3) == pytest.approx(TASK.losses(torch.zeros(1, 3), torch.tensor([[50.0, 0]])))


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([[1, 0], [-2, 1]], "found time -2 and event 1 for example 1; expected times >= 0 and"),
        ([[1.5, 2]], "found time 1.5 and event 2 for example 0; expected times >= 0 and events, 0"),
        ([[1, np.nan]], "found nan for example 0; expected times >= 0"),
        ([[np.inf, 1]], "found inf for example 0; expected times >= 0"),
        ([1, 0], r"found int64 \[2\]; expected times >= 0 and events, 0 or 1 \[N, 2\]"),
    ],
)
def test_wrong_targets_are_refused(values: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        TASK.read(np.array(values))


@pytest.mark.parametrize("cuts", ["0;1", "2;1", "1;1", "-1", "1;;2", "a", "inf", "nan", "1,2"])
def test_cuts_that_do_not_increase_from_0_are_refused(cuts: str) -> None:
    with pytest.raises(ConfigError, match="expected increasing numbers above 0, separated by semi"):
        Survival(cuts=cuts)


@pytest.mark.parametrize("text", ["", ":intervals=4", ":cuts=1;2:horizon=3"])
def test_a_task_needs_cuts_or_a_horizon(text: str) -> None:
    with pytest.raises(ConfigError, match=r"needs either cuts, such as .*, or a horizon"):
        task_of(f"survival{text}")


def test_a_horizon_has_equal_intervals() -> None:
    task: Any = task_of("survival:horizon=360:intervals=4")
    assert task.cuts.tolist() == [90, 180, 270, 360]
    single: Any = task_of("survival:cuts=90")
    assert single.cuts.tolist() == [90]


def test_proposed_cuts_are_quantiles_of_the_pooled_events() -> None:
    times = [rng.exponential(100, n).clip(max=999) for n in (400, 100)]
    edges = np.arange(0.0, 1001)
    counts = np.array([np.histogram(t, edges)[0] for t in times])
    proposed = [float(cut) for cut in propose_cuts(edges.tolist(), counts, 4).split(";")]
    quantiles = np.quantile(np.concatenate(times), [0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(proposed, quantiles, atol=1)
    assert Survival(cuts=propose_cuts(edges.tolist(), counts, 4)).cuts.tolist() == proposed
    with pytest.raises(ValueError, match="found no events"):
        propose_cuts([0, 1], np.zeros((2, 1), np.int64), 3)
