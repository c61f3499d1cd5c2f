"""FairRFL: fair and robust learning with selfish clients, which lengthen their updates (2026)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Block, sum_in_order
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search, Vector

#: Ratio of standard deviation to median absolute deviation in a normal distribution.
MAD_TO_STD = 1.4826

#: Lower bound on MAD as a share of the median norm, so that no rounding error is an outlier.
SMALLEST = 1e-6


class FairRFL(FairStrategy):
    """Shorten updates that are far longer than the others, and average with equal weights.

    Let N_k = ||Delta_k|| over all parameters. Medians are taken over the clients::

        MAD   = 1.4826 median |N_k - median N|
        selfish  iff  (N_k - median N) / MAD > tau
        Delta_k' = b Delta_k + (1 - b) m,    ||Delta_k'|| = median N    if selfish, else Delta_k
        theta <- theta + 1/K sum_k Delta_k'

    m is the coordinate-wise median of the updates, and b the largest solution in [0, 1]. Clients
    send only their model. The number of examples is not used. BatchNorm statistics are averaged
    with equal weights and are not part of N_k.

    Parameters
    ----------
    tau : float >= 0
        Number of deviations above the median norm at which an update counts as selfish. Default
        2.5 (the paper's value, as quoted in a port of the authors' code).
    recovery : {"median", "downscale"}
        How a selfish update is shortened. ``"median"``, the default, also moves it towards m, as
        above. ``"downscale"`` only scales it: Delta_k' = (median N / N_k) Delta_k.

    See Also
    --------
    Uniform : The mean without a defense.
    FedMGDAPlus : Scales every update to the same norm.
    DqFFL : The same defense with q-FFL.

    Notes
    -----
    This class is the paper's RFL-Self. It is reconstructed from a port of the authors' code, whose
    tests quote examples from the paper.

    Two details are inferred because the sources leave them open. If m is longer than median N and
    no solution b exists, the update is shortened as with ``"downscale"``. MAD is at least a
    millionth of median N. The authors' code finds b by ten bisection steps, this class by the
    quadratic formula.

    The option ``clip_update_median=1``, which every strategy has, shortens all updates above the
    median norm, not only outliers.

    Examples
    --------
    >>> from fairflower.strategies import FairRFL
    >>> from fairflower.testing import make_cohort
    >>> strategy = FairRFL()
    >>> cohort = make_cohort([[0.95, 0.55], [-0.2, 0.9], [-0.6, 0.55], [-1.2, 0.1], [1.4, 1.46]])
    >>> strategy.merge(cohort)["w"].round(4).tolist()
    [-0.1047, 0.6126]
    >>> strategy.diagnostics["kept"].round(3).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.454]
    >>> strategy.diagnostics["weights"].tolist()
    [0.2, 0.2, 0.2, 0.2, 0.2]
    """

    paper: ClassVar[str] = "FairRFL, IEEE TETC 2026"
    single_updates = ("needs the norm of each client's update", "superquantile")

    def __init__(
        self,
        *,
        tau: Annotated[float, Range(0), Search(1, 10, log=True)] = 2.5,
        recovery: Literal["median", "downscale"] = "median",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.tau, self.recovery = tau, recovery

    def merge(self, cohort: Cohort) -> Arrays:
        K, defended = len(cohort), recover(cohort, self.tau, self.recovery)
        equal = np.full(K, 1 / K)
        self.diagnostics |= {"weights": equal, "score": defended.score, "kept": defended.kept}
        merged = cohort.move(defended.kept / K, equal)
        if (rest := float((1 - defended.kept[defended.moved]).sum())) > 0:
            add_median(cohort, merged, rest / K)
        return merged


@dataclass(frozen=True)
class Recovery:
    """Updates after the defense, Delta_k' = kept Delta_k (+ (1 - kept) m if moved), for K clients.

    All arrays have shape (K,).
    """

    score: Vector
    kept: Vector
    moved: NDArray[np.bool_]
    norms: Vector  # of Delta_k'


def recover(cohort: Cohort, tau: float, recovery: str) -> Recovery:
    """Return a cohort's updates after the defense; only those of selfish clients change."""
    K = len(cohort)
    N = np.sqrt(cohort.squared_norms())
    middle = float(np.median(N))
    deviation = max(MAD_TO_STD * float(np.median(np.abs(N - middle))), SMALLEST * middle)
    score = (N - middle) / deviation if deviation > 0 else np.zeros(K)
    selfish = score > tau
    kept, moved = np.ones(K), np.zeros(K, bool)
    kept[selfish] = middle / N[selfish]
    if recovery == "median" and selfish.any():
        b = _shares_of_updates(cohort, N, middle)
        moved = selfish & np.isfinite(b)
        kept[moved] = b[moved]
    return Recovery(score, kept, moved, np.where(selfish, middle, N))


def _shares_of_updates(cohort: Cohort, N: Vector, norm: float) -> Vector:
    """Return b with ||b Delta_k + (1 - b) m|| = norm, shape (K,); NaN if no b is in [0, 1]."""
    K = len(cohort)

    def multiply(block: Block) -> Vector:
        m = _median(cohort, block).astype(np.float64)
        products = [np.multiply(block.update(k), m).sum() for k in range(K)]
        return np.array([*products, np.square(m).sum()])[:, None]

    sums = sum_in_order(cohort.each(cohort.parameters, multiply), K + 1)
    along, square = sums[:-1], sums[-1]  # m Delta_k, and ||m||^2
    half = along - square  # m (Delta_k - m)
    apart = np.square(N) - 2 * along + square  # ||Delta_k - m||^2
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(np.square(half) - apart * (square - norm**2))
        b = (root - half) / apart
    return np.where((b >= 0) & (b <= 1), b, np.nan)


def add_median(cohort: Cohort, model: Arrays, factor: float) -> None:
    """Add ``factor`` times the median of the updates to the parameters of ``model``, in place."""

    def add(block: Block) -> None:
        step = factor * _median(cohort, block)
        model[block.name].reshape(-1)[block.part] += step.astype(block.precision)

    for _ in cohort.each(cohort.parameters, add):
        pass


def _median(cohort: Cohort, block: Block) -> Vector:
    """Return the median of the clients' updates at each coordinate, shape (b,)."""
    rows = np.stack([block.update(k) for k in range(len(cohort))])
    return np.asarray(np.median(rows, axis=0))
