"""Checks of tasks."""

from itertools import chain
from typing import Any

import numpy as np
import torch

from fairflower.numerics.scores import as_numbers, from_numbers
from fairflower.tasks import Task
from fairflower.testing.failures import as_assertions, check_hooks

_N = 12  # number of made-up examples


def check_task(
    kind: type[Task], *, num_outputs: int = 3, shape: tuple[int, ...] = (8,), **arguments: Any
) -> None:
    """Check that a task's losses, sums and scores fit together, on made-up targets and outputs.

    ``num_outputs`` is the number of outputs to try, for examples of a ``shape``. Raises
    ``AssertionError`` if targets are not accepted a second time; if losses are not [B],
    finite, at least 0 and those of each example alone; if sums do not add over batches, or lack the
    loss; or if no primary score is computed.

    >>> from fairflower.tasks.regression import Regression
    >>> check_task(Regression, num_outputs=1, loss="huber")
    """
    with as_assertions(kind):
        check_hooks(kind, Task)
        _check(kind(**arguments), num_outputs, shape)


def _check(task: Task, num_outputs: int, shape: tuple[int, ...]) -> None:
    assert task.scores, "scores are missing: the first is the primary score."
    made_up = task.made_up(_N, num_outputs, shape)
    targets = task.read(made_up, num_outputs)
    assert targets.dtype == task.dtype, f"read returned {targets.dtype}, not {task.dtype.__name__}."
    assert np.array_equal(task.read(targets, num_outputs), targets, equal_nan=True), (
        "read changes targets that it has returned."
    )
    assert task.strata(targets).shape == (_N,), "strata has to return a number for each example."
    torch.manual_seed(0)
    output = torch.randn(_N, *task.output_shape(num_outputs, shape), requires_grad=True)
    y = torch.tensor(targets)
    losses = task.loss(output, y, "none")
    assert losses.shape == (_N,), f"losses has to return [{_N}], not {list(losses.shape)}."
    assert bool((losses >= 0).all()), "a loss is below 0 or NaN."
    assert bool(losses.isfinite().all()), "a loss is infinite."
    assert torch.autograd.grad(losses.sum(), output)[0].isfinite().all(), "a gradient is NaN."
    alone = torch.cat([task.loss(output[k : k + 1], y[k : k + 1], "none") for k in range(_N)])
    _close(alone, losses, "a loss depends on the other examples of its batch")
    _close(task.loss(output, y, "mean"), losses.mean(), "the mean is not that of the losses")
    with torch.no_grad():
        whole = {name: value.double() for name, value in task.sums(output, y).items()}
        parts = [task.sums(output[part], y[part]) for part in (slice(0, 5), slice(5, _N))]
        predictions = task.predict(output)
    assert "loss" in whole, "sums has no loss."
    _close(whole["loss"], losses.detach().sum(), "sums: loss is not the sum of the losses")
    for name, value in whole.items():
        added = torch.stack([part[name].double() for part in parts]).sum(0)
        _close(added, value, f"sums: {name} does not add over batches")
    means = as_numbers({name: (value / _N).tolist() for name, value in whole.items()})
    scores = task.score(from_numbers(means))
    if task.keeps:
        arrays = (v.detach().numpy() for v in (y, predictions, output.double()))
        scores |= task.whole(*arrays)
    by_label = [*chain.from_iterable(task.scores_by_label(num_outputs).values())]
    named = {declared.name: declared for declared in (*task.scores, *by_label)}
    lacking = sorted({declared.name for declared in by_label} - scores.keys())
    assert not lacking, f"{lacking} of label_scores are not computed."
    if task.draws == "points":
        drawn = task.points(targets, predictions.numpy(force=True))
        shapes = [np.shape(values) for values in drawn]
        right = shapes[0][0] == _N and shapes[1:] == [(_N, *shapes[0][1:2]), (_N,)]
        assert right, f"points returned {shapes}, not [N, D], [N, D] and [N]."
    assert task.primary.name in scores, f"no {task.primary.name}, the primary score, is computed."
    for name in scores.keys() & means.keys():
        assert scores[name] == means[name], f"a sum and another score have the name {name}."
    for name, score in ((n, value) for n, value in scores.items() if n in named):
        assert np.isnan(score) or named[name].low <= score <= named[name].high, (
            f"{name} = {score} is not in its range."
        )


def _close(actual: torch.Tensor, expected: torch.Tensor, problem: str) -> None:
    assert torch.allclose(actual, expected.to(actual.dtype), rtol=1e-5, atol=1e-6), f"{problem}."
