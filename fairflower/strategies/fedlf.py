"""FedLF: Layer-Wise Fair Federated Learning (Pan, Li, Yu, Wang, Wang, Tang, Zhao, AAAI 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.directions import STATIONARY, equalising, recall, remember
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.numerics.min_norm import cosines, min_norm_weights

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Layer = tuple[str, ...]  # names of its parameters


class FedLF(FairStrategy):
    """Find in each layer a step that lowers every client's loss, and evens the losses out.

    With F_k the received model's loss on client k's data and g_k = -Delta_k, the clients'
    objectives are joined by one more, P = -cos(1, F), with the gradient (Eq. 5)::

        g_P = sum_k h_k g_k,    h = ((sum F / ||F||^2) F - 1) / (||1|| ||F||)

    and in each layer l the step is the shortest vector in the hull (Eq. 7, 8)::

        d_l = sum_k lambda_k g_k,l + mu g_P,l,    lambda, mu on the simplex
        theta <- theta - d ||mean_k Delta_k|| / ||d||               over all layers

    A layer is the parameters of one module, a weight and its bias. Where d_l = 0, as in a layer
    of fewer parameters than clients, it is taken together with the next one, the last with
    the one before (Alg. 1). If it is 0 for all layers together, no step serves all and
    nothing is changed; that is so where clients agree in their updates, but not in
    their losses: an equal descent makes these less equal.

    Absent clients last seen up to M / K rounds ago count as if they were there, with their
    last update, of M clients known and K present. The server keeps every client's last update.
    A client that did not move in a layer is left out of its hull: it would stop the layer.

    The clients have to report ``received_loss``. BatchNorm statistics are averaged with equal
    weights. The paper also sends d to the clients instead of the model, which is the same.

    Parameters
    ----------
    variant : {"paper", "released"}
        ``"released"`` follows the authors' code, where in each layer all g_k,l, those
        of absent clients and g_P,l are scaled to the mean length of the g_k,l. M counts the
        clients known before this round there, and while these are at most K no absent client
        counts. (The code does not take layers together, which is done here in both.)
    """

    paper: ClassVar[str] = "Pan et al., AAAI 2024"
    extra = "solvers"
    extrapolates = True  # stretched to the length of the mean step
    keeps_agreement = False  # where losses differ it stands still
    needs = ("received_loss",)
    STATE: ClassVar[tuple[str, ...]] = ("seen", "memory")

    def __init__(
        self, *, variant: Literal["paper", "released"] = "paper", **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.variant = variant
        self.seen: dict[int, int] = {}  # client -> the last round in which it took part
        self.memory: dict[int, Arrays] = {}  # client -> its Delta then

    def merge(self, cohort: Cohort) -> Arrays:
        everyone, ages = recall(cohort, self.seen, self.memory, self._oldest(cohort))
        remember(cohort, self.seen, self.memory)
        modules = groupby(cohort.parameters, lambda name: name.rpartition(".")[0])
        names_of = [tuple(names) for _, names in modules]
        layers = {names: everyone.gram(names=names) for names in names_of}
        directions = self._directions(layers, cohort.metrics["received_loss"])
        gram = _sum(layers, layers) if layers else np.zeros((len(everyone), len(everyone)))
        K = len(cohort)
        equal = (ages == 0) / K
        after = sum(float(c @ layers[names] @ c) for names, c in directions.items())
        scale = np.sqrt(equal @ gram @ equal / after) if after > 0 else 0.0
        self.diagnostics.update(
            weights=equal[:K], conflict=cosines(gram[:K, :K]), length=np.sqrt(after)
        )
        by_name = {name: scale * c for names, c in directions.items() for name in names}
        return everyone.move(by_name, equal)

    def _oldest(self, cohort: Cohort) -> int:
        """How many rounds ago an absent client may have been seen to count."""
        if self.variant == "paper":
            return len(self.seen.keys() | set(cohort.client_ids)) // len(cohort)
        known = len(self.seen)
        return known // len(cohort) if known > len(cohort) else 0

    def _directions(self, layers: dict[Layer, Matrix], losses: Vector) -> dict[Layer, Vector]:
        """Coefficients of d over the updates, shape (M,), for every layer."""
        joined: list[tuple[list[Layer], Vector]] = []
        left: list[Layer] = []  # layers without a direction yet
        for layer in layers:
            c = self._descend(_sum(layers, [*left, layer]), losses)
            left.append(layer)
            if c.any():
                joined.append((left, c))
                left = []
        while left and joined:
            left = [*joined.pop()[0], *left]
            c = self._descend(_sum(layers, left), losses)
            if c.any():
                joined.append((left, c))
                left = []
        zeros = {layer: np.zeros(len(gram)) for layer, gram in layers.items()}
        return zeros | {one: c for group, c in joined for one in group}

    def _descend(self, gram: Matrix, losses: Vector) -> Vector:
        """Coefficients of the shortest vector in the hull of updates with this Gram matrix."""
        lengths = np.sqrt(gram.diagonal())
        moved, mine = lengths > 0, lengths[: len(losses)] > 0
        if not mine.any():
            return np.zeros(len(gram))
        length = np.where(moved, lengths, 1.0)
        if self.variant == "paper":
            length = np.full(len(length), lengths[moved].min())
        h = np.zeros(len(gram))
        h[np.flatnonzero(mine)] = equalising(losses[mine])
        fair = h / length
        if self.variant == "released" and (square := float(fair @ gram @ fair)) > 0:
            fair = fair / np.sqrt(square)
        rows = np.vstack([np.diag(1 / length)[moved], *([fair] if fair.any() else [])])
        solution = min_norm_weights(rows @ gram @ rows.T)
        if solution.norm <= STATIONARY:
            return np.zeros(len(gram))
        # In the scaled vectors' unit: it differs from layer to layer.
        unit = length[0] if self.variant == "paper" else lengths[: len(losses)][mine].mean()
        return np.asarray(solution.weights @ rows * unit)


def _sum(layers: Mapping[Layer, Matrix], of: Iterable[Layer]) -> Matrix:
    """The Gram matrix of some layers together."""
    return np.asarray(np.sum([layers[one] for one in of], axis=0))
