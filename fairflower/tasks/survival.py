"""Time until an event, which was not observed for every example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from fairflower.arguments import Range
from fairflower.errors import ConfigError
from fairflower.numerics import Vector
from fairflower.numerics.scores import BRIER, HARRELL, UNO
from fairflower.numerics.survival import concordance, integrated_brier, read_cuts, uno_concordance
from fairflower.tasks import Targets, Task, Tensor, check_numbers


class Survival(Task):
    """Time until an event: targets float32 [N, 2], the time and whether it is an event's (0 or 1).

    With event 0, the observation ended without an event at that time (it is censored). The network
    has an output o_j for each interval from cut c_(j-1) to c_j, where c_0 = 0. It is the logit of
    the hazard, that is, of the probability that the event is in the interval if it was not before.
    The loss of an example is its negative log-likelihood (M. Gensheimer and B. Narasimhan, PeerJ
    2019)::

        h_j = sigmoid(o_j)          S(c_j) = (1 - h_1) ... (1 - h_j)
        - sum over survived intervals j of log(1 - h_j)  -  log h_m with an event in interval m

    An event's example has survived the intervals before m (all, after the last cut), and a censored
    one each interval of which it was observed at least half. The loss is at least 0, and 0 for an
    example that says nothing.

    A prediction is the mean time until the event or the last cut, whichever is first, with S linear
    between cuts, and the probability of an event until the last cut. The primary score is Harrell's
    concordance of the negative predicted time; Uno's corrects for censoring, and the integrated
    Brier score also judges the probabilities (`fairflower.numerics.survival`, for both with weights
    by the tested examples alone). They are undefined without events, and without pairs or cuts to
    compare.

    Parameters
    ----------
    cuts
        Ends of the intervals, in the unit of the times, increasing and separated by semicolons:
        ``survival:cuts=90;180;360``. They must be known before the run; see
        `fairflower.numerics.survival.propose_cuts`.
    horizon, intervals
        Instead of cuts: the last cut, and the number of equal intervals, by default 10.
    """

    scores = HARRELL, UNO, BRIER
    keeps = "outputs"
    scaled = True
    draws = "points"
    drawn = "Time until the event; predicted until the last cut at most. Circles: censored."
    undefined: ClassVar = {
        **dict.fromkeys((HARRELL.name, UNO.name), "nobody outlives an event before the last cut"),
        BRIER.name: "there is no event, or no cut before the last time",
    }

    def __init__(
        self,
        *,
        cuts: str | float = "",
        horizon: Annotated[float, Range(0)] = 0.0,
        intervals: Annotated[int, Range(1, 1000)] = 10,
    ) -> None:
        if (cuts != "") == (horizon > 0):
            raise ConfigError(
                "The task survival needs either cuts, such as survival:cuts=90;180;360, or a "
                "horizon, such as survival:horizon=360:intervals=4."
            )
        #: Ends of the intervals, float64 [J].
        self.cuts = np.linspace(0, horizon, intervals + 1)[1:] if horizon else read_cuts(str(cuts))
        self.cuts = self.cuts.astype(np.float32).astype(np.float64)  # comparable to times
        self.loss_range = 2 * len(self.cuts) * math.log(2)

    def read(self, values: Targets, num_outputs: int | None = None) -> Targets:
        expected = "times >= 0 and events, 0 or 1 [N, 2]"
        check_numbers(values, expected, values.ndim == 2 and values.shape[1:] == (2,))
        wrong = (values[:, 0] < 0) | ~np.isin(values[:, 1], (0, 1))
        if wrong.any():
            place = int(np.argmax(wrong))
            time, event = values[place].tolist()
            found = f"time {time:g} and event {event:g} for example {place}"
            raise ValueError(f"found {found}; expected {expected}")
        if num_outputs not in (None, len(self.cuts)):
            raise ValueError(f"found {num_outputs} outputs; expected {len(self.cuts)}, as cuts")
        return values.astype(np.float32)

    def num_outputs(self, targets: Targets) -> int:
        return len(self.cuts)

    def strata(self, targets: Targets) -> Targets:
        return targets[:, 1].astype(np.int64)

    def pointless(self, targets: Targets) -> str:
        early = (targets[:, 1] == 1) & (targets[:, 0] <= self.cuts[-1])
        none = f"no event until {self.cuts[-1]:g} in all {len(targets)} training examples"
        return "" if early.any() else none

    def made_up(self, n: int, num_outputs: int, shape: tuple[int, ...]) -> Targets:
        times = self.cuts[np.arange(n) % len(self.cuts)]
        return np.stack([times, np.arange(n) % 2], axis=1).astype(np.float32)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        from torch.nn import functional as F

        time, event = y[:, :1], y[:, 1:] == 1
        ends = output.new_tensor(self.cuts)
        starts = output.new_tensor([0.0, *self.cuts[:-1]])
        survived = (event & (time > ends)) | (~event & (time >= (starts + ends) / 2))
        there = event & (time <= ends) & ((time > starts) | (starts == 0))
        return (survived * F.softplus(output) + there * F.softplus(-output)).sum(1)

    def survival(self, output: Tensor) -> Tensor:
        """Return the probability of no event until each cut, [B, J]."""
        from torch.nn import functional as F

        return F.logsigmoid(-output).cumsum(1).exp()

    def predict(self, output: Tensor) -> Tensor:
        """Return the mean time until the event or the last cut, and P(event until it), [B, 2]."""
        import torch

        survived = self.survival(output)
        before = survived.roll(1, 1)
        before[:, 0] = 1
        width = output.new_tensor(np.diff(self.cuts, prepend=0))
        mean = ((before + survived) / 2 * width).sum(1)
        return torch.stack([mean, 1 - survived[:, -1]], 1)

    def table(self, output: Tensor, names: Sequence[str]) -> dict[str, Any]:
        last, (mean, event) = f"{self.cuts[-1]:g}", self.predict(output.double()).numpy().T
        survived = zip(self.cuts, self.survival(output.double()).numpy().T, strict=True)
        return {
            f"mean time until {last}": mean,
            f"probability of an event until {last}": event,
            **{f"survival at {cut:g}": p for cut, p in survived},
        }

    def whole(self, y: Targets, predictions: Targets, outputs: Vector) -> dict[str, float]:
        import torch

        wide = torch.from_numpy(np.asarray(outputs, np.float64))
        risk = -self.predict(wide)[:, 0].numpy()
        time, event = y[:, 0].astype(np.float64), y[:, 1] == 1
        if not np.isfinite(risk).all():
            return dict.fromkeys((score.name for score in self.scores), math.nan)
        survived = self.survival(wide).numpy()
        return {
            HARRELL.name: concordance(time, event, risk),
            UNO.name: uno_concordance(time, event, risk, float(self.cuts[-1])),
            BRIER.name: integrated_brier(time, event, survived, self.cuts),
        }

    def points(self, y: Targets, predictions: Targets) -> tuple[Targets, Targets, Targets]:
        return y[:, :1], predictions[:, :1], y[:, 1] == 0

    def guess(self, num_outputs: int) -> float | None:
        return num_outputs * math.log(2)
