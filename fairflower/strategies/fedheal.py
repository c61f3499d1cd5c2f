"""FedHEAL: Fair Federated Learning under Domain Skew (Chen, Huang, Ye, CVPR 2024)."""

from fractions import Fraction
from math import ceil, floor
from typing import Annotated, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Block, Floats, partial_squared_sums, sum_in_order
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Vector

Mask = NDArray[np.bool_]
Masks = dict[str, Mask]
Counts = dict[str, NDArray[np.unsignedinteger]]


class FedHEAL(FairStrategy):
    """Merge only the consistent coordinates of each update, and give more weight to long updates.

    **FPHL** keeps coordinate i of client m's update if the coordinate had the same sign in at least
    a share tau of the client's earlier rounds (Eq. 5-9)::

        l = share of earlier rounds with Delta >= 0
        c = l        if Delta >= 0,    1 - l  otherwise
        W_i <- W_i + sum_m q_mi Delta_mi,    q_mi ~ [c_mi >= tau] p_m

    **FAEL** adds each client's share of the total distance d, with momentum, to its weight
    (Eq. 11-12)::

        d_m   = || [c >= tau] * Delta_m ||^2
        dp_m <- (1 - beta) dp_m + beta d_m / sum_j d_j
        p_m  <- p_m + dp_m,  normalized

    Clients send only their model and ``num-examples``. With ``tau=0`` and ``beta=0``, the paper's
    variant is FedAvg.

    Parameters
    ----------
    tau : float in [0, 1], or None
        Consistency threshold; None disables FPHL. Default 0.3 (paper §4.2, Digits; Office-Caltech:
        0.4).
    beta : float in [0, 1], or None
        Momentum of the weights; None disables FAEL, and weights are then proportional to the
        numbers of examples. Default 0.4 (paper §4.2).
    variant : {"paper", "algorithm1", "released"}
        ``"algorithm1"`` differs from ``"paper"`` only in l, which includes the current round.
        ``"released"`` follows the authors' code where it differs from the text: a coordinate is
        kept if c > tau; a coordinate that does not change (Delta = 0) counts as a decrease; d_m is
        the sum over tensors of norms that are not squared; weights start equal and are not
        normalized between rounds; sum_j d_j includes the last distances of absent clients;
        BatchNorm statistics are masked like parameters, whereas ``"paper"`` averages them with p
        and never masks them.

    See Also
    --------
    FedEquilibria : Weights by the norm of the updates, combined with Fisher information.
    FedCE : Weights by the direction of the updates.

    Notes
    -----
    The paper describes two orders of computation. In Eq. 5, l covers the rounds before the current
    round, as in the authors' code and in this class by default. Algorithm 1 first adds the current
    round to l (Eq. 6) and then computes c, so that every update agrees with itself: in a client's
    second round, c is 1 or 1/2 instead of 1 or 0, and nothing is dropped for tau <= 1/2. (Eq. 6
    divides by t; this class counts rounds from 1.)

    Signs are counted as integers over the rounds in which a client took part, so that shares are
    exact with partial participation. In a client's first round, all coordinates are kept.

    Examples
    --------
    >>> from fairflower.strategies import FedHEAL
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedHEAL(tau=0.3, beta=0.4)
    >>> strategy.merge(make_cohort([[1.0, 1.0], [3.0, 3.0]]))["w"].round(3).tolist()
    [2.229, 2.229]
    >>> strategy.merge(make_cohort([[1.0, 1.0], [3.0, -3.0]]))["w"].round(3).tolist()
    [2.412, 1.0]
    >>> strategy.diagnostics["weights"].round(3).tolist()
    [0.294, 0.706]
    """

    paper: ClassVar[str] = "Chen, Huang, Ye, CVPR 2024"
    single_updates = (
        "compares the signs of each client's update, and averages every coordinate over "
        "different clients",
        "fedga",
    )
    keeps_agreement = False  # a coordinate that changes its sign is not merged
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
        self.rounds: dict[int, int] = {}  # client -> rounds in which it took part
        self.rises: dict[int, Counts] = {}  # client -> number of these rounds with Delta >= 0
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

        def mask_of(block: Block, k: int) -> Mask | None:
            mask = kept[k].get(block.name)  # None: the array has no mask
            return None if mask is None else mask[block.part]

        return cohort.average(weights, mask_of)

    def _harmonize(self, cohort: Cohort) -> tuple[list[Masks], Vector]:
        """FPHL: return the masks [c >= tau] of the K clients, and their distances d, shape (K,)."""
        names = cohort.floats if self.variant == "released" else cohort.parameters
        kept: list[Masks] = [{} for _ in cohort.client_ids]
        needed = [0] * len(cohort)
        if self.tau is not None:
            for k, client in enumerate(cohort.client_ids):
                needed[k] = self._needed(client, self.tau)
                self._grow_sign_counts(client, cohort, names)
                kept[k] = {name: np.empty(cohort.received[name].size, bool) for name in names}

        def harmonize(block: Block) -> tuple[str, Vector]:
            update, sums = np.empty(block.received.shape, block.precision), []
            for k, client in enumerate(cohort.client_ids):
                block.update(k, out=update)
                if self.tau is not None:
                    mask = kept[k][block.name][block.part]
                    self._keep(client, block, update, needed[k], mask)
                    update *= mask
                sums.append(partial_squared_sums(update))
            return block.name, np.array(sums)

        parts: dict[str, list[Vector]] = {name: [] for name in names}
        for name, sums in cohort.each(names, harmonize):
            parts[name].append(sums)
        counted = [name for name in names if name not in cohort.buffers]
        # [tensors, K]
        d = np.reshape(
            [sum_in_order(parts[name], len(cohort)) for name in counted], (-1, len(cohort))
        )
        for client in cohort.client_ids:
            self.rounds[client] = self.rounds.get(client, 0) + 1
        if self.variant == "released":
            return kept, np.sqrt(d).sum(axis=0)
        return kept, d.sum(axis=0)

    def _needed(self, client: int, tau: float) -> int:
        """Return how many earlier rounds must have the same sign for a coordinate to be kept."""
        t = self.rounds.get(client, 0)
        # The decimal value of tau (3/10, not the nearest double) makes ties exact.
        share = Fraction(str(float(tau)))
        if self.variant == "released":
            return floor(share * t) + 1 if t else 0  # c > tau
        if self.variant == "algorithm1":
            return max(ceil(share * (t + 1)) - 1, 0)  # the t + 1 rounds include this round
        return ceil(share * t)  # c >= tau

    def _keep(self, client: int, block: Block, update: Floats, needed: int, out: Mask) -> None:
        """Write [c >= tau] of the earlier rounds to ``out``; then add this round to the counts."""
        t = self.rounds.get(client, 0)
        # The released code counts zeros as decreases.
        compare = np.greater if self.variant == "released" else np.greater_equal
        rising = compare(update, 0, out=out).view(np.uint8)
        rises = self.rises[client][block.name][block.part]
        # A rise is kept if rises >= needed, a fall if rises <= t - needed. A negative difference
        # of unsigned integers wraps around to above t, so a single comparison covers both.
        left = rises - rising * rises.dtype.type(needed)
        rises += rising
        np.less_equal(left, t - needed, out=out)

    def _grow_sign_counts(self, client: int, cohort: Cohort, names: list[str]) -> None:
        """Create or widen the client's sign counts so that they can hold another round."""
        if client not in self.rises:
            self.rises[client] = {n: np.zeros(cohort.received[n].size, np.uint8) for n in names}
        smallest = np.min_scalar_type(self.rounds.get(client, 0) + 1)
        for name, counts in self.rises[client].items():
            if counts.dtype.itemsize < smallest.itemsize:
                self.rises[client][name] = counts.astype(smallest)

    def _equalize(self, cohort: Cohort, distances: Vector, beta: float) -> Vector:
        """FAEL: return the clients' weights p, shape (K,) (Eq. 12)."""
        clients = cohort.client_ids
        self._init_new_weights(cohort)
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
            # Eq. 12 within the cohort, whose total weight is kept: absent clients keep their
            # weights.
            p = p / mass + dp
            p = p / p.sum() * mass
        self.p.update(zip(clients, p.tolist(), strict=True))
        self.dp.update(zip(clients, dp.tolist(), strict=True))
        return np.asarray(p / p.sum())

    def _init_new_weights(self, cohort: Cohort) -> None:
        """Set the initial weight of new clients.

        In the paper's variant, a new client's weight is its number of examples times the known
        clients' mean weight per example, and a known client's weight changes in proportion to its
        number of examples. So beta = 0 is still FedAvg when participation or these numbers change.
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
