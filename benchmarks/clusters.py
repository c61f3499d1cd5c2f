"""Compare ways to find the types of clients: clusterings of the representations that FedGCR gets.

    python benchmarks/clusters.py --data-dir DIGITS      # a few minutes

Trains FedGCR with FedGC on Digit-Five (``experiments/fedgcr-digit-five-cpu.toml``) with the
domain imbalance factors 1, 5 and 10: 25, 13 and 22 clients of five types. The smallest type has
one client, and the smallest client one image. The script records the representations h of every
round, computed with the received model, and the numbers of images n. Each algorithm then clusters
every round again, with several seeds of the clustering. Two scores in %, where 100 is perfect:

accuracy   share of clients that have the majority type of their cluster (as in the paper)
ARI        adjusted Rand index, which also penalizes too many clusters

The tables show means over rounds and seeds, with the sample standard deviation over the seeds of
the clustering. The first table is for a given, correct number of clusters. In the second table the
algorithms estimate the number, and T' is its mean. Marked rows use
`fairflower.numerics.clustering`: ``*`` its "kmeans", ``+`` its "gmm".
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import described_parser, log_progress, machine_facts, markdown, version_facts
from numpy.typing import NDArray
from rich.console import Console
from sklearn import __version__ as sklearn_version
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fairflower.aggregation import clusters
from fairflower.client_app import app
from fairflower.config import RunConfig
from fairflower.config.text import read_toml
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.numerics.clustering import cluster, principal
from fairflower.numerics.metrics import adjusted_rand, clustering_accuracy
from fairflower.server.session import Session

CONFIG = Path(__file__).parents[1] / "experiments" / "fedgcr-digit-five-cpu.toml"
TYPES = 5

Labels = NDArray[np.int64]
Vectors = NDArray[np.float64]
Algorithm = Callable[[Vectors, Vectors, int], Labels]


class Round(NamedTuple):
    """A round as the server sees it, vectors [K, d] and image counts [K], and true types [K]."""

    h: Vectors
    sizes: Vectors
    types: list[str]


def record_rounds(dif: int, seed: int, data_dir: str, rounds: int) -> list[Round]:
    """Train once, and record the input of every clustering."""
    recorded: list[tuple[Vectors, list[int], Vectors]] = []
    original = clusters.cluster

    def record(h: Vectors, clients: Iterable[int], *args: Any, **options: Any) -> Any:
        recorded.append((h, list(clients), options["sizes"]))
        return original(h, clients, *args, **options)

    flat = read_toml(CONFIG)
    del flat["strategy.variant"], flat["client.variant"]  # the defaults
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.from_flat(
            flat
            | {
                "seed": seed,
                "engine": "inline",
                "data.imbalance-factor": dif,
                "data.dir": data_dir,
                "evaluate.every": rounds,
                "num-server-rounds": rounds,
                "output-dir": folder,
            }
        )
        domains = [client.domain for client in prepare(config.data).clients]
        clusters.cluster = record
        try:
            Session(InlineGrid(app, len(domains)), config, Console(quiet=True)).run()
        finally:
            clusters.cluster = original
    return [Round(h, n, [domains[k] for k in clients]) for h, clients, n in recorded]


def fairflower_clustering(
    number: int | None, by_images: bool = True, clustering: Any = "kmeans"
) -> Algorithm:
    """Return the clustering of `fairflower.numerics.clustering`.

    ``number`` is the number of clusters; None estimates it. ``by_images`` weights clients by their
    numbers of images.
    """

    def assign(h: Vectors, sizes: Vectors, seed: int) -> Labels:
        n = sizes if by_images else None
        return cluster(h, range(len(h)), number, clustering=clustering, sizes=n, seed=seed).ids

    return assign


def mixture(starts: int, covariance: str = "full") -> Algorithm:
    """Return scikit-learn's Gaussian mixture with as many components as there are types."""

    def assign(h: Vectors, sizes: Vectors, seed: int) -> Labels:
        fitted = GaussianMixture(
            TYPES, covariance_type=covariance, n_init=starts, random_state=seed
        )
        return fitted.fit_predict(h)

    return assign


def mixture_by_bic(axes: int) -> Algorithm:
    """Return a Gaussian mixture on ``axes`` principal axes whose BIC selects the number."""

    def assign(h: Vectors, sizes: Vectors, seed: int) -> Labels:
        x = principal(h, axes)
        x = x / np.sqrt(np.mean(x**2))
        fits = [
            GaussianMixture(t, covariance_type="tied", reg_covar=0.01, n_init=3, random_state=seed)
            for t in range(1, min(10, len(h) // 2) + 1)
        ]
        return min((fit.fit(x) for fit in fits), key=lambda fit: fit.bic(x)).predict(x)

    return assign


GIVEN_NUMBER: dict[str, Algorithm] = {
    "T' - 1 axes, k-means, by images *": fairflower_clustering(TYPES),
    "T' - 1 axes, k-means, all alike": fairflower_clustering(TYPES, by_images=False),
    "mixture, full, 1 start +": fairflower_clustering(TYPES, clustering="gmm"),
    "mixture, full, 10 starts": mixture(10),
    "mixture, spherical, 10 starts": mixture(10, "spherical"),
}
ESTIMATED_NUMBER: dict[str, Algorithm] = {
    "clusters.bic, k-means, by images *": fairflower_clustering(None),
    "clusters.bic, k-means, all alike": fairflower_clustering(None, by_images=False),
    "clusters.bic, mixture +": fairflower_clustering(None, clustering="gmm"),
    "mixture's own BIC, 4 axes": mixture_by_bic(4),
}


def cell(algorithm: Algorithm, rounds: list[Round], repeats: int) -> str:
    """Format accuracy, ARI and T' of an algorithm over the rounds of an imbalance factor."""
    scores = np.array(
        [
            [
                (100 * clustering_accuracy(types, ids), 100 * adjusted_rand(types, ids), found)
                for h, sizes, types in rounds
                for ids in [algorithm(h, sizes, seed)]
                for found in [len(np.unique(ids))]
            ]
            for seed in range(repeats)
        ]
    ).mean(axis=1)  # [seeds, 3]
    spread = scores.std(axis=0, ddof=1) if repeats > 1 else np.zeros(3)
    (accuracy, ari, found), (s, t, _) = scores.mean(axis=0), spread
    return f"{accuracy:.1f} ±{s:.1f} / {ari:.1f} ±{t:.1f} ({found:.1f})"


def main() -> None:
    """Train the runs, and print a table for each kind of algorithm."""
    parser = described_parser(__doc__)
    parser.add_argument(
        "--data-dir", default="", help="folder of the digits (default: $FAIRFLOWER_DATA)"
    )
    parser.add_argument("--dif", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the runs")
    parser.add_argument("--repeats", type=int, default=10, help="number of seeds of the clustering")
    parser.add_argument("--quick", action="store_true", help="3 rounds and 2 repeats")
    options = parser.parse_args()
    rounds, repeats = (3, 2) if options.quick else (12, options.repeats)
    print(
        machine_facts(),
        version_facts("numpy", "torch"),
        f"scikit-learn {sklearn_version}",
        sep="; ",
    )
    warnings.simplefilter("ignore", ConvergenceWarning)
    recorded = {}
    for dif in options.dif:
        begin = time.perf_counter()
        runs = [record_rounds(dif, seed, options.data_dir, rounds) for seed in options.seeds]
        recorded[f"DIF {dif}"] = [item for run in runs for item in run]
        log_progress(f"DIF {dif}: trained for {time.perf_counter() - begin:.0f} s")
    for title, algorithms in (
        ("as many as types", GIVEN_NUMBER),
        ("number to be found", ESTIMATED_NUMBER),
    ):
        with threadpool_limits(1):
            rows = [
                [name, *(cell(algorithm, rounds, repeats) for rounds in recorded.values())]
                for name, algorithm in algorithms.items()
            ]
        header = ["accuracy / ARI (T')", *recorded]
        print(f"\n{title}\n\n{markdown(header, rows)}", flush=True)


if __name__ == "__main__":
    main()
