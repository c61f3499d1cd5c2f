"""Clusters of clients that a strategy recorded, and metrics that compare them with true types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairflower.data import ClientInfo
from fairflower.numerics import Vector, metrics

ClusterMetric = Literal["number", "accuracy", "rand"]

#: Names of the diagnostics that record a client's cluster and its position on a map.
IDS, MAP = "cluster", ("map_x", "map_y")


class ClusterHistory(NamedTuple):
    """A run's clusters of K clients in R rounds."""

    rounds: NDArray[np.int64]  # [R]
    types: NDArray[np.str_]  # [K], the clients' domains, in the order of ``run.clients``
    ids: Vector  # [R, K], the cluster of each client; NaN in rounds without one
    #: Position of each client's representation on a map of the round, [R, K, 2], or NaN.
    map: Vector

    def metric(self, name: ClusterMetric) -> Vector:
        """Return a metric for each round, [R], over the clients that took part in the round."""
        value_of = METRICS[name]
        there = np.isfinite(self.ids)
        rows = zip(there, self.ids, strict=True)
        return np.array([value_of(self.types[t], ids[t].astype(np.int64)) for t, ids in rows])


METRICS: Mapping[str, Callable[[NDArray[np.str_], NDArray[np.int64]], float]] = {
    "number": lambda types, ids: float(len(np.unique(ids))),
    "accuracy": metrics.clustering_accuracy,
    "rand": metrics.adjusted_rand,
}


def read_cluster_history(
    clients: Sequence[ClientInfo], diagnostics: Iterable[Mapping[str, Any]]
) -> ClusterHistory | None:
    """Return the clusters of each round from a run's diagnostics; None if there are none."""
    column = {client.client_id: k for k, client in enumerate(clients)}
    rounds: list[int] = []
    rows: list[Vector] = []
    for record in diagnostics:
        present = record.get("client_ids", [])
        vectors = [_vector(record.get(name), len(present)) for name in (IDS, *MAP)]
        if not present or not np.isfinite(vectors[0]).all() or not set(present) <= set(column):
            continue
        row = np.full((len(column), 1 + len(MAP)), np.nan)
        row[[column[client] for client in present]] = np.transpose(vectors)
        rounds.append(int(record["round"]))
        rows.append(row)
    if not rounds:
        return None
    values = np.array(rows)
    types = np.array([client.domain for client in clients])
    return ClusterHistory(np.array(rounds), types, values[:, :, 0], values[:, :, 1:])


#: Larger numbers, which a float32 cannot represent, would overflow in sums and axes.
_LARGEST = 1e100


def _vector(value: object, length: int) -> Vector:
    """Return one number per client. Values that are not numbers become NaN."""
    vector = as_float_array(value)
    return vector if vector is not None and vector.shape == (length,) else np.full(length, np.nan)


def as_float_array(value: Any) -> Vector | None:
    """Convert a recorded value to an array, with NaN where too large; None if it is not numeric."""
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return np.where(np.abs(numbers) <= _LARGEST, numbers, np.nan)
