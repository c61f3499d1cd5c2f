"""FedLF: Layer-Wise Fair Federated Learning (Pan, Li, Yu, Wang, Wang, Tang, Zhao, AAAI 2024)."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import ClassVar, Literal, Unpack

import numpy as np

from fairflower.aggregation.directions import (
    STATIONARY,
    inequality_gradient,
    store_updates,
    with_absent_clients,
)
from fairflower.numerics import Matrix
from fairflower.numerics.min_norm import cosines, min_norm_weights
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Vector

Layer = tuple[str, ...]  # names of its parameters


class FedLF(FairStrategy):
    """In each layer, take a step that lowers every client's loss and makes the losses more equal.

    Let F_k be the received model's loss on client k's data, and g_k = -Delta_k. A fairness
    objective, P = -cos(1, F), is added to the clients' objectives. Its gradient is (Eq. 5)::

        g_P = sum_k h_k g_k,    h = ((sum F / ||F||^2) F - 1) / (||1|| ||F||)

    In each layer l, the step is the shortest vector in the convex hull of the gradients (Eq. 7-8)::

        d_l = sum_k lambda_k g_k,l + mu g_P,l,    lambda, mu on the simplex
        theta <- theta - d ||mean_k Delta_k|| / ||d||               over all layers

    A layer consists of the parameters of one module, such as its weight and bias; an array whose
    name is a number, as in an app with lists of arrays, is a layer of its own. A layer with
    d_l = 0, for example because it has fewer parameters than there are clients, is joined with the
    next layer; the last layer is joined with the previous layers (Alg. 1). If d is 0 for all layers
    together, the model does not change.

    Every client reports ``received_loss``. BatchNorm statistics are averaged with equal weights.
    The server stores every client's last update. If K of the M known clients participate, an
    absent client's last update counts if it is at most M / K rounds old.

    Parameters
    ----------
    variant : {"paper", "released"}
        ``"released"`` follows the authors' code: in each layer, g_P,l and all g_k,l, including
        those of absent clients, are scaled to the mean norm of the g_k,l; M is the number of
        clients known before the round; absent clients are ignored while M is at most K. (The
        authors' code does not join layers; here both variants do.)

    See Also
    --------
    FedMDFG : The same objectives for all layers together.
    FedMGDAPlus : A common descent direction of unit-norm updates.

    Notes
    -----
    For example, d is 0 for all layers if clients have equal updates but different losses, because
    an equal decrease makes the losses less equal. If an update is zero in a layer, the hull of this
    layer excludes it, because it would force d_l = 0. The paper sends d to the clients instead of
    the model; the result is the same.

    Examples
    --------
    >>> from fairflower.strategies import FedLF
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0, 0.0], [0.0, 1.0]], received_loss=[1.0, 3.0])
    >>> FedLF().merge(cohort)["w"].round(2).tolist()  # towards the client with the larger loss
    [0.03, 0.71]
    """

    paper: ClassVar[str] = "Pan et al., AAAI 2024"
    extra = "solvers"
    extrapolates = True  # scaled to the norm of the mean step
    keeps_agreement = False  # equal updates with different losses give no step
    measurements = ("received_loss",)
    single_updates = ("needs the inner products of the updates, layer by layer", "afl")
    STATE: ClassVar[tuple[str, ...]] = ("memory",)

    def __init__(
        self, *, variant: Literal["paper", "released"] = "paper", **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.variant = variant
        self.memory: dict[int, Arrays] = {}  # client -> its last Delta

    def merge(self, cohort: Cohort) -> Arrays:
        oldest = self._oldest(cohort)
        everyone, ages = with_absent_clients(cohort, self.memory, self.merged_rounds, oldest)
        store_updates(cohort, self.memory)
        names_of = [tuple(names) for _, names in groupby(cohort.parameters, _module)]
        layers = {names: everyone.gram(names=names) for names in names_of}
        directions = self._directions(layers, cohort.metrics["received_loss"])
        gram = _sum(layers, layers) if layers else np.zeros((len(everyone), len(everyone)))
        K = len(cohort)
        equal = (ages == 0) / K
        after = sum(float(c @ layers[names] @ c) for names, c in directions.items())
        scale = np.sqrt(equal @ gram @ equal / after) if after > 0 else 0.0
        self.diagnostics.update(
            weights=equal[:K], conflict=cosines(gram[:K, :K]), norm=np.sqrt(after)
        )
        by_name = {name: scale * c for names, c in directions.items() for name in names}
        return everyone.move(by_name, equal)

    def _oldest(self, cohort: Cohort) -> int:
        """Return the largest age, in rounds, at which an absent client's update counts."""
        if self.variant == "paper":
            return len(self.memory.keys() | set(cohort.client_ids)) // len(cohort)
        known = len(self.memory)
        return known // len(cohort) if known > len(cohort) else 0

    def _directions(self, layers: dict[Layer, Matrix], losses: Vector) -> dict[Layer, Vector]:
        """Return each layer's step d as coefficients of the updates, shape (M,)."""
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
        return zeros | {layer: c for group, c in joined for layer in group}

    def _descend(self, gram: Matrix, losses: Vector) -> Vector:
        """Return coefficients of the shortest vector in the hull, from the Gram matrix."""
        norms = np.sqrt(gram.diagonal())
        moved, present = norms > 0, norms[: len(losses)] > 0
        if not present.any():
            return np.zeros(len(gram))
        scale = np.where(moved, norms, 1.0)
        if self.variant == "paper":
            scale = np.full(len(scale), norms[moved].min())
        h = np.zeros(len(gram))
        h[np.flatnonzero(present)] = inequality_gradient(losses[present])
        fair = h / scale
        if self.variant == "released" and (square := float(fair @ gram @ fair)) > 0:
            fair = fair / np.sqrt(square)
        rows = np.vstack([np.diag(1 / scale)[moved], *([fair] if fair.any() else [])])
        solution = min_norm_weights(rows @ gram @ rows.T)
        if solution.norm <= STATIONARY:
            return np.zeros(len(gram))
        # Undo the scaling of the vectors, because it differs between layers.
        unit = scale[0] if self.variant == "paper" else norms[: len(losses)][present].mean()
        return np.asarray(solution.weights @ rows * unit)


def _module(name: str) -> str:
    """Return the name of a parameter's module; a number is a module of its own."""
    return name if name.isdecimal() else name.rpartition(".")[0]


def _sum(layers: Mapping[Layer, Matrix], selected: Iterable[Layer]) -> Matrix:
    return np.asarray(np.sum([layers[layer] for layer in selected], axis=0))
