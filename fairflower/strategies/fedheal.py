"""FedHEAL: Fair Federated Learning under Domain Skew (Chen, Huang, Ye, CVPR 2024)."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Block, Cohort, Floats, squares, summed
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range

Mask = NDArray[np.bool_]
Masks = dict[str, Mask]
Counts = dict[str, NDArray[np.unsignedinteger]]


class FedHEAL(FairStrategy):
    """Keep what a client pushes consistently; weigh clients by how far they move.

    **FPHL** keeps coordinate i of client m if the share of its earlier rounds
    with the same sign of the update is at least tau (Eq. 5-9)::

        l = share of earlier rounds with Delta >= 0
        c = l        if Delta >= 0,    1 - l  otherwise
        W_i <- W_i + sum_m q_mi Delta_mi,    q_mi ~ [c_mi >= tau] p_m

    **FAEL** adds each client's share of the kept distance, with momentum, to its
    weight (Eq. 11-12)::

        d_m   = || [c >= tau] * Delta_m ||^2
        dp_m <- (1 - beta) dp_m + beta d_m / sum_j d_j
        p_m  <- p_m + dp_m,  normalised

    The paper gives two orders. Eq. 5 has l from the rounds before this one, as the
    authors' code does, and so does this class by default. Algorithm 1 puts this round
    into l by Eq. 6 first and takes c from that, so every update agrees with itself: in
    a client's second round c is 1 or 1/2, not 1 or 0, and tau <= 1/2 drops nothing.
    (Eq. 6 divides by t, and is read with rounds counted from 1.)

    Needs nothing from the clients but weights and ``num-examples``. Signs are
    counted per client over its own participations, as integers, so shares are
    exact under partial participation; a client's first round keeps everything.
    With ``tau=0`` and ``beta=0`` the paper's variant is FedAvg.

    Parameters
    ----------
    tau : float in [0, 1], or None
        Consistency threshold; None switches FPHL off. Default 0.3 (paper §4.2,
        Digits; Office-Caltech: 0.4).
    beta : float in [0, 1], or None
        Momentum of the weights; None switches FAEL off and leaves weights by
        sample count. Default 0.4 (paper §4.2).
    variant : {"paper", "algorithm1", "released"}
        ``"algorithm1"`` is ``"paper"`` but for l, which this round is part of.
        ``"released"`` follows the authors' code where it differs from the text:
        c > tau; d_m is the sum over tensors of unsquared norms; weights start
        equal and are carried on un-normalised; the shares d_m / sum_j d_j count
        absent clients with their last distance; BatchNorm statistics are masked
        like parameters (``"paper"``: averaged by p, never masked).
    """

    paper: ClassVar[str] = "Chen, Huang, Ye, CVPR 2024"
    keeps_agreement = False  # a coordinate without a steady sign stands still
    STATE: ClassVar[tuple[str, ...]] = ("rounds", "rises", "p", "dp", "examples", "distance")

    def __init__(
        self,
        *,
        tau: Annotated[float | None, Range(0, 1)] = 0.3,
        beta: Annotated[float | None, Range(0, 1)] = 0.4,
        variant: Literal["paper", "algorithm1", "released"] = "paper",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.tau, self.beta, self.variant = tau, beta, variant
        self.rounds: dict[int, int] = {}  # client -> rounds that it took part in
        self.rises: dict[int, Counts] = {}  # client -> in how many of them Delta >= 0
        self.p: dict[int, float] = {}
        self.dp: dict[int, float] = {}
        self.examples: dict[int, float] = {}
        self.distance: dict[int, float] = {}

    def merge(self, cohort: Cohort) -> Arrays:
        kept, distances = self._harmonize(cohort)
        weights = cohort.sample_weights
        if self.beta is not None:
            weights = self._equalize(cohort, distances, self.beta)
        self.diagnostics.update(weights=weights, distance=distances)
        if self.tau is None:
            return cohort.average(weights)
        return cohort.average(weights, lambda block, k: _at(kept[k], block))

    def _harmonize(self, cohort: Cohort) -> tuple[list[Masks], NDArray[np.float64]]:
        """FPHL: the masks [c >= tau] of the K clients, and their distances d, shape (K,)."""
        names = cohort.floats if self.variant == "released" else cohort.parameters
        kept: list[Masks] = [{} for _ in cohort.client_ids]
        needed = [0] * len(cohort)
        if self.tau is not None:
            for k, client in enumerate(cohort.client_ids):
                needed[k] = self._needed(client, self.tau)
                self._open_table(client, cohort, names)
                kept[k] = {name: np.empty(cohort.received[name].size, bool) for name in names}

        def harmonize(block: Block) -> tuple[str, NDArray[np.float64]]:
            update, sums = np.empty(block.received.shape, block.precision), []
            for k, client in enumerate(cohort.client_ids):
                block.update(k, out=update)
                if self.tau is not None:
                    mask = kept[k][block.name][block.part]
                    self._keep(client, block, update, needed[k], mask)
                    update *= mask
                sums.append(squares(update))
            return block.name, np.array(sums)

        parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in names}
        for name, sums in cohort.each(names, harmonize):
            parts[name].append(sums)
        counted = [name for name in names if name not in cohort.buffers]
        # [tensors, K]
        d = np.reshape([summed(parts[name], len(cohort)) for name in counted], (-1, len(cohort)))
        for client in cohort.client_ids:
            self.rounds[client] = self.rounds.get(client, 0) + 1
        if self.variant == "released":
            return kept, np.sqrt(d).sum(axis=0)
        return kept, d.sum(axis=0)

    def _needed(self, client: int, tau: float) -> int:
        """In how many of its earlier rounds a sign must have been the same to be kept."""
        t = self.rounds.get(client, 0)
        # tau as it is written, 3/10 and not its nearest double: ties are then exact.
        share = Fraction(str(float(tau)))
        if self.variant == "released":
            return floor(share * t) + 1 if t else 0  # c > tau
        if self.variant == "algorithm1":
            return max(ceil(share * (t + 1)) - 1, 0)  # one of the t + 1 is this round itself
        return ceil(share * t)  # c >= tau

    def _keep(self, client: int, block: Block, update: Floats, needed: int, out: Mask) -> None:
        """Write [c >= tau] against the earlier rounds; then this round enters the table."""
        t = self.rounds.get(client, 0)
        # The released code groups zeros with the decreases.
        compare = np.greater if self.variant == "released" else np.greater_equal
        rising = compare(update, 0, out=out).view(np.uint8)
        rises = self.rises[client][block.name][block.part]
        # A rise is kept if rises >= needed, a fall if rises <= t - needed. Integers without a
        # sign are beyond t where a difference is negative, so one comparison does for both.
        left = rises - rising * rises.dtype.type(needed)
        rises += rising
        np.less_equal(left, t - needed, out=out)

    def _open_table(self, client: int, cohort: Cohort, names: list[str]) -> None:
        """Make room for one more round in the client's table of sign counts."""
        if client not in self.rises:
            self.rises[client] = {n: np.zeros(cohort.received[n].size, np.uint8) for n in names}
        smallest = np.min_scalar_type(self.rounds.get(client, 0) + 1)
        for name, counts in self.rises[client].items():
            if counts.dtype.itemsize < smallest.itemsize:
                self.rises[client][name] = counts.astype(smallest)

    def _equalize(
        self, cohort: Cohort, distances: NDArray[np.float64], beta: float
    ) -> NDArray[np.float64]:
        """FAEL: the clients' weights p, shape (K,) (Eq. 12)."""
        clients = cohort.client_ids
        self._welcome(cohort)
        p = np.array([self.p[client] for client in clients])
        mass = p.sum()
        self.distance.update(zip(clients, distances.tolist(), strict=True))
        released = self.variant == "released"
        total = sum(self.distance.values()) if released else distances.sum()
        share = distances / total if total > 0 else p / mass
        dp = (1 - beta) * np.array([self.dp[client] for client in clients]) + beta * share
        if released:
            p = p + dp
        else:
            # Eq. 12 within the cohort, which keeps its mass: absent clients keep theirs.
            p = p / mass + dp
            p = p / p.sum() * mass
        self.p.update(zip(clients, p.tolist(), strict=True))
        self.dp.update(zip(clients, dp.tolist(), strict=True))
        return np.asarray(p / p.sum())

    def _welcome(self, cohort: Cohort) -> None:
        """Give clients seen for the first time their first weight.

        In the paper's variant as much per example as the known clients hold on
        average, and a known client's weight follows its number of examples: so
        beta = 0 stays FedAvg whoever takes part with however much data.
        """
        per_example = 1 / float(cohort.num_examples.sum())
        if self.examples:
            per_example = sum(self.p.values()) / sum(self.examples.values())
        for client, examples in zip(cohort.client_ids, cohort.num_examples.tolist(), strict=True):
            if client not in self.p:
                self.dp[client] = 0.0
                self.p[client] = (
                    1 / len(cohort) if self.variant == "released" else examples * per_example
                )
            elif self.variant != "released":
                self.p[client] *= examples / self.examples[client]
            self.examples[client] = examples


def _at(masks: Masks, block: Block) -> Mask | None:
    """The mask's view of a block; None for an array that is not masked."""
    mask = masks.get(block.name)
    return None if mask is None else mask[block.part]
