"""The valid replies of a round as arrays: the input of every strategy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isfinite
from statistics import median_low
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import ConfigError
from fairflower.numerics.clustering import Clusters
from fairflower.numerics.simplex import cap_weights, on_simplex
from fairflower.numerics.threads import cpus

#: Number of coordinates summed in the array's precision; these sums are added in double precision.
BLOCK = 32_768

#: Number of coordinates per task of a thread: small enough for the processor's cache, and large
#: enough that threads rarely wait for Python's lock.
SPAN = 8 * BLOCK

#: Number of threads; NumPy's operations are too short to benefit from more.
THREADS = min(4, cpus())

#: Number of squares per partial sum.
_PIECE = 8192

Arrays = dict[str, NDArray[Any]]
Floats = NDArray[Any]  # real numbers, usually float32
MaskOf = Callable[["Block", int], NDArray[np.bool_] | None]
Result = TypeVar("Result")


class UnknownModel(dict[str, NDArray[Any]]):
    """A received model of which only names are known: reading an array raises ``ConfigError``."""

    def __init__(self, like: Arrays, strategy: str, why: str) -> None:
        super().__init__(like)
        self.like = like  # a client's model
        self.text = (
            f"{strategy}, or an exchange, compares the clients' models with the model that they "
            f"received, but {why}."
        )

    def _refuse(self, *args: Any) -> NoReturn:
        raise ConfigError(self.text)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # without it, `{**received}` and `|` would copy ``like``

    __getitem__ = get = items = values = copy = _refuse


@dataclass(frozen=True)
class Block:
    """Consecutive coordinates of an array, for the whole cohort."""

    name: str  # name of the array
    part: slice  # positions of the coordinates in the flattened array
    received: Floats  # values in the global model that the clients received, [b]
    returned: list[Floats]  # values in the K clients' models, [b], as in ``Cohort.client_ids``

    @property
    def precision(self) -> np.dtype[Any]:
        """The array's precision, but at least float32, because squares underflow in float16."""
        return np.promote_types(self.received.dtype, np.float32)

    def update(self, k: int, out: Floats | None = None) -> Floats:
        """Return Delta_k = theta_k - theta of client ``k``, shape (b,), in ``out`` if given."""
        return np.subtract(self.returned[k], self.received, out=out, dtype=self.precision)


@dataclass(frozen=True)
class Cohort:
    """The valid replies of a round, ordered by client id.

    All arrays are indexed by the position ``k`` in ``client_ids``, so results do not depend on the
    order in which replies arrive.
    """

    #: The round, counted from 1.
    server_round: int
    #: K ids, ascending: each reply's metric ``client-id``, or else its node id.
    client_ids: tuple[int, ...]
    #: Training examples n_k, shape (K,), all positive.
    num_examples: NDArray[np.float64]
    #: The global model theta that the clients received.
    received: Arrays
    #: The K clients' models theta_k: read-only views of the replies, not copies.
    returned: tuple[Arrays, ...]
    #: Scalar metrics that all K clients sent, shape (K,) each.
    metrics: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    #: Names of arrays that are not trained (BatchNorm statistics and counters).
    buffers: frozenset[str] = frozenset()
    #: Measurements of the K clients by name: ``fisher`` and ``gradient`` have an array per
    #: parameter, others a single array ``h``. Also arrays for exchanges.
    measured: dict[str, tuple[Arrays, ...]] = field(default_factory=dict)
    #: Number of clients in the federation; 0 means K.
    population: int = 0
    #: Cap on a client's weight; see `fairflower.numerics.simplex.cap_weights`. 1 means no cap.
    max_weight: float = 1.0
    #: The clients' clusters, for exchanges; None if the strategy does not cluster.
    clusters: Clusters | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "population", max(self.population, len(self)))

    def __len__(self) -> int:
        return len(self.returned)

    @property
    def sample_weights(self) -> NDArray[np.float64]:
        """Weights n_k / sum_j n_j, capped at ``max_weight``, shape (K,)."""
        return self.cap(np.asarray(self.num_examples / self.num_examples.sum()))

    @property
    def parameters(self) -> list[str]:
        """Names of the trainable arrays, in the model's order."""
        return [name for name in self.received if name not in self.buffers]

    @property
    def floats(self) -> list[str]:
        """Names of all arrays of real numbers: parameters and BatchNorm statistics."""
        return [name for name, array in self.received.items() if array.dtype.kind == "f"]

    def blocks(self, names: Sequence[str], size: int = BLOCK) -> Iterator[Block]:
        """Yield the coordinates of the arrays ``names`` in blocks of at most ``size``."""
        for name in names:
            received = self.received[name].reshape(-1)
            returned = [arrays[name].reshape(-1) for arrays in self.returned]
            for start in range(0, received.size, size):
                part = slice(start, min(start + size, received.size))
                yield Block(name, part, received[part], [array[part] for array in returned])

    def each(
        self, names: Sequence[str], work: Callable[[Block], Result], size: int | None = None
    ) -> Iterator[Result]:
        """Yield ``work(block)`` for all blocks of the arrays ``names``, computed in threads.

        Results come in the order of the blocks, so that sums do not depend on the number of
        threads. A block has at most ``size`` coordinates, by default ``SPAN``.
        """
        blocks = self.blocks(names, size or SPAN)
        if THREADS == 1 or sum(self.received[name].size for name in names) <= SPAN:
            yield from map(work, blocks)
            return
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(work, blocks)

    def cap(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return weights capped at ``max_weight``, as `average` applies them."""
        return weights if self.max_weight >= 1 else cap_weights(weights, self.max_weight)

    def check_weights(self, weights: NDArray[np.float64]) -> None:
        """Raise ``ConfigError`` unless there are K weights on the simplex."""
        if weights.shape != (len(self),):
            raise ConfigError(
                f"Weights of shape {weights.shape} for {len(self)} clients: expected shape "
                f"({len(self)},), in the order of cohort.client_ids."
            )
        if not on_simplex(weights):
            raise ConfigError(f"Weights {weights}: expected non-negative numbers with sum 1.")

    def squared_norms(self, names: Sequence[str] | None = None) -> NDArray[np.float64]:
        """Return ||Delta_k||^2 over all parameters, or over the arrays ``names``, shape (K,)."""

        def measure(block: Block) -> NDArray[np.float64]:
            return np.array([partial_squared_sums(block.update(k)) for k in range(len(self))])

        return sum_in_order(
            self.each(self.parameters if names is None else names, measure), len(self)
        )

    def clipped(
        self, max_norm: float | None = None, median: float | None = None
    ) -> tuple[Self, NDArray[np.float64]]:
        """Scale down updates that exceed a bound; return the cohort and the factors, shape (K,).

        ``max_norm`` caps an update's norm in the units of the parameters, and ``median`` as a
        multiple of the (lower) median norm of all non-zero updates. The same cohort is returned if
        no update is too long. Parameters and BatchNorm statistics are bounded separately. The
        smaller of the two factors is applied to both, so that a client's model stays between the
        received and the returned model. Counters are unchanged.
        """
        statistics = [name for name in self.floats if name in self.buffers]
        factors = np.ones(len(self))
        for names in (self.parameters, statistics):
            norms = np.sqrt(self.squared_norms(names))
            factors = np.minimum(factors, clip_factors(norms, max_norm, median))
        if factors.min() == 1:
            return self, factors
        returned = list(self.returned)
        for k in np.flatnonzero(factors < 1):
            returned[k] = dict(returned[k])
            for name in self.floats:
                received = self.received[name]
                # In double precision, where no difference of two numbers overflows.
                update = returned[k][name].astype(np.float64) - received
                returned[k][name] = (received + factors[k] * update).astype(received.dtype)
        return replace(self, returned=tuple(returned)), factors

    def gram(
        self, measured: str | None = None, names: Sequence[str] | None = None
    ) -> NDArray[np.float64]:
        """Return the inner products of the clients' vectors, shape (K, K).

        The vectors are the updates Delta_k or, if given, the clients' measurement ``measured``,
        over all parameters or over the arrays ``names``. Products are computed in double precision.
        """

        def multiply(block: Block) -> NDArray[np.float64]:
            if measured is None:
                rows = np.array([block.update(k) for k in range(len(self))], np.float64)
            else:
                vectors = (arrays[block.name] for arrays in self.measured[measured])
                rows = np.array([v.reshape(-1)[block.part] for v in vectors], np.float64)
            return np.asarray(rows @ rows.T)

        total = np.zeros((len(self), len(self)))
        for products in self.each(self.parameters if names is None else names, multiply, BLOCK):
            total += products
        return total

    def average(self, weights: NDArray[np.float64], mask_of: MaskOf | None = None) -> Arrays:
        """Return the weighted mean of the clients' models: theta + sum_k w_k Delta_k.

        Updates are averaged instead of models, so that zero updates leave the model unchanged. For
        integers, such as step counters, and booleans see `merge_integers`. Raises ``ConfigError``
        if the number of weights is not K, or the weights are not on the simplex.

        Parameters
        ----------
        weights : ndarray of shape (K,)
            Non-negative, with sum 1; capped at ``max_weight``.
        mask_of : callable, optional
            ``mask_of(block, k)`` returns the boolean mask of the coordinates that client
            ``k`` contributes to, or None for all. It is called from several threads. A
            coordinate's weights are normalized over its contributors, as far as
            ``max_weight`` allows; a coordinate without contributors does not change.
        """
        if isinstance(self.received, UnknownModel) and mask_of is None:
            # A mean of models does not depend on the model from which the updates are counted.
            return replace(self, received=self.received.like).average(weights)
        merged = self._begin(weights)
        self._add(merged, self.floats, self.cap(weights), mask_of)
        return merged

    def move(
        self,
        coefficients: NDArray[np.float64] | Mapping[str, NDArray[np.float64]],
        weights: NDArray[np.float64] | None = None,
    ) -> Arrays:
        """Return a linear combination of updates, theta + sum_k c_k Delta_k.

        This is for strategies whose step is not a mean of the clients' steps. Without ``weights``,
        BatchNorm statistics get the same coefficients as parameters. The coefficients must then be
        non-negative with a sum of at most 1, so that variances stay positive. Strategies with
        negative coefficients (FedFV) or larger sums (FedMGDA+) pass ``weights``, with which the
        statistics are averaged. Step counters are always averaged.

        Raises ``ValueError`` if the weights are not on the simplex; without weights, if the
        coefficients are negative or their sum is not in (0, 1].

        Parameters
        ----------
        coefficients : ndarray of shape (K,), or mapping of name -> ndarray of shape (K,)
            Real numbers c_k. Without ``weights`` they must be non-negative with a sum in (0, 1].
            A mapping gives the coefficients for each parameter, for layer-wise strategies.
        weights : ndarray of shape (K,), optional
            Weights on the simplex, for BatchNorm statistics and step counters. By default
            c_k / sum_j c_j, for step counters only. Required with a mapping.
        """
        names = self.parameters if weights is not None else self.floats
        if weights is None:
            if isinstance(coefficients, Mapping):
                raise ValueError("Coefficients for each parameter require weights for the buffers.")
            total = coefficients.sum()
            if not (coefficients.min() >= 0 and 0 < total < 1 + 1e-6):
                raise ValueError(
                    f"Coefficients {coefficients}: expected non-negative numbers with a sum in "
                    "(0, 1]. For other coefficients, give weights for the buffers."
                )
            weights = coefficients / total
        merged = self._begin(weights)
        self._add(merged, names, coefficients)
        self._add(merged, [n for n in self.floats if n not in names], self.cap(weights))
        for name in self.buffers.intersection(names):  # rounding errors may leave the hull
            ends = np.stack([self.received[name], *(arrays[name] for arrays in self.returned)])
            np.clip(merged[name], ends.min(axis=0), ends.max(axis=0), out=merged[name])
        return merged

    def _begin(self, weights: NDArray[np.float64]) -> Arrays:
        """Return the received model, with averaged counters, after checking the weights."""
        self.check_weights(weights)
        weights = self.cap(weights)
        merged: Arrays = {}
        for name, received in self.received.items():
            if received.dtype.kind == "f":
                merged[name] = np.array(received, order="C")
            else:
                returned = [arrays[name] for arrays in self.returned]
                merged[name] = merge_integers(received, returned, weights)
        return merged

    def _add(
        self,
        merged: Arrays,
        names: Sequence[str],
        weights: NDArray[np.float64] | Mapping[str, NDArray[np.float64]],
        mask_of: MaskOf | None = None,
    ) -> None:
        """Add sum_k w_k Delta_k to the arrays ``names`` of ``merged``."""

        def add(block: Block) -> None:
            w = weights[block.name] if isinstance(weights, Mapping) else weights
            merged[block.name].reshape(-1)[block.part] += self._step(block, w, mask_of)

        for _ in self.each(names, add):
            pass

    def _step(self, block: Block, weights: NDArray[np.float64], mask_of: MaskOf | None) -> Floats:
        """Return sum_k w_k Delta_k over a block; masked weights are normalized per coordinate.

        Clients are added one after another, because the order of additions in a matrix product
        depends on the number of threads.
        """
        dtype = block.precision
        step, mass, heaviest = (np.zeros(block.received.shape, dtype) for _ in range(3))
        update, masked = np.empty_like(step), np.empty_like(step)
        any_masked = False
        for k, weight in enumerate(weights.astype(dtype)):
            share: Any = weight
            if mask_of is not None:
                if (mask := mask_of(block, k)) is not None:
                    share, any_masked = np.multiply(mask, weight, out=masked), True
                mass += share
                if self.max_weight < 1:
                    np.maximum(heaviest, share, out=heaviest)
            block.update(k, out=update)
            update *= share
            step += update
        if any_masked:
            if self.max_weight < 1:
                np.maximum(mass, heaviest / dtype.type(self.max_weight), out=mass)
            np.divide(step, mass, out=step, where=mass > 0)
        return step


def clip_factors(
    norms: NDArray[np.float64], max_norm: float | None = None, median: float | None = None
) -> NDArray[np.float64]:
    """Return the factors, shape (K,), that bound vectors of these norms as `Cohort.clipped` does.

    >>> clip_factors(np.array([1.0, 0.0, 3.0, 8.0]), median=2).tolist()
    [1.0, 1.0, 1.0, 0.75]
    """
    bounds = [] if max_norm is None else [max_norm]
    if median is not None and norms.any():
        # One client could choose the mean of the two middle norms, but not the lower one.
        bounds.append(median * median_low(norms[norms > 0].tolist()))
    bound = min(bounds, default=np.inf)
    return np.divide(bound, norms, out=np.ones(len(norms)), where=norms > bound)


def merge_integers(
    received: NDArray[Any], returned: Sequence[NDArray[Any]], weights: NDArray[np.float64]
) -> NDArray[Any]:
    """Return the exact weighted mean of integers, rounded down; of booleans, the majority's value.

    Where all clients agree, their value is kept. A mean up to 1e-6 below a whole number counts as
    this number, because weights are rounded; a tie of booleans, up to 1e-6, keeps the received one.

    >>> merge_integers(np.array([0]), [np.array([2**61 - 1]), np.array([2])], np.array([0.5, 0.5]))
    array([1152921504606846976])
    """
    merged = np.array(returned[0], order="C")
    differ = np.any([array != merged for array in returned], axis=0)
    if differ.any():
        shares = [Fraction(weight) for weight in weights.tolist()]
        unit = max(share.denominator for share in shares)  # all are powers of two
        whole = int(sum(shares) * unit)
        parts = zip(shares, returned, strict=True)
        # In Python's integers: no double holds every whole number above 2**53.
        mass: Any = sum(int(s * unit) * array[differ].astype(object) for s, array in parts)
        if received.dtype.kind == "b":
            tied = (abs(2 * mass - whole) * 10**6 <= whole).astype(bool)
            merged[differ] = np.where(tied, received[differ], (2 * mass > whole).astype(bool))
        else:
            merged[differ] = (mass * 10**6 + whole) // (whole * 10**6)
    return merged


def partial_squared_sums(values: Floats) -> list[float]:
    """Return the sum of squares of each ``BLOCK`` of values [b], for `sum_in_order`.

    Computed in the values' precision, or in double precision if a sum overflows.
    """
    sums: list[float] = []
    whole = len(values) // BLOCK * BLOCK
    if whole:
        pieces = values[:whole].reshape(-1, _PIECE)
        parts = np.einsum("ij,ij->i", pieces, pieces).reshape(-1, BLOCK // _PIECE)
        sums += np.add.accumulate(parts, axis=1)[:, -1].tolist()
    rest = values[whole:]
    if len(rest):
        sums.append(float(np.einsum("i,i->", rest, rest)))
    for i, total in enumerate(sums):
        if not isfinite(total):
            block = values[i * BLOCK : (i + 1) * BLOCK]
            sums[i] = float(np.square(block, dtype=np.float64).sum())
    return sums


def sum_in_order(parts: Iterable[NDArray[np.float64]], rows: int) -> NDArray[np.float64]:
    """Return the row sums of arrays [rows, n], added from left to right."""
    columns = np.concatenate([np.zeros((rows, 1)), *parts], axis=1)
    return np.asarray(np.add.accumulate(columns, axis=1)[:, -1])
