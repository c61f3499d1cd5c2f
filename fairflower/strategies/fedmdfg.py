"""FedMDFG: Multi-Gradient Descent and Fair Guidance (Pan et al., AAAI 2023)."""

from collections.abc import Mapping
from math import sqrt
from typing import Annotated, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.directions import (
    STATIONARY,
    inequality_angle,
    inequality_gradient,
    rescale_to_norm,
    store_updates,
    with_absent_clients,
)
from fairflower.numerics.min_norm import cosines, min_norm_weights
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Vector


class FedMDFG(FairStrategy):
    """Lower every client's loss, and make the losses more equal if they differ too much.

    Let F_k be the received model's loss on client k's data, and g_k = -Delta_k, scaled to the mean
    norm of the updates of its round::

        if the angle between F and (1, ..., 1) is above theta:
            g_fair = sum_k h_k g_k,      h ~ (sum F / ||F||^2) F - 1,    ||h|| = 1
        d      = the shortest vector in the hull of g_1 ... g_K, g_fair,
                 and the gradients of clients that took part in the last round but not in this one
        theta <- theta - d ||mean_k Delta_k|| / ||d||

    To first order, and for gradients of equal norm, g_fair lowers the larger losses and raises
    the smaller ones. If 0 is in the hull, no step lowers all losses, and the model does not change.

    Every client reports ``received_loss``. BatchNorm statistics are averaged with equal weights.
    The server stores the updates of the last round.

    Parameters
    ----------
    theta : float in [0, 90]
        Angle, in degrees, above which g_fair is used. Default 11.25 (pi / 16, Table 2 of the
        paper's appendix); with 90 it is never used (plain multi-gradient descent).

    See Also
    --------
    FedLF : The same objectives layer by layer.
    FedMGDAPlus : A common descent direction of unit-norm updates.
    FedFV : Projection of conflicting gradients.

    Notes
    -----
    If clients have equal updates but different losses, 0 is in the hull as well, because an equal
    decrease makes the losses less equal. Zero updates are not part of the hull, as in the authors'
    code.

    **The paper's line search is not included.** In the paper, all clients test the model at up to
    2 s + 1 step lengths in every round, which needs more messages; here the step is as long as the
    mean update (Appendix A.3). This class is reconstructed from that appendix, because the main
    text was not available. The scaling to the mean norm is from the authors' code, and so is the
    use of the last round's updates, which keep the mean norm of their round. That code's step is as
    long as the mean of the scaled updates, which differs if norms differ widely. It also uses
    g_fair if a client's loss rises above its mean so far; the appendix and this class do not.

    Examples
    --------
    >>> from fairflower.strategies import FedMDFG
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedMDFG()
    >>> cohort = make_cohort(updates=[[1.0, 0.0], [0.0, 1.0]], received_loss=[1.0, 3.0])
    >>> strategy.merge(cohort)["w"].round(2).tolist()  # towards the client with the larger loss
    [0.11, 0.7]
    >>> round(strategy.diagnostics["angle"], 1)
    26.6
    """

    paper: ClassVar[str] = "Pan et al., AAAI 2023"
    extra = "solvers"
    extrapolates = True  # scaled to the norm of the mean step
    keeps_agreement = False  # equal updates with different losses give no step
    measurements = ("received_loss",)
    single_updates = ("needs the inner products of the updates", "afl")
    STATE: ClassVar[tuple[str, ...]] = ("memory",)

    def __init__(
        self, *, theta: Annotated[float, Range(0, 90)] = 11.25, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.theta = theta
        self.memory: dict[int, Arrays] = {}  # client -> its Delta in the last round

    def merge(self, cohort: Cohort) -> Arrays:
        everyone, ages = with_absent_clients(cohort, self.memory, self.merged_rounds, 1)
        before, self.memory = _mean_norm(self.memory), {}
        store_updates(cohort, self.memory)
        gram = everyone.gram()
        K = len(cohort)
        equal = (ages == 0) / K
        losses = cohort.metrics["received_loss"]
        c = rescale_to_norm(self._descend(gram, losses, before), gram, equal)
        self.diagnostics.update(
            weights=equal[:K],
            coefficients=c[:K],
            angle=inequality_angle(losses),
            conflict=cosines(gram[:K, :K]),
        )
        return everyone.move(c, equal)

    def _descend(self, gram: Vector, losses: Vector, before: float) -> Vector:
        """Return the step d as coefficients of the updates, (M,), participating clients first.

        ``before`` is the mean norm of the last round's updates.
        """
        norms = np.sqrt(gram.diagonal())
        moved, present = norms > 0, norms[: len(losses)] > 0
        if not present.any():
            return np.zeros(len(gram))
        # In units of the participating clients' mean norm.
        scale = np.divide(1, norms, out=np.zeros_like(norms), where=moved)
        scale[len(losses) :] *= before / norms[: len(losses)][present].mean()
        rows = np.diag(scale)[moved]
        h = np.zeros(len(gram))
        h[np.flatnonzero(present)] = inequality_gradient(losses[present])
        # If a client reports a false loss of 1e200, the norm underflows to 0.
        if inequality_angle(losses[present]) > self.theta and (norm := np.linalg.norm(h)) > 0:
            rows = np.vstack([rows, h / norm * scale])
        solution = min_norm_weights(rows @ gram @ rows.T)
        if solution.norm <= STATIONARY:
            return np.zeros(len(gram))
        return np.asarray(solution.weights @ rows)


def _mean_norm(memory: Mapping[int, Arrays]) -> float:
    """Return the mean norm of the non-zero updates; 0 if there are none."""
    norms = [
        sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in update.values()))
        for _, update in sorted(memory.items())
    ]
    moved = [norm for norm in norms if norm > 0]
    return sum(moved) / len(moved) if moved else 0.0
