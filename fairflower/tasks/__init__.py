"""What a network learns: which targets are valid, the loss of an example, and how tests are scored.

The data choose the task (`fairflower.data.DataSet.task`, or ``data.task``), and nothing else asks
which one it is. Methods import torch when they compute, because reports read tasks without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fairflower.arguments import Configurable
from fairflower.config.methods import TaskSpec
from fairflower.config.privacy import LOSS_RANGE
from fairflower.errors import ConfigError, quoted
from fairflower.numerics import Vector
from fairflower.numerics.scores import Score
from fairflower.registry import CLASSIFICATION as CLASSIFICATION

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any

#: Targets of examples: int64 or float32, [N, ...], or masks, uint8 [N, H, W], 255 if unknown.
Targets = NDArray[Any]

#: Means of `Task.sums` over a test's examples, numbers or [K].
Means = Mapping[str, Any]

Reduction = Literal["none", "sum", "mean"]

#: Range of finite numbers in float32.
FINITE = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)


class Task(Configurable):
    """Base class of tasks; a task's arguments are keyword arguments of its constructor.

    `losses`, `sums` and `score` define the task; a test's scores are computed from sums over all
    examples of a domain, so they do not depend on batches or on how examples are divided among
    clients. Scores that are no function of sums, such as an AUC, are computed by `whole` over a
    domain's examples; with ``evaluate.by = "clients"``, they are the means of the clients'. See
    ``docs/your-own-parts.md``; `fairflower.testing.check_task` checks a task.
    """

    #: Scores of a test. The first is the primary score: of reports, of tuning and of verdicts.
    scores: tuple[Score, ...]
    #: Type of targets.
    dtype: ClassVar[type[np.generic]] = np.float32
    #: Whether targets are class numbers, which are counted, named and can be skewed.
    classes: ClassVar[bool] = False
    #: Whether targets are of an image's pixels, [N, H, W], and resized with it (nearest neighbor).
    pixelwise: ClassVar[bool] = False
    #: What `whole` needs of all examples; empty if it returns nothing.
    keeps: ClassVar[Literal["", "predictions", "outputs"]] = ""
    #: Whether outputs are no logits, so that users' metrics and exported networks give predictions.
    scaled: ClassVar[bool] = False
    #: Loss that a client's mean loss seldom exceeds: the default of ``privacy.loss-range`` and of
    #: PropFair's M.
    loss_range: float = LOSS_RANGE
    #: Score that a domain's examples may not define -> when, for notes.
    undefined: ClassVar[Mapping[str, str]] = {}
    #: Kind of examples -> name of the default model, unless it is that of classification.
    models: ClassVar[Mapping[str, str]] = {}
    #: What reports draw of tests: nothing, the numbers of `points` against each other, or images
    #: with true and predicted masks, chosen by `of_example`; and a sentence for the caption.
    draws: ClassVar[Literal["", "points", "masks"]] = ""
    drawn: ClassVar[str] = ""
    #: Scores of label or class k, which `score` or `whole` returns as ``<name>_<k>``; the first k.
    label_scores: ClassVar[tuple[Score, ...]] = ()
    first_label: ClassVar[int] = 0

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def primary(self) -> Score:
        """The primary score."""
        return self.scores[0]

    @property
    def share(self) -> bool:
        """Whether the primary score is from 0 to 1, and higher is better."""
        return (self.primary.better, self.primary.low, self.primary.high) == (1, 0, 1)

    def read(self, values: Targets, num_outputs: int | None = None) -> Targets:
        """Return valid targets, as ``dtype``, from values of a data set or a file.

        By default, values are finite numbers [N]. ``num_outputs`` is the declared number of the
        network's outputs, or None. Raises ``ValueError`` with "found ...; expected ...".
        """
        check_numbers(values, "finite numbers [N]", values.ndim == 1)
        return values.astype(self.dtype)

    def num_outputs(self, targets: Targets) -> int:
        """Return how many outputs a network needs for an example, given targets."""
        return 1

    def output_shape(self, num_outputs: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the network's output for an example of a shape."""
        return (num_outputs,)

    def scores_by_label(self, num_outputs: int) -> dict[int, list[Score]]:
        """Return the scores of each label or class, with their own names; see ``label_scores``."""
        return {
            k: [replace(score, name=f"{score.name}_{k}") for score in self.label_scores]
            for k in range(self.first_label, num_outputs if self.label_scores else 0)
        }

    def strata(self, targets: Targets) -> NDArray[np.int64]:
        """Return a number for each example, int64 [N]: divisions keep the numbers' proportions."""
        return np.zeros(len(targets), np.int64)

    def pointless(self, targets: Targets) -> str:
        """Return why nothing can be learnt from the targets of all training examples, or ""."""
        same = np.array_equal(targets, np.broadcast_to(targets[:1], targets.shape), equal_nan=True)
        found = np.array2string(targets[0], threshold=8) if same else ""
        return f"the same target {found} in all {len(targets)} training examples" if same else ""

    def made_up(self, n: int, num_outputs: int, shape: tuple[int, ...]) -> Targets:
        """Return n targets, to try a network with examples of a shape before a run."""
        return (np.arange(n) % max(2, num_outputs)).astype(self.dtype)

    def problem(self, network: Callable[[Tensor], Tensor], x: Tensor) -> str:
        """Return what is wrong with a network whose output has the right shape, or "".

        ``x`` are two examples, and the network is in eval mode.
        """
        return ""

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example, [B], with a gradient; at least 0.

        Raises ``ValueError`` if an output has another shape than `output_shape`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method losses.")

    def loss(self, output: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the losses of examples, [B], or their sum or mean."""
        losses = self.losses(output, y)
        return losses if reduction == "none" else getattr(losses, reduction)()

    def predict(self, output: Tensor) -> Tensor:
        """Return predictions, in the form of targets."""
        raise NotImplementedError(f"{type(self).__name__} has no method predict.")

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return sums over the examples of a batch, scalars or [K], by default the ``loss``."""
        return {"loss": self.loss(output, y, "sum")}

    def score(self, means: Means) -> dict[str, float]:
        """Return scores, given `sums` of all examples divided by their number; NaN is undefined.

        By default, there are none but those of `whole`.
        """
        return {}

    def whole(self, y: Targets, predictions: Targets, outputs: Vector) -> dict[str, float]:
        """Return scores that need all examples of a domain at once; see ``keeps``."""
        return {}

    def count_label(self, y: Targets, k: int) -> dict[str, int]:
        """Return numbers of test examples for label or class k, by what is counted, for tables."""
        return {}

    def points(self, y: Targets, predictions: Targets) -> tuple[Targets, Targets, Targets]:
        """Return true and predicted numbers, [N, D], and whether to draw them as circles, [N]."""
        n = len(y)
        return y.reshape(n, -1), predictions.reshape(n, -1), np.zeros(n, np.bool_)

    def of_example(self, y: Targets, prediction: Targets) -> float:
        """Return the primary score of an example, by which reports choose masks; may be NaN."""
        return float((y == prediction).mean())

    def table(self, output: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return columns of a table of predictions by heading, each [N].

        ``names`` are those of classes or targets.
        """
        values = self.predict(output).reshape(len(output), -1).numpy().T
        if len(values) == 1:
            return {"prediction": values[0]}
        return {f"prediction of {name}": column for name, column in zip(names, values, strict=True)}

    def for_users(self, output: Tensor) -> Tensor:
        """Return what users' metrics and exported networks give: the output; see ``scaled``."""
        return self.predict(output) if self.scaled else output

    def guess(self, num_outputs: int) -> float | None:
        """Return the loss of guessing, far above which training has diverged; None if unknown."""
        return None


@cache
def task_of(text: str) -> Task:
    """Return a task by its name and arguments, for example ``regression:loss=huber``.

    Raises ``ConfigError`` if there is no such task, or an argument is not allowed.
    """
    spec = TaskSpec.read(text)
    spec.check()
    try:
        task: Task = spec.make()
    except ConfigError as error:
        raise ConfigError(f"data.task = {quoted(text)}: {error}") from error
    return task


def check_numbers(
    values: Targets, expected: str, shaped: bool, *within: float, missing: bool = False
) -> None:
    """Raise ``ValueError`` unless values are shaped, and in a range or, if allowed, NaN.

    ``within`` are the ends of the range, by default those of finite numbers in float32.
    """
    if values.dtype.kind not in "biuf" or not shaped:
        raise ValueError(f"found {values.dtype} {list(values.shape)}; expected {expected}")
    (low, high), wide = within or FINITE, values.astype(np.float64)
    wrong = ~((low <= wide) & (wide <= high) | missing & np.isnan(wide))
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        raise ValueError(f"found {values[place]} for example {place[0]}; expected {expected}")
