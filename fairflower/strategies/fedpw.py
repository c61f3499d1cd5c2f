"""FedPW: parameter pruning and two-signal weights (Guan et al., NeurIPS 2025)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.carried_weights import current_weights, store_weights
from fairflower.aggregation.cohort import BLOCK, THREADS, Arrays, Block, Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Smallest loss, so that its inverse is finite.
SMALLEST = 1e-10

#: A mean over sorted coordinates is taken over every tenth of them, from the first.
EVERY = 10


@dataclass(frozen=True)
class Pruned:
    """The updates to an array without their smallest coordinates."""

    kept: list[Mask]  # K times [n]
    norms: Vector  # lengths of the kept updates, shape (K,)
    dropped: float  # mean size of the dropped coordinates (m); NaN if unknown


class FedPW(FairStrategy):
    """Drop the smallest coordinates of each update; weight clients by loss and by direction.

    With L_k the mean loss during client k's training and u_k = theta - theta_k::

        l_k = L_k / sum_j L_j            b = beta mean L / (mean L of round 0)
        a_k = <u_k, sum_j u_j>,  s_k = a_k / sum_j a_j,   b' = beta mean a / (mean a of round 0)
        d_k  <- (1 - b) d_k + b l_k,     p_k <- p_k + d_k,   normalized
        d'_k <- (1 - b') d'_k + b' s_k,  q_k <- q_k + d'_k,  normalized
        w    = r p + (1 - r) q,          r = std(p) / (std(p) + std(q))

    From the second round on, in each array separately, client k's share ``min(1, K drop (1/L_k) /
    sum_j 1/L_j)`` of coordinates with the smallest |u_k| is dropped, so clients with a small loss
    are pruned more. Then g = sum_k w_k u_k; the weights of a coordinate are the same if some
    clients dropped it. Coordinates on which the clients agree most (smallest spread of the updates,
    scaled to length 1 by client and then by coordinate), a share ``drop`` of them, are scaled by 1
    + m/r if that is below 2: m is the mean size of dropped coordinates, r the mean |g| of these.
    theta <- theta - g.

    Clients send nothing besides their model and ``train_loss``. The number of examples does not
    enter.

    Parameters
    ----------
    beta : float in [0, 1]
        Momentum of the weights. Default 0.3 (released code).
    drop : float in [0, 1]
        Mean share of dropped coordinates, and share of the scaled ones. 0 disables both. Default
        0.3 (released code).
    variant : {"released", "adapted"}
        ``"released"`` follows the authors' code: b and b' are not bounded; BatchNorm statistics are
        pruned like parameters, but not scaled; an array is not scaled if any client dropped none
        of its coordinates. ``"adapted"`` bounds b and b' by 1, averages the statistics with w, and
        takes m over the clients that dropped coordinates.

    See Also
    --------
    FedHEAL : Drops inconsistent coordinates, and remembers the signs of all updates.
    FedCE : Weights by the direction of the updates and by data.

    Notes
    -----
    Of the paper only the abstract and code were available; the order of steps is the code's. The
    abstract agrees with it.

    Guards that the code lacks, in both variants: a negative weight, of a client whose update
    opposes the sum of all, counts as 0; a client without any kept coordinate makes the spread
    undefined, and the array is not scaled; equal clients have equal weights instead of 0/0; losses
    are at least 1e-10. Ties are broken by position.

    The code fails if a client is absent. Here absent clients keep p, q, d and d', the present
    clients divide the sum of their weights, and a new client starts at the mean weight, with d = 0.

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
    extrapolates = True  # coordinates are scaled up
    keeps_agreement = False  # coordinates are dropped
    reads = ("train_loss",)
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
        if self.first_loss is None:
            self.first_loss, self.first_alignment = float(losses.mean()), float(alignment.mean())
        b = self.beta * float(losses.mean()) / self.first_loss
        b_dot = self.beta * _ratio(float(alignment.mean()), self.first_alignment or 0.0)
        if self.variant == "adapted":
            b, b_dot = min(b, 1.0), min(b_dot, 1.0)
        p = _track(cohort, self.p, self.dp, _share(losses), b)
        q = _track(cohort, self.q, self.dq, _share(alignment), b_dot)
        spread = np.array([np.std(x, ddof=1) for x in (p, q)]) if K > 1 else np.zeros(2)
        r = _ratio(spread[0], spread.sum(), 0.5)
        self.diagnostics |= {"loss_weights": p, "direction_weights": q, "emphasis": r}
        return _share(np.maximum(r * p + (1 - r) * q, 0.0))

    def _step(self, cohort: Cohort, name: str, weights: Vector, rates: Vector) -> NDArray[Any]:
        """Return the step -g of an array, shape (n,)."""
        pruned = self._prune(cohort, name, rates)
        size = cohort.received[name].size
        step, spread = np.empty(size, np.float64), np.empty(size, np.float64)

        def combine(block: Block) -> None:
            rows = np.stack([block.update(k) for k in range(len(cohort))]).astype(np.float64)
            rows *= [mask[block.part] for mask in pruned.kept]
            step[block.part] = (weights[:, None] * rows).sum(axis=0)
            spread[block.part] = _spread(rows, pruned.norms)

        for _ in cohort.each([name], combine, BLOCK):
            pass
        count = int(size * self.drop)
        if name in cohort.buffers or count == 0 or np.isnan(spread).all():
            return step
        agreed = _smallest(spread, count)
        common = np.abs(step[agreed[::EVERY]]).mean()
        if common > 0 and pruned.dropped / common < 1:
            step[agreed] *= 1 + pruned.dropped / common
        return step

    def _prune(self, cohort: Cohort, name: str, rates: Vector) -> Pruned:
        """Return for every client the mask of an array's coordinates that it keeps."""
        (whole,) = cohort.blocks([name], max(cohort.received[name].size, 1))

        def prune(k: int) -> tuple[Mask, float, float]:
            update = np.abs(whole.update(k))
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
        return Pruned(list(kept), np.array(norms), float(known.mean()) if known.size else np.nan)


def _track(
    cohort: Cohort, held: dict[int, float], rates: dict[int, float], share: Vector, b: float
) -> Vector:
    """Update stored weights ``held`` by a round's shares; return them, shape (K,), with sum 1."""
    clients, equal = cohort.client_ids, np.ones(len(cohort))
    rate = np.array([rates.get(client, 0.0) for client in clients]) / len(cohort)
    rate = (1 - b) * rate + b * share
    known = any(client in held for client in clients)
    weights = _share((current_weights(held, clients, equal) if known else 0.0) + rate)
    store_weights(held, clients, equal, weights)
    rates.update(zip(clients, (rate * len(cohort)).tolist(), strict=True))
    return weights


def _share(values: Vector) -> Vector:
    """Return values divided by their sum; equal shares if the sum is not positive."""
    total = values.sum()
    return values / total if total > 0 else np.full(len(values), 1 / len(values))


def _ratio(a: float, b: float, otherwise: float = 1.0) -> float:
    return float(a / b) if b > 0 else otherwise


def _drop_smallest(sizes: NDArray[Any], count: int) -> tuple[Mask, NDArray[Any]]:
    """Return a mask that leaves out the ``count`` smallest sizes, and these sizes, ascending.

    Of equal sizes the first are dropped. Only the smallest are sorted, as values, which is several
    times as fast as sorting all, or positions.
    """
    if count == 0:
        return np.ones(sizes.size, bool), sizes[:0]
    ordered = np.partition(sizes, count - 1)[:count]
    ordered.sort()
    mask = sizes > ordered[-1]
    ties = np.flatnonzero(sizes == ordered[-1])
    mask[ties[int(np.sum(ordered == ordered[-1])) :]] = True
    return mask, ordered


def _smallest(values: Vector, count: int) -> NDArray[np.intp]:
    """Return the positions of the ``count`` smallest values, ascending; NaN ranks last.

    These are ``np.argsort(values, kind="stable")[:count]``, but only the smallest are sorted.
    """
    bound = np.partition(values, count - 1)[count - 1]
    if np.isnan(bound):
        return np.argsort(values, kind="stable")[:count]
    below = np.flatnonzero(values < bound)
    ties = np.flatnonzero(values == bound)[: count - len(below)]
    return np.concatenate([below[np.argsort(values[below], kind="stable")], ties])


def _spread(rows: Vector, norms: Vector) -> Vector:
    """Return how much K clients differ at each coordinate; NaN where it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = rows / norms[:, None]
        unit /= np.sqrt(np.square(unit).sum(axis=0))
        unit -= unit.sum(axis=0) / len(unit)
        return np.asarray(np.sqrt(np.square(unit).sum(axis=0) / (len(unit) - 1)))
