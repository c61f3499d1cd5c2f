"""How to find clients' types: what FedGCR's runs were told, clustered in several ways.

    python benchmarks/clusters.py --data-dir DIGITS      # a few minutes

Trains FedGCR with FedGC on Digit-Five (``experiments/fedgcr-digit-five-cpu.toml``) at the
domain imbalance factors 1, 5 and 10: 25, 13 and 22 clients of five types, down to a type of
one client and clients of one image. Kept are every round's representations h, by the model
received, and the numbers of images n. Each round is then clustered anew in every way, with
several seeds of the clustering. Two scores, in %, 100 being perfect:

accuracy   share of clients whose cluster's majority is of their own type (the paper's)
ARI        adjusted Rand index, which too many clusters do not please either

Means over rounds and seeds, with the sample standard deviation over the seeds of the
clustering. The first table has the right number of clusters, in the second it is to be
found, and T' is how many were. `fairflower.numerics.clustering` is the rows that are marked:
``*`` its "kmeans", ``+`` its "gmm".
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import described_parser, machine_facts, markdown, say, version_facts
from numpy.typing import NDArray
from rich.console import Console
from sklearn import __version__ as sklearn_version
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fairflower.aggregation import clusters
from fairflower.client_app import app
from fairflower.config import RunConfig, read_toml
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.numerics.clustering import cluster, principal
from fairflower.numerics.metrics import adjusted_rand, clustering_accuracy
from fairflower.server.session import Session

CONFIG = Path(__file__).parents[1] / "experiments" / "fedgcr-digit-five-cpu.toml"
TYPES = 5

Labels = NDArray[np.int64]
Vectors = NDArray[np.float64]
Rule = Callable[[Vectors, Vectors, int], Labels]


class Round(NamedTuple):
    """What a server had: vectors [K, d], numbers of images [K]; and clients' true types [K]."""

    h: Vectors
    sizes: Vectors
    types: list[str]


def rounds_of_a_run(dif: int, seed: int, data_dir: str, rounds: int) -> list[Round]:
    """Train, and listen to what is clustered."""
    heard: list[tuple[Vectors, list[int], Vectors]] = []
    find = clusters.cluster

    def listen(h: Vectors, clients: Iterable[int], *args: Any, **options: Any) -> Any:
        heard.append((h, list(clients), options["sizes"]))
        return find(h, clients, *args, **options)

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
        clusters.cluster = listen
        try:
            Session(InlineGrid(app, len(domains)), config, Console(quiet=True)).run()
        finally:
            clusters.cluster = find
    return [Round(h, n, [domains[k] for k in clients]) for h, clients, n in heard]


def ours(number: int | None, by_images: bool = True, clustering: Any = "kmeans") -> Rule:
    """What `fairflower.numerics.clustering` makes of it."""

    def rule(h: Vectors, sizes: Vectors, seed: int) -> Labels:
        n = sizes if by_images else None
        return cluster(h, range(len(h)), number, clustering=clustering, sizes=n, seed=seed).ids

    return rule


def mixture(starts: int, covariance: str = "full") -> Rule:
    """scikit-learn's mixture of as many Gaussians as there are types."""

    def rule(h: Vectors, sizes: Vectors, seed: int) -> Labels:
        fitted = GaussianMixture(
            TYPES, covariance_type=covariance, n_init=starts, random_state=seed
        )
        return fitted.fit_predict(h)

    return rule


def mixtures_own_criterion(axes: int) -> Rule:
    """As many clusters as the mixture's own BIC prefers, on so many axes."""

    def rule(h: Vectors, sizes: Vectors, seed: int) -> Labels:
        x = principal(h, axes)
        x = x / np.sqrt(np.mean(x**2))
        fits = [
            GaussianMixture(t, covariance_type="tied", reg_covar=0.01, n_init=3, random_state=seed)
            for t in range(1, min(10, len(h) // 2) + 1)
        ]
        return min((fit.fit(x) for fit in fits), key=lambda fit: fit.bic(x)).predict(x)

    return rule


GIVEN: dict[str, Rule] = {
    "T' - 1 axes, k-means, by images *": ours(TYPES),
    "T' - 1 axes, k-means, all alike": ours(TYPES, by_images=False),
    "mixture, full, 1 start +": ours(TYPES, clustering="gmm"),
    "mixture, full, 10 starts": mixture(10),
    "mixture, spherical, 10 starts": mixture(10, "spherical"),
}
FOUND: dict[str, Rule] = {
    "clusters.bic, k-means, by images *": ours(None),
    "clusters.bic, k-means, all alike": ours(None, by_images=False),
    "clusters.bic, mixture +": ours(None, clustering="gmm"),
    "mixture's own BIC, 4 axes": mixtures_own_criterion(4),
}


def cell(rule: Rule, rounds: list[Round], repeats: int) -> str:
    """Accuracy, ARI and T' of one way at one imbalance."""
    scores = np.array(
        [
            [
                (100 * clustering_accuracy(types, ids), 100 * adjusted_rand(types, ids), found)
                for h, sizes, types in rounds
                for ids in [rule(h, sizes, seed)]
                for found in [len(np.unique(ids))]
            ]
            for seed in range(repeats)
        ]
    ).mean(axis=1)  # [seeds, 3]
    spread = scores.std(axis=0, ddof=1) if repeats > 1 else np.zeros(3)
    (accuracy, ari, found), (s, t, _) = scores.mean(axis=0), spread
    return f"{accuracy:.1f} ±{s:.1f} / {ari:.1f} ±{t:.1f} ({found:.1f})"


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--data-dir", default="", help="the digits; default: $FAIRFLOWER_DATA")
    parser.add_argument("--dif", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the runs")
    parser.add_argument("--repeats", type=int, default=10, help="seeds of the clustering")
    parser.add_argument("--quick", action="store_true", help="3 rounds and 2 repeats: a look")
    given = parser.parse_args()
    rounds, repeats = (3, 2) if given.quick else (12, given.repeats)
    print(
        machine_facts(),
        version_facts("numpy", "torch"),
        f"scikit-learn {sklearn_version}",
        sep="; ",
    )
    warnings.simplefilter("ignore", ConvergenceWarning)
    heard = {}
    for dif in given.dif:
        begun = time.perf_counter()
        runs = [rounds_of_a_run(dif, seed, given.data_dir, rounds) for seed in given.seeds]
        heard[f"DIF {dif}"] = [r for run in runs for r in run]
        say(f"DIF {dif}: trained for {time.perf_counter() - begun:.0f} s")
    for title, rules in (("as many as types", GIVEN), ("number to be found", FOUND)):
        with threadpool_limits(1):
            rows = [
                [name, *(cell(rule, rounds, repeats) for rounds in heard.values())]
                for name, rule in rules.items()
            ]
        header = ["accuracy / ARI (T')", *heard]
        print(f"\n{title}\n\n{markdown(header, rows)}", flush=True)


if __name__ == "__main__":
    main()
