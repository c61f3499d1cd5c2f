"""Real numbers for each example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fairflower.arguments import Range
from fairflower.errors import ConfigError
from fairflower.numerics.scores import MAE, R2, RMSE
from fairflower.tasks import FINITE, Means, Targets, Task, Tensor, check_numbers


class Regression(Task):
    """Real numbers for each example: targets float32 [N] or [N, D], as many outputs.

    With outputs o and targets y, the loss of an example is, as a mean over its D numbers and with
    ``t = (y - center) / scale``, one of ::

        squared    (o - t)^2
        huber      1/2 (o - t)^2 if |o - t| <= 1, else |o - t| - 1/2
        absolute   |o - t|
        quantile   max(q (t - o), (q - 1) (t - o))                    prediction of the quantile q
        poisson    y log(y / mu) - y + mu,  mu = scale exp(o)         half the deviance; y >= 0

    so losses are at least 0, and comparable between clients. Predictions are
    ``center + scale o`` (with ``poisson``, mu). RMSE, MAE and R2 are those of the predictions, in
    the target's unit; with several targets, means are over their squares, absolute errors and R2.
    R2 is undefined if all targets of a domain are equal, or all of one of several.

    Raises ``ConfigError`` for a ``q`` or ``center`` that the loss does not use.

    Parameters
    ----------
    loss
        Default ``squared``.
    q
        The quantile, in (0, 1). Default 0.5, the median.
    center, scale
        Typical size of the targets, known before the run as features' ``mean`` and ``std`` are.
        Defaults 0 and 1.
    unit
        The targets' unit, for tables.
    """

    scores = RMSE, MAE, R2
    scaled = True
    draws = "points"
    undefined: ClassVar = {"r2": "all values of a target are equal"}

    def __init__(
        self,
        *,
        loss: Literal["squared", "huber", "absolute", "quantile", "poisson"] = "squared",
        q: Annotated[float, Range(1e-6, 1 - 1e-6)] = 0.5,
        center: Annotated[float, Range()] = 0.0,
        scale: Annotated[float, Range(above=0)] = 1.0,
        unit: str = "",
    ) -> None:
        unused = {"q": q != 0.5 and loss != "quantile", "center": center and loss == "poisson"}
        for name in (name for name, value in unused.items() if value):
            raise ConfigError(f"regression:loss={loss} does not use {name}. Remove {name}.")
        self.kind, self.q, self.center, self.scale = loss, q, center, scale
        self.scores = replace(RMSE, unit=unit), replace(MAE, unit=unit), R2

    def read(self, values: Targets, num_outputs: int | None = None) -> Targets:
        """Return targets, float32 [N], or [N, D] if D > 1."""
        counts = self.kind == "poisson"
        expected = f"finite numbers{' >= 0' * counts} [N] or [N, D]"
        shaped = values.ndim in (1, 2) and 0 not in values.shape[1:]
        check_numbers(values, expected, shaped, 0 if counts else FINITE[0], FINITE[1])
        width = self.num_outputs(values)
        if width != (num_outputs or width):
            raise ValueError(f"found {width} targets per example; expected {num_outputs}")
        return values.astype(np.float32).reshape(len(values), *[width] * (width > 1))

    def num_outputs(self, targets: Targets) -> int:
        return int(targets.shape[1]) if targets.ndim == 2 else 1

    def made_up(self, n: int, num_outputs: int, shape: tuple[int, ...]) -> Targets:
        values = np.arange(n * num_outputs, dtype=np.float32).reshape(n, num_outputs) % 2
        return values[:, 0] if num_outputs == 1 else values

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        from torch.nn import functional as F

        output = output.reshape(y.shape)
        if self.kind == "poisson":
            log_mu = math.log(self.scale) + output
            each = y.xlogy(y) - y * log_mu - y + log_mu.exp()
        else:
            target = (y - self.center) / self.scale
            if self.kind == "quantile":
                each = (self.q * (target - output)).maximum((self.q - 1) * (target - output))
            else:
                name = {"squared": "mse", "huber": "huber", "absolute": "l1"}[self.kind]
                each = getattr(F, f"{name}_loss")(output, target, reduction="none")
        return each.reshape(len(y), -1).mean(1)

    def predict(self, output: Tensor) -> Tensor:
        """Return predictions, in the targets' unit, [B] or [B, D]."""
        output = output[:, 0] if output.shape[1] == 1 else output
        if self.kind == "poisson":
            return self.scale * output.exp()
        return self.center + self.scale * output

    def table(self, output: Tensor, names: Sequence[str]) -> dict[str, Any]:
        unit = self.scores[0].unit
        return super().table(output, names) | ({"unit": [unit] * len(output)} if unit else {})

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        wide = y.double() if y.device.type != "mps" else y
        error = self.predict(output).to(wide.dtype) - wide
        wide = wide - self.center  # a mean far from 0 would hide the variance
        each = {
            "squared_error": error.square(),
            "absolute_error": error.abs(),
            "target": wide,
            "squared_target": wide.square(),
        }
        summed = {name: values.reshape(len(y), -1).sum(0) for name, values in each.items()}
        return super().sums(output, y) | summed

    def score(self, means: Means) -> dict[str, float]:
        squared, target = np.asarray(means["squared_error"]), np.asarray(means["target"])
        variance = np.asarray(means["squared_target"]) - target**2
        # Rounding leaves a little of the squares if all targets are equal.
        known = variance > 1e-12 * np.asarray(means["squared_target"])
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(known, 1 - squared / variance, np.nan)
        return {
            "rmse": float(np.sqrt(squared.mean())),
            "mae": float(np.mean(means["absolute_error"])),
            "r2": float(r2.mean()),
        }
