"""FairRFL: fair and robust learning with selfish clients, who lengthen their updates (2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Block, Cohort, sum_in_order
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search

Vector = NDArray[np.float64]

#: Standard deviations per median absolute deviation of normal numbers.
NORMAL = 1.4826

#: Smallest deviation, as a share of the median length: else rounding errors would count.
SMALLEST = 1e-6


class FairRFL(FairStrategy):
    """Shorten the updates of clients that are far longer than the others, and take a plain mean.

    With N_k = ||Delta_k|| over all parameters, and medians over the clients::

        MAD   = 1.4826 median |N_k - median N|
        selfish  iff  (N_k - median N) / MAD > tau
        Delta_k' = b Delta_k + (1 - b) m,    ||Delta_k'|| = median N    if selfish, else Delta_k
        theta <- theta + 1/K sum_k Delta_k'

    m is the median of the updates, coordinate by coordinate, and b the largest solution in [0, 1].
    Clients send nothing besides their model. The number of examples does not enter; BatchNorm
    statistics are averaged equally, and do not enter N.

    Parameters
    ----------
    tau : float >= 0
        Number of deviations above the median at which an update counts as selfish. Default 2.5 (the
        paper's, quoted in a port of the authors' code).
    recovery : {"median", "downscale"}
        What becomes of a selfish update: moved towards m, or only shortened,
        Delta_k' = (median N / N_k) Delta_k.

    See Also
    --------
    Uniform : The mean without a defense.
    FedMGDAPlus : Scales every update to the same length.
    DqFFL : The same defense under q-FFL.

    Notes
    -----
    From a port of the authors' code, and the examples of the paper's text that its tests quote.
    This class is the paper's RFL-Self.

    Inferred, for cases that the sources leave open: with m longer than median N there may be no
    solution b, and the update is shortened instead; MAD counts as at least a millionth of
    median N. The authors' code finds b by ten bisections, this class by the quadratic formula.

    ``clip_update_median = 1`` of every strategy shortens all updates above the median, not only
    those that stand out.

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
        K, found = len(cohort), recover(cohort, self.tau, self.recovery)
        equal = np.full(K, 1 / K)
        self.diagnostics |= {"weights": equal, "score": found.score, "kept": found.kept}
        merged = cohort.move(found.kept / K, equal)
        if (rest := float((1 - found.kept[found.moved]).sum())) > 0:
            add_median(cohort, merged, rest / K)
        return merged


@dataclass(frozen=True)
class Recovery:
    """Updates Delta_k' = kept Delta_k, plus (1 - kept) m where moved; arrays of shape (K,)."""

    score: Vector
    kept: Vector
    moved: NDArray[np.bool_]
    lengths: Vector  # of Delta_k'


def recover(cohort: Cohort, tau: float, recovery: str) -> Recovery:
    """Find the selfish clients of a cohort, and what is left of their updates."""
    K = len(cohort)
    N = np.sqrt(cohort.squared_norms())
    middle = float(np.median(N))
    deviation = max(NORMAL * float(np.median(np.abs(N - middle))), SMALLEST * middle)
    score = (N - middle) / deviation if deviation > 0 else np.zeros(K)
    selfish = score > tau
    kept, moved = np.ones(K), np.zeros(K, bool)
    kept[selfish] = middle / N[selfish]
    if recovery == "median" and selfish.any():
        b = _shares_of_updates(cohort, N, middle)
        moved = selfish & np.isfinite(b)
        kept[moved] = b[moved]
    return Recovery(score, kept, moved, np.where(selfish, middle, N))


def _shares_of_updates(cohort: Cohort, N: Vector, length: float) -> Vector:
    """Return b with ||b Delta_k + (1 - b) m|| = length, shape (K,); NaN without a solution."""
    K = len(cohort)

    def multiply(block: Block) -> Vector:
        m = _median(cohort, block).astype(np.float64)
        products = [np.multiply(block.update(k), m).sum() for k in range(K)]
        return np.array([*products, np.square(m).sum()])[:, None]

    sums = sum_in_order(cohort.each(cohort.parameters, multiply), K + 1)
    along, square = sums[:-1], sums[-1]  # m Delta_k, and ||m||^2
    half = along - square  # m (Delta_k - m)
    whole = np.square(N) - 2 * along + square  # ||Delta_k - m||^2
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(np.square(half) - whole * (square - length**2))
        b = (root - half) / whole
    return np.where((b >= 0) & (b <= 1), b, np.nan)


def add_median(cohort: Cohort, model: Arrays, factor: float) -> None:
    """Add ``factor`` times the median of the updates to the parameters of a model."""

    def add(block: Block) -> None:
        step = factor * _median(cohort, block)
        model[block.name].reshape(-1)[block.part] += step.astype(block.precision)

    for _ in cohort.each(cohort.parameters, add):
        pass


def _median(cohort: Cohort, block: Block) -> Vector:
    """Return the median of the clients' updates at each coordinate, shape (b,)."""
    rows = np.stack([block.update(k) for k in range(len(cohort))])
    return np.asarray(np.median(rows, axis=0))
