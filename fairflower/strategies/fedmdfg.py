"""FedMDFG: Multi-Gradient Descent and Fair Guidance (Pan et al., AAAI 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.directions import (
    STATIONARY,
    angle,
    equalising,
    recall,
    remember,
    stretched,
)
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range
from fairflower.numerics.min_norm import cosines, min_norm_weights


class FedMDFG(FairStrategy):
    """Find a step that lowers every client's loss, and evens them out where they are unequal.

    With F_k the received model's loss on client k's data, and g_k = -Delta_k, all scaled to
    the mean length of their round::

        if the angle between F and (1, ..., 1) is above theta:
            g_fair = sum_k h_k g_k,      h ~ (sum F / ||F||^2) F - 1,    ||h|| = 1
        d      = the shortest vector in the hull of g_1 ... g_K, g_fair,
                 and of those last round's clients that sit this one out
        theta <- theta - d ||mean_k Delta_k|| / ||d||

    g_fair lowers losses that are too large beside the others, and lets too small ones rise: to
    first order, and were all gradients as long as they are after scaling.
    Nothing is changed where 0 is in the hull: no step serves all. That is so, too, where
    clients agree in their updates, but not in their losses, as an equal descent makes these
    less equal.

    **The paper's line search is not in it**: there all clients test the model at up to
    2 s + 1 step lengths in every round, messages that a round here does not have, so the
    length is the mean update's (its Appendix A.3). Reconstructed: equations are from that
    appendix; the main text was not at hand. From the authors' code are the scaling to the mean
    length and the memory of one round, whose clients keep the mean length of that round; it also
    has g_fair wherever a client's loss rose above its mean so far, which is not in the appendix,
    nor here.

    Clients that did not move are left out of the hull, as in the code. The clients have to
    report ``received_loss``. BatchNorm statistics are averaged with equal weights. The server
    keeps one round's updates.

    Parameters
    ----------
    theta : float in [0, 90]
        The fairness angle that is tolerated, in degrees. Default 11.25 (pi / 16, Table 2 of
        the appendix); 90 is plain multi-gradient descent.
    """

    paper: ClassVar[str] = "Pan et al., AAAI 2023"
    extra = "solvers"
    extrapolates = True  # stretched to the length of the mean step
    keeps_agreement = False  # where losses differ it stands still
    needs = ("received_loss",)
    STATE: ClassVar[tuple[str, ...]] = ("seen", "memory")

    def __init__(
        self, *, theta: Annotated[float, Range(0, 90)] = 11.25, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.theta = theta
        self.seen: dict[int, int] = {}  # client -> the round in which it was remembered
        self.memory: dict[int, Arrays] = {}  # client -> its Delta then

    def merge(self, cohort: Cohort) -> Arrays:
        everyone, ages = recall(cohort, self.seen, self.memory, 1)
        before = _mean_length(self.memory)
        self.seen, self.memory = {}, {}
        remember(cohort, self.seen, self.memory)
        gram = everyone.gram()
        K = len(cohort)
        equal = (ages == 0) / K
        losses = cohort.metrics["received_loss"]
        c = stretched(self._descend(gram, losses, before), gram, equal)
        self.diagnostics.update(
            weights=equal[:K],
            coefficients=c[:K],
            angle=angle(losses),
            conflict=cosines(gram[:K, :K]),
        )
        return everyone.move(c, equal)

    def _descend(
        self, gram: NDArray[np.float64], losses: NDArray[np.float64], before: float
    ) -> NDArray[np.float64]:
        """Coefficients of d over the updates, shape (M,), the present clients' first.

        ``before`` is the mean length of the last round's updates.
        """
        lengths = np.sqrt(gram.diagonal())
        moved, mine = lengths > 0, lengths[: len(losses)] > 0
        if not mine.any():
            return np.zeros(len(gram))
        # In units of the present clients' mean length.
        scale = np.divide(1, lengths, out=np.zeros_like(lengths), where=moved)
        scale[len(losses) :] *= before / lengths[: len(losses)][mine].mean()
        rows = np.diag(scale)[moved]
        h = np.zeros(len(gram))
        h[np.flatnonzero(mine)] = equalising(losses[mine])
        # Beside a loss of 1e200, which only a liar has, its square is 0.
        if angle(losses[mine]) > self.theta and (length := np.linalg.norm(h)) > 0:
            rows = np.vstack([rows, h / length * scale])
        solution = min_norm_weights(rows @ gram @ rows.T)
        if solution.norm <= STATIONARY:
            return np.zeros(len(gram))
        return np.asarray(solution.weights @ rows)


def _mean_length(memory: Mapping[int, Arrays]) -> float:
    """The mean length of those updates that are not 0; 0 if there is none."""
    lengths = [
        sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in update.values()))
        for _, update in sorted(memory.items())
    ]
    moved = [length for length in lengths if length > 0]
    return sum(moved) / len(moved) if moved else 0.0
