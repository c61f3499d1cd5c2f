"""One round's replies as arrays: what every aggregation rule works on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.bounds import cap_weights
from fairflower.errors import ConfigError
from fairflower.numerics.clustering import Clusters
from fairflower.numerics.threads import cpus, one_thread

#: Coordinates that are summed in an array's own precision; their sums are added in double.
BLOCK = 32_768

#: Coordinates handled at a time: so few that what is computed of them stays in the processor's
#: cache, so many that threads hardly ever wait for Python's lock.
SPAN = 8 * BLOCK

#: Threads at most: NumPy's steps are too short for more to have their turn.
THREADS = min(4, cpus())

#: Terms of a sum of squares that are added before it is added to the others.
_PIECE = 8192

Arrays = dict[str, NDArray[Any]]
Floats = NDArray[Any]  # of real numbers, as a rule float32
Kept = Callable[["Block", int], NDArray[np.bool_] | None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Block:
    """Consecutive coordinates of one array, for the whole cohort."""

    name: str  # of the array
    part: slice  # their place in it, flattened
    received: Floats  # [b] of the global model that the clients started from
    returned: list[Floats]  # K times [b] of the clients' models, as in ``Cohort.client_ids``

    @property
    def precision(self) -> np.dtype[Any]:
        """In which to compute: the array's own, but at least single, in which squares survive."""
        return np.promote_types(self.received.dtype, np.float32)

    def update(self, k: int, out: Floats | None = None) -> Floats:
        """Delta_k = theta_k - theta of client ``k``, shape (b,), in ``out`` or a new array."""
        return np.subtract(self.returned[k], self.received, out=out, dtype=self.precision)


@dataclass(frozen=True)
class Cohort:
    """The valid replies of one round, ordered by client id.

    Everything is indexed by position ``k`` in ``client_ids``, so a result never
    depends on who answered first.
    """

    #: The round, counted from 1.
    server_round: int
    #: K ints, ascending; the ``client-id`` metric, or the node id where there is none.
    client_ids: tuple[int, ...]
    #: Training examples n_k, shape (K,), all positive.
    num_examples: NDArray[np.float64]
    #: The global model theta that the clients started from.
    received: Arrays
    #: The K clients' models theta_k: read-only views of the replies, not copies.
    returned: tuple[Arrays, ...]
    #: Every scalar metric that all K clients sent, shape (K,) each.
    metrics: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    #: Arrays that are not trained (BatchNorm statistics and counters).
    buffers: frozenset[str] = frozenset()
    #: What the strategy asked the K clients to measure (``fisher``, ``gradient``): one array
    #: per parameter, under the parameter's name; ``representation``: one array ``h``. And what
    #: they returned to exchanges, by the exchange's name.
    measured: dict[str, tuple[Arrays, ...]] = field(default_factory=dict)
    #: Clients of the whole federation, of which these K took part; 0: these are all.
    population: int = 0
    #: Largest weight that a client may have; see `fairflower.aggregation.bounds`.
    max_weight: float = 1.0
    #: The clients' clusters, for exchanges, where the strategy has found any.
    clusters: Clusters | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "population", max(self.population, len(self)))

    def __len__(self) -> int:
        return len(self.returned)

    @property
    def sample_weights(self) -> NDArray[np.float64]:
        """n_k / sum_j n_j, but none above ``max_weight``, shape (K,)."""
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
        """Walk the coordinates of ``names``, at most ``size`` at a time."""
        for name in names:
            received = self.received[name].reshape(-1)
            returned = [arrays[name].reshape(-1) for arrays in self.returned]
            for start in range(0, received.size, size):
                part = slice(start, min(start + size, received.size))
                yield Block(name, part, received[part], [array[part] for array in returned])

    def each(
        self, names: Sequence[str], work: Callable[[Block], Result], size: int | None = None
    ) -> Iterator[Result]:
        """Call ``work`` on all blocks of ``names``, on several threads; results in their order.

        What is summed over them is the same sum for any number of threads. A block has at most
        ``size`` coordinates, by default ``SPAN``.
        """
        blocks = self.blocks(names, size or SPAN)
        if THREADS == 1 or sum(self.received[name].size for name in names) <= SPAN:
            yield from map(work, blocks)
            return
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(work, blocks)

    def cap(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """These weights, but none above ``max_weight``; ``average`` does it by itself."""
        return weights if self.max_weight >= 1 else cap_weights(weights, self.max_weight)

    def squared_norms(self, names: Sequence[str] | None = None) -> NDArray[np.float64]:
        """||Delta_k||^2 over all parameters, or over arrays by name, shape (K,)."""

        def measure(block: Block) -> NDArray[np.float64]:
            return np.array([partial_squared_sums(block.update(k)) for k in range(len(self))])

        return sum_in_order(
            self.each(self.parameters if names is None else names, measure), len(self)
        )

    def gram(
        self, measured: str | None = None, names: Sequence[str] | None = None
    ) -> NDArray[np.float64]:
        """Inner products of the clients' vectors over all parameters, shape (K, K).

        Of the updates Delta_k, or of what was ``measured`` under a name; over some arrays
        alone, by ``names``. In double precision, block by block, each by one thread: the bits
        do not depend on cores.
        """

        def multiply(block: Block) -> NDArray[np.float64]:
            if measured is None:
                rows = np.array([block.update(k) for k in range(len(self))], np.float64)
            else:
                vectors = (arrays[block.name] for arrays in self.measured[measured])
                rows = np.array([v.reshape(-1)[block.part] for v in vectors], np.float64)
            return np.asarray(rows @ rows.T)

        total = np.zeros((len(self), len(self)))
        with one_thread():
            for products in self.each(self.parameters if names is None else names, multiply, BLOCK):
                total += products
        return total

    def average(
        self,
        weights: NDArray[np.float64],
        kept: Kept | None = None,
    ) -> Arrays:
        """The weighted mean of the clients' models: theta + sum_k w_k Delta_k.

        Updates are averaged rather than models, so that clients which moved
        nowhere leave every bit of the model as it was.

        Parameters
        ----------
        weights : ndarray of shape (K,)
            Non-negative, summing to 1; those above ``max_weight`` are capped.
        kept : callable, optional
            ``kept(block, k)`` is the boolean mask of the coordinates that client
            ``k`` contributes to (None: all), asked for by several threads. A
            coordinate's weights are normalised over the clients that contribute to
            it, as far as none gets above ``max_weight``, and a coordinate without
            contributors stays as it was.

        Returns
        -------
        dict of name -> ndarray
            Same names, shapes and dtypes as ``received``. Integer buffers (step
            counters) become the weighted mean cut to a whole number, which is
            what the papers' released codes get when PyTorch loads the mean.

        Raises
        ------
        ConfigError
            If there is not one for each client, or they are not on the simplex: better no model
            than a wrong one.
        """
        merged = self._begin(weights)
        self._add(merged, self.floats, self.cap(weights), kept)
        return merged

    def move(
        self,
        coefficients: NDArray[np.float64] | Mapping[str, NDArray[np.float64]],
        weights: NDArray[np.float64] | None = None,
    ) -> Arrays:
        """Any combination of updates, theta + sum_k c_k Delta_k.

        For rules whose step is no mean of the clients' steps. BatchNorm statistics belong to
        the parameters that made them, and move with them, where that keeps them between what
        was received and what was returned, so that a variance stays positive: with
        coefficients that are not negative and sum to at most 1. A rule that cannot promise
        that (FedFV's may be negative, FedMGDA+'s sum to more) gives the ``weights`` by which
        statistics are averaged instead. Step counters always are.

        Parameters
        ----------
        coefficients : ndarray of shape (K,), or mapping of name -> ndarray of shape (K,)
            Real numbers c_k. Without ``weights`` not negative, their sum in (0, 1]. A mapping
            has those of every parameter, for rules that work layer by layer.
        weights : ndarray of shape (K,), optional
            On the simplex. By default c_k / sum_j c_j, for step counters alone. Needed beside
            a mapping.

        Raises
        ------
        ValueError
            If the weights are not on the simplex; or without them, if the coefficients
            could leave the hull.
        """
        names = self.parameters if weights is not None else self.floats
        if weights is None:
            if isinstance(coefficients, Mapping):
                raise ValueError("Coefficients by parameter: buffers need weights of their own.")
            total = coefficients.sum()
            if not (coefficients.min() >= 0 and 0 < total < 1 + 1e-6):
                raise ValueError(
                    f"Coefficients {coefficients} are not non-negative with a sum in (0, 1]: "
                    "buffers need weights of their own."
                )
            weights = coefficients / total
        merged = self._begin(weights)
        self._add(merged, names, coefficients)
        self._add(merged, [n for n in self.floats if n not in names], self.cap(weights))
        for name in self.buffers.intersection(names):  # rounding may lead out of the hull
            ends = np.stack([self.received[name], *(arrays[name] for arrays in self.returned)])
            np.clip(merged[name], ends.min(axis=0), ends.max(axis=0), out=merged[name])
        return merged

    def _begin(self, weights: NDArray[np.float64]) -> Arrays:
        """The received model with counters averaged; ``ConfigError`` off the simplex."""
        if weights.shape != (len(self),):
            raise ConfigError(
                f"Weights of the shape {weights.shape} for {len(self)} clients: expected one for "
                "each, in the order of cohort.client_ids."
            )
        if not (weights.min() >= 0 and abs(weights.sum() - 1) < 1e-6):
            raise ConfigError(f"Weights {weights} are not non-negative with sum 1.")
        weights = self.cap(weights)
        merged: Arrays = {}
        for name, received in self.received.items():
            if received.dtype.kind == "f":
                merged[name] = np.array(received, order="C")
            else:
                values = np.stack([arrays[name] for arrays in self.returned])
                mean = np.tensordot(weights, values.astype(np.float64), axes=1)
                # The hair keeps a mean of equal counters from being cut one below them.
                merged[name] = np.asarray(np.floor(mean + 1e-6), received.dtype)
        return merged

    def _add(
        self,
        merged: Arrays,
        names: Sequence[str],
        weights: NDArray[np.float64] | Mapping[str, NDArray[np.float64]],
        kept: Kept | None = None,
    ) -> None:
        """Add sum_k w_k Delta_k, weights normalised per coordinate if masked, to some arrays."""

        def add(block: Block) -> None:
            w = weights[block.name] if isinstance(weights, Mapping) else weights
            merged[block.name].reshape(-1)[block.part] += self._step(block, w, kept)

        for _ in self.each(names, add):
            pass

    def _step(self, block: Block, weights: NDArray[np.float64], kept: Kept | None) -> Floats:
        """sum_k w_k Delta_k over one block, weights normalised per coordinate if masked.

        Summed client by client rather than by a matrix product, whose order of
        additions depends on the number of threads.
        """
        dtype = block.precision
        step, mass, heaviest = (np.zeros(block.received.shape, dtype) for _ in range(3))
        update, masked = np.empty_like(step), np.empty_like(step)
        for k, weight in enumerate(weights.astype(dtype)):
            share: Any = weight
            if kept is not None and (mask := kept(block, k)) is not None:
                share = np.multiply(mask, weight, out=masked)
                mass += share
                if self.max_weight < 1:
                    np.maximum(heaviest, share, out=heaviest)
            block.update(k, out=update)
            update *= share
            step += update
        if kept is not None:
            if self.max_weight < 1:
                np.maximum(mass, heaviest / dtype.type(self.max_weight), out=mass)
            np.divide(step, mass, out=step, where=mass > 0)
        return step


def partial_squared_sums(values: Floats) -> list[float]:
    """Sums of squares of values [b], one for each ``BLOCK`` of them, for `sum_in_order`.

    In the values' own precision, or in double where that overflows.
    """
    sums: list[float] = []
    if whole := len(values) // BLOCK * BLOCK:
        pieces = values[:whole].reshape(-1, _PIECE)
        parts = np.einsum("ij,ij->i", pieces, pieces).reshape(-1, BLOCK // _PIECE)
        sums += np.add.accumulate(parts, axis=1)[:, -1].tolist()
    if len(rest := values[whole:]):
        sums.append(float(np.einsum("i,i->", rest, rest)))
    for i, total in enumerate(sums):
        if not isfinite(total):
            block = values[i * BLOCK : (i + 1) * BLOCK]
            sums[i] = float(np.square(block, dtype=np.float64).sum())
    return sums


def sum_in_order(parts: Iterable[NDArray[np.float64]], rows: int) -> NDArray[np.float64]:
    """Sum the rows of arrays [rows, n] that lie side by side, from left to right."""
    whole = np.concatenate([np.zeros((rows, 1)), *parts], axis=1)
    return np.asarray(np.add.accumulate(whole, axis=1)[:, -1])
