"""FedFV: Federated Learning with Fair Averaging (Wang et al., IJCAI 2021)."""

from fractions import Fraction
from math import ceil
from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.directions import rescale_to_norm, store_updates, with_absent_clients
from fairflower.numerics import Matrix
from fairflower.numerics.min_norm import cosines
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search, Vector


class FedFV(FairStrategy):
    """Project conflicting gradients onto each other's normal plane before averaging (Alg. 1-3).

    Let g_k = -Delta_k. The clients are in ascending order of their loss::

        for each client i except the alpha share with the largest losses:
            for j in order:  if <g_j, ghat_i> < 0:
                ghat_i <- ghat_i - g_j <g_j, ghat_i> / ||g_j||^2
        g <- mean_k ghat_k
        for k = tau ... 1 (once tau rounds are over):
            c <- sum of the gradients last seen k rounds ago with <g_j, g> < 0
            if <g, c> < 0:  g <- g - c <g, c> / ||c||^2
        g <- g ||mean_k g_k|| / ||g||,       theta <- theta - g

    The loop over k resolves conflicts with absent clients. It has no effect if none is absent.

    Every client reports ``received_loss``, the received model's loss on its training data.
    BatchNorm statistics are averaged with equal weights.

    Parameters
    ----------
    alpha : float in [0, 1]
        Share of clients whose gradients are unchanged: K - ceil((K - 1) (1 - alpha)) of K clients,
        so at least one unless alpha is 0. Default 0.1 (paper).
    tau : int >= 0
        Number of rounds for which an absent client's gradient counts; 0 disables this. Above 0 the
        server stores a copy of every client's gradient. Default 1 (the authors' code since 2022).
    variant : {"paper", "released"}
        ``"released"`` follows the authors' current code, whose loop runs over ages tau-1 ... 0 from
        round tau on; with tau = 1, absent clients then never count.

    See Also
    --------
    FedMGDAPlus : A common descent direction of all clients.
    FedMDFG : A common descent direction with a fairness guidance vector.

    Notes
    -----
    All vectors are in the span of the gradients, so the computation needs only their Gram matrix,
    and the model is updated once, at the end.

    The text of Alg. 3 was not available. The ages tau ... 1 are from the code released with the
    paper (easyFL, May to August 2021); its script for the paper's tables compares tau = 0, 1, 3 and
    10. Since easyFL was rewritten on 25 August 2021, it has used the ages tau-1 ... 0, as do FLGo
    and FedLF's code: clients seen tau rounds ago are forgotten, and conflicts of g with the current
    round's gradients are removed a second time.

    Inner products are over trainable parameters only. The authors' code takes them over whole state
    dicts: BatchNorm's step counters then outweigh all conflicts, and the result is the plain mean.

    Examples
    --------
    >>> from fairflower.strategies import FedFV
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedFV(alpha=0.0)
    >>> cohort = make_cohort(updates=[[3.0, 1.0], [-1.0, 1.0]], received_loss=[1.0, 3.0])
    >>> strategy.merge(cohort)["w"].round(3).tolist()  # the mean update is [1, 1]
    [0.632, 1.265]
    """

    paper: ClassVar[str] = "Wang et al., IJCAI 2021"
    extrapolates = True  # a projection, rescaled to the norm of the mean step
    measurements = ("received_loss",)
    single_updates = ("projects each client's update onto the others'", "qffl")
    STATE: ClassVar[tuple[str, ...]] = ("memory",)

    def __init__(
        self,
        *,
        alpha: Annotated[float, Range(0, 1)] = 0.1,
        tau: Annotated[int, Range(0), Search(0, 10)] = 1,
        variant: Literal["paper", "released"] = "paper",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.alpha, self.tau, self.variant = alpha, tau, variant
        self.oldest = tau if variant == "paper" else tau - 1  # largest age in the memory
        self.memory: dict[int, Arrays] = {}  # client -> its last Delta

    def merge(self, cohort: Cohort) -> Arrays:
        now, last = cohort.server_round, self.merged_rounds
        kept = [k for k in self.memory if now - last.get(k, 0) <= self.oldest]
        self.memory = {k: self.memory[k] for k in kept}
        everyone, ages = with_absent_clients(cohort, self.memory, last, self.oldest)
        if self.oldest > 0:
            store_updates(cohort, self.memory)
        gram = everyone.gram()
        K = len(cohort)
        equal = (ages == 0) / K
        c = self._mitigate(gram, cohort.metrics["received_loss"])
        if now > self.oldest:
            for age in range(self.oldest, self.oldest - self.tau, -1):
                c = _reconcile(c, gram, ages == age)
        c = rescale_to_norm(c, gram, equal)
        self.diagnostics.update(
            weights=equal[:K], coefficients=c[:K], conflict=cosines(gram[:K, :K])
        )
        return everyone.move(c, equal)

    def _mitigate(self, gram: Matrix, losses: Vector) -> Vector:
        """Return mean_k ghat_k as coefficients of the gradients, shape (M,)."""
        order = np.argsort(losses, kind="stable")
        # A fraction, because (11 - 1) * (1 - 0.7) is above 3 in floating point.
        share = 1 - Fraction(str(self.alpha))
        first_kept = ceil((len(losses) - 1) * share) if self.alpha else len(losses)
        kept = set(order[first_kept:].tolist())
        total = np.zeros(len(gram))
        for i in range(len(losses)):
            ghat = np.zeros(len(gram))
            ghat[i] = 1
            for j in order.tolist() if i not in kept else []:
                inner = gram[j] @ ghat
                if j != i and inner < 0:
                    ghat[j] -= inner / gram[j, j]
            total += ghat
        return total / len(losses)


def _reconcile(c: Vector, gram: Matrix, selected: NDArray[np.bool_]) -> Vector:
    """Project g onto the normal plane of the sum of those selected gradients that conflict."""
    conflicting = (selected & (gram @ c < 0)).astype(np.float64)
    inner = conflicting @ gram @ c
    if inner < 0:
        c = c - conflicting * inner / (conflicting @ gram @ conflicting)
    return c
