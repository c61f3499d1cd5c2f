"""Clusters of clients that a strategy found, beside the types that the clients are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairflower.numerics import metrics
from fairflower.numerics.metrics import Vector
from fairflower.report.methods import Method
from fairflower.report.reading import WINDOW, Run

ClusterMetric = Literal["number", "accuracy", "rand"]

#: What strategies record of clusters, by client: its cluster, and its place on a map.
IDS, MAP = "cluster", ("map_x", "map_y")


class ClusterHistory(NamedTuple):
    """A run's clusters in R rounds, of K clients."""

    rounds: NDArray[np.int64]  # [R]
    types: NDArray[np.str_]  # [K], the clients' domains, in the order of ``run.clients``
    ids: Vector  # [R, K], the cluster of each client; NaN in rounds without it
    #: [R, K, 2], where each client's representation is on a map of the round, or NaN.
    map: Vector

    def metric(self, name: ClusterMetric) -> Vector:
        """A figure of each round, [R], over the clients that took part in it."""
        figure = METRICS[name]
        there = np.isfinite(self.ids)
        rows = zip(there, self.ids, strict=True)
        return np.array([figure(self.types[t], ids[t].astype(np.int64)) for t, ids in rows])


METRICS: Mapping[str, Callable[[NDArray[np.str_], NDArray[np.int64]], float]] = {
    "number": lambda types, ids: float(len(np.unique(ids))),
    "accuracy": metrics.clustering_accuracy,
    "rand": metrics.adjusted_rand,
}


def read_cluster_history(run: Run) -> ClusterHistory | None:
    """The clusters that the run's strategy recorded, round by round; None without any."""
    column = {client.client_id: k for k, client in enumerate(run.clients)}
    rounds: list[int] = []
    rows: list[Vector] = []
    for record in run.diagnostics:
        clients = record.get("client_ids", [])
        found = [_vector(record.get(name), len(clients)) for name in (IDS, *MAP)]
        if not clients or not np.isfinite(found[0]).all() or not set(clients) <= set(column):
            continue
        row = np.full((len(column), 1 + len(MAP)), np.nan)
        row[[column[client] for client in clients]] = np.transpose(found)
        rounds.append(int(record["round"]))
        rows.append(row)
    if not rounds:
        return None
    values = np.array(rows)
    types = np.array([client.domain for client in run.clients])
    return ClusterHistory(np.array(rounds), types, values[:, :, 0], values[:, :, 1:])


def methods_with_clusters(methods: Iterable[Method]) -> list[Method]:
    """Those of the methods whose strategy found clusters of clients in every run."""
    return [method for method in methods if all(map(read_cluster_history, method.runs))]


def final_cluster_metric(run: Run, name: ClusterMetric, window: int = WINDOW) -> float:
    """Mean of a figure over the last ``window`` tested rounds; NaN where nothing is known."""
    found = read_cluster_history(run)
    if found is None:
        return float("nan")
    values = found.metric(name)[np.isin(found.rounds, run.final_rounds(window))]
    return float(values.mean()) if values.size else float("nan")


def _vector(value: object, length: int) -> Vector:
    """One number per client; NaN where the value is anything else."""
    vector = as_float_array(value)
    return vector if vector is not None and vector.shape == (length,) else np.full(length, np.nan)


def as_float_array(value: Any) -> Vector | None:
    """What a strategy recorded as an array, if it is numbers."""
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
