"""FedPW: parameter pruning, and weights from two signals (Guan et al., NeurIPS 2025)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import BLOCK, THREADS, Block
from fairflower.numerics.simplex import current_weights, store_weights
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search, Vector

Mask = NDArray[np.bool_]

#: Lower bound on a loss, so that its inverse is finite.
SMALLEST = 1e-10

#: Means over sorted coordinates use every tenth coordinate, starting with the first.
EVERY = 10


class FedPW(FairStrategy):
    """Drop the smallest coordinates of each update; weight clients by loss and by direction.

    Let L_k be client k's mean training loss, and u_k = theta - theta_k::

        l_k = L_k / sum_j L_j            b = beta mean L / (mean L in round 0)
        a_k = <u_k, sum_j u_j>,  s_k = a_k / sum_j a_j,   b' = beta A / (A in round 0)
        d_k  <- (1 - b) d_k + b l_k,     p_k <- p_k + d_k,   normalized
        d'_k <- (1 - b') d'_k + b' s_k,  q_k <- q_k + d'_k,  normalized
        w    = r p + (1 - r) q,          r = std(p) / (std(p) + std(q))

    where A = ||mean_k u_k||^2, which is mean a / K.
    From the second round, client k drops the smallest |u_k| of each array, a share
    ``min(1, K drop (1/L_k) / sum_j 1/L_j)`` of its coordinates: clients with a small loss are
    pruned more. Then g = sum_k w_k u_k, where w is not renormalized for dropped coordinates. In
    each array, the share ``drop`` of coordinates on which clients agree most is scaled by 1 + m/v
    if this is below 2; m is the mean |u_k| of dropped coordinates, and v the mean |g| of the
    coordinates to be scaled. Clients agree where the spread of their updates is small, after
    scaling to unit norm per client and then per coordinate. Finally theta <- theta - g.

    Clients send only their model and ``train_loss``. The number of examples is not used.

    Parameters
    ----------
    beta : float in [0, 1]
        Momentum of the weights. Default 0.3 (released code).
    drop : float in [0, 1]
        Mean share of coordinates that are dropped, and share of coordinates that are scaled. 0
        disables both. Default 0.3 (released code).
    variant : {"released", "adapted"}
        ``"released"`` follows the authors' code: b and b' are not bounded; BatchNorm statistics are
        pruned like parameters, but not scaled; an array is scaled only if every client dropped
        some of the array's coordinates. ``"adapted"`` bounds b and b' by 1, averages the statistics
        with w, and takes m over the clients that dropped coordinates.

    See Also
    --------
    FedHEAL : Drops coordinates whose signs are inconsistent over the rounds.
    FedCE : Weights by the direction of the updates and by accuracy.

    Notes
    -----
    Only the paper's abstract and code were available. The order of the steps is that of the code
    and agrees with the abstract. The code's training loss is the mean over batches, in which a
    smaller last batch counts in full; here it is the mean over examples.

    Both variants handle cases that the code does not. A negative weight w_k is set to 0: that of a
    client whose update opposes the sum of all updates, or, with b above 1, of a client whose loss
    was far smaller before. If a client keeps no coordinate of an array, the spread is undefined,
    and the array is not scaled. Identical clients get equal weights instead of 0/0. If A is 0 in
    round 0, b' is beta. Losses are at least 1e-10. Ties are broken by position.

    The code fails if a client is absent. Here, absent clients keep p, q, d and d'; participating
    clients keep the sum of their weights, in which negative ones count as 0; and a new client
    starts with the mean weight and d = 0.

    Examples
    --------
    >>> from fairflower.strategies import FedPW
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedPW(drop=0.5)
    >>> cohort = make_cohort([[1.0, 0.5, 2.0, 0.1], [3.0, -1.0, 1.0, 0.2]], train_loss=[2.0, 1.0])
    >>> for _ in range(2):
    ...     strategy.merge(cohort)["w"].round(3).tolist()
    [1.895, -0.171, 1.553, 0.145]
    [2.045, 0.276, 1.676, 0.0]
    >>> strategy.diagnostics["weights"].round(3).tolist()
    [0.553, 0.447]
    """

    paper: ClassVar[str] = "Guan et al., NeurIPS 2025"
    single_updates = ("drops coordinates of each client's update", "pa3fed")
    extrapolates = True  # coordinates are scaled up
    keeps_agreement = False  # coordinates are dropped
    reported_metrics = ("train_loss",)
    STATE: ClassVar[tuple[str, ...]] = ("p", "dp", "q", "dq", "first_loss", "first_alignment")

    def __init__(
        self,
        *,
        beta: Annotated[float, Range(0, 1)] = 0.3,
        drop: Annotated[float, Range(0, 1), Search(0.05, 0.6)] = 0.3,
        variant: Literal["released", "adapted"] = "released",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.beta, self.drop, self.variant = beta, drop, variant
        # client -> multiple of 1/K; d and d' are dp and dq
        self.p: dict[int, float] = {}
        self.dp: dict[int, float] = {}
        self.q: dict[int, float] = {}
        self.dq: dict[int, float] = {}
        self.first_loss: float | None = None
        self.first_alignment: float | None = None

    def merge(self, cohort: Cohort) -> Arrays:
        first = self.first_loss is None
        losses = np.maximum(cohort.metrics["train_loss"], SMALLEST)
        weights = cohort.cap(self._weigh(cohort, losses))
        inverse = losses.min() / losses
        rates = np.minimum(1.0, len(cohort) * self.drop * inverse / inverse.sum())
        if first:
            rates = np.zeros(len(cohort))
        self.diagnostics |= {"weights": weights, "pruned": rates}
        merged = cohort.average(weights)
        if rates.any():
            names = cohort.floats if self.variant == "released" else cohort.parameters
            for name in names:
                step = self._step(cohort, name, weights, rates)
                array = cohort.received[name]
                merged[name] = (array + step.reshape(array.shape)).astype(array.dtype)
        return merged

    def _weigh(self, cohort: Cohort, losses: Vector) -> Vector:
        """Return the weights w, shape (K,), non-negative."""
        K = len(cohort)
        gram = cohort.gram()
        alignment = np.add.accumulate(gram, axis=1)[:, -1]
        # mean a / K does not depend on the number of clients; in the code, K is constant.
        common = float(alignment.mean()) / K
        if self.first_loss is None:
            self.first_loss, self.first_alignment = float(losses.mean()), common
        b = self.beta * float(losses.mean()) / self.first_loss
        b_dot = self.beta * _ratio(common, self.first_alignment or 0.0)
        if self.variant == "adapted":
            b, b_dot = min(b, 1.0), min(b_dot, 1.0)
        p = _track(cohort, self.p, self.dp, _share(losses), b)
        q = _track(cohort, self.q, self.dq, _share(alignment), b_dot)
        spread = np.array([np.std(x, ddof=1) for x in (p, q)]) if K > 1 else np.zeros(2)
        r = _ratio(spread[0], spread.sum(), 0.5)
        self.diagnostics |= {"loss_weights": p, "direction_weights": q, "emphasis": r}
        return _share(np.maximum(r * p + (1 - r) * q, 0.0))

    def _step(self, cohort: Cohort, name: str, weights: Vector, rates: Vector) -> NDArray[Any]:
        """Return the step -g for an array, shape (n,)."""
        size = cohort.received[name].size
        if not size:
            return np.zeros(0)
        kept, norms, dropped = self._prune(cohort, name, rates)
        step, spread = np.empty(size, np.float64), np.empty(size, np.float64)

        def combine(block: Block) -> None:
            rows = np.stack([block.update(k) for k in range(len(cohort))]).astype(np.float64)
            rows *= [mask[block.part] for mask in kept]
            step[block.part] = (weights[:, None] * rows).sum(axis=0)
            spread[block.part] = _spread(rows, norms)

        for _ in cohort.each([name], combine, BLOCK):
            pass
        count = int(size * self.drop)
        if name in cohort.buffers or count == 0 or np.isnan(spread).all():
            return step
        agreed = np.argsort(spread, kind="stable")[:count]
        common = np.abs(step[agreed[::EVERY]]).mean()
        if common > 0 and dropped / common < 1:
            step[agreed] *= 1 + dropped / common
        return step

    def _prune(
        self, cohort: Cohort, name: str, rates: Vector
    ) -> tuple[Sequence[Mask], Vector, float]:
        """Drop each client's smallest coordinates in an array, at the clients' ``rates``.

        Returns K masks of shape (n,) of the coordinates that are kept, the norms of the updates
        over these, shape (K,), and m, which is NaN if it is unknown.
        """
        (array,) = cohort.blocks([name], max(cohort.received[name].size, 1))

        def prune(k: int) -> tuple[Mask, float, float]:
            update = np.abs(array.update(k))
            count = int(update.size * rates[k])
            mask, ordered = _drop_smallest(update, count)
            norm = float(np.sqrt(np.square(update[mask], dtype=np.float64).sum()))
            dropped = float(ordered[::EVERY].mean(dtype=np.float64)) if count else np.nan
            return mask, norm, dropped

        with ThreadPoolExecutor(THREADS) as pool:
            kept, norms, sizes = zip(*pool.map(prune, range(len(cohort))), strict=True)
        known = np.array(sizes)
        if self.variant == "adapted":
            known = known[np.isfinite(known)]
        return kept, np.array(norms), float(known.mean()) if known.size else np.nan


def _track(
    cohort: Cohort, held: dict[int, float], rates: dict[int, float], share: Vector, b: float
) -> Vector:
    """Update the stored weights ``held`` and ``rates``; return the weights, shape (K,), sum 1."""
    clients, equal = cohort.client_ids, np.ones(len(cohort))
    rate = np.array([rates.get(client, 0.0) for client in clients]) / len(cohort)
    rate = (1 - b) * rate + b * share
    known = any(client in held for client in clients)
    if held.keys() - set(clients):  # a sum of a part of the weights could be close to 0
        held.update((client, max(held[client], 0.0)) for client in clients if client in held)
    weights = _share((current_weights(held, clients, equal) if known else 0.0) + rate)
    store_weights(held, clients, equal, weights)
    rates.update(zip(clients, (rate * len(cohort)).tolist(), strict=True))
    return weights


def _share(values: Vector) -> Vector:
    """Return the values divided by their sum, or equal shares if the sum is 0."""
    total = values.sum()
    return values / total if total else np.full(len(values), 1 / len(values))


def _ratio(a: float, b: float, otherwise: float = 1.0) -> float:
    return float(a / b) if b > 0 else otherwise


def _drop_smallest(sizes: NDArray[Any], count: int) -> tuple[Mask, NDArray[Any]]:
    """Return a mask that excludes the ``count`` smallest sizes, and these sizes in ascending order.

    Among equal sizes, the first are excluded. Sorting only the smallest values is several times
    faster than sorting all values, or their positions.
    """
    if count == 0:
        return np.ones(sizes.size, bool), sizes[:0]
    ordered = np.partition(sizes, count - 1)[:count]
    ordered.sort()
    mask = sizes > ordered[-1]
    ties = np.flatnonzero(sizes == ordered[-1])
    mask[ties[int(np.sum(ordered == ordered[-1])) :]] = True
    return mask, ordered


def _spread(rows: Vector, norms: Vector) -> Vector:
    """Return the spread of the clients' updates at each coordinate; NaN where it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = rows / norms[:, None]
        unit /= np.sqrt(np.square(unit).sum(axis=0))
        unit -= unit.sum(axis=0) / len(unit)
        return np.asarray(np.sqrt(np.square(unit).sum(axis=0) / (len(unit) - 1)))
