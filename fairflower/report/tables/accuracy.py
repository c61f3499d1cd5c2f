"""Tables of accuracy: per domain, of personal models, its fairness, client types and clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fairflower.numerics.metrics import AVG, GAP, MIN, STD, STD0, SUMMARIES, Summary, Vector
from fairflower.report import clusters
from fairflower.report.measures import SIGMA, of_clients, rated_methods, summarized, typed_methods
from fairflower.report.methods import Comparison, MeanStd, Method, largest_grid
from fairflower.report.reading import SCORES, WINDOW, AccuracyHistory, Run
from fairflower.report.tables.cells import (
    Column,
    Table,
    bold,
    group_comparable,
    how_to_read,
    metric_table,
)


def accuracy_table(comparison: Comparison, window: int) -> Table:
    """The papers' table: accuracy per domain, AVG, STD, MIN and GAP, in percent."""
    return metric_table(
        f"Accuracy per domain, {comparison.span(window)}",
        "Test accuracy of the global model in %. AVG: plain mean over domains. STD: standard "
        "deviation over domains of their mean over these rounds; FedHEAL's tables use ddof 1, "
        f"FedEquilibria's and FedGCR's ddof 0. MIN: {MIN.phrase}. GAP: {GAP.phrase}. "
        f"{_HELD_OUT if comparison.held_out else ''}{how_to_read(comparison)}",
        [*columns(comparison.domains, window), *held_out_columns(comparison, window)],
        group_comparable(comparison, comparison.methods),
    )


def quality_table(comparison: Comparison) -> Table:
    """FedISM's Table 1: ACC and AUC on clean and corrupted images, in percent.

    Of methods whose images were corrupted or that have an AUC.
    """

    def of(score: str, d: int | None) -> Callable[[Method], MeanStd]:
        def values(run: Run) -> Vector:
            found = 100 * run.final_scores(score)
            return found.mean(axis=1) if d is None else found[:, d]

        return lambda method: method.over_rounds(values)

    methods = rated_methods(comparison)
    auc = all(set(run.scores) == set(SCORES) for method in methods for run in method.runs)
    places: dict[str, int | None] = {name: d for d, name in enumerate(comparison.domains)}
    if len(places) > 1:
        places["average"] = None
    return metric_table(
        f"Class-balanced accuracy{' and AUC' if auc else ''}, "
        f"{comparison.span().removeprefix('mean of ')}",
        "In %. ACC: mean over classes of their accuracy. "
        f"{'AUC: one-vs-one, mean over pairs of classes. ' if auc else ''}"
        "As in FedISM's tables, figures are means over these rounds and all seeds, and "
        "under them ± the standard deviation over rounds and seeds together (ddof 0); "
        f"average: of the groups, in every round. {bold(comparison)}",
        [
            Column(f"{name} {title}", of(score, d), 1)
            for name, d in places.items()
            for score, (title, _) in SCORES.items()
            if auc or score != "auc"
        ],
        group_comparable(comparison, methods),
    )


def personal_table(comparison: Comparison) -> Table:
    """The same figures of the clients' personal models, of methods that have them."""
    methods = [m for m in comparison.methods if all(run.personal.rounds.size for run in m.runs)]
    return metric_table(
        f"Accuracy of personal models, {comparison.span()}",
        "Each client's own model on its own test examples in %, the mean of a domain's clients "
        "by test examples. Not comparable with the global model's accuracy on whole domains.",
        columns(comparison.domains, tests=lambda run: run.personal),
        group_comparable(comparison, methods),
    )


def product_table(comparison: Comparison) -> Table:
    """FedHEAL's Table 2: for each local training of a product the strategies."""
    return metric_table(
        f"Local training times aggregation, {comparison.span()}",
        "The accuracy table by local training. Bold: best of the strategies with it.",
        columns(comparison.domains),
        largest_grid(comparison).items(),
    )


def columns(
    domains: Sequence[str],
    window: int = WINDOW,
    tests: Callable[[Run], AccuracyHistory] = lambda run: run,
) -> list[Column]:
    """Each domain's accuracy in a run's ``tests``, and what the papers say of all, in percent."""

    def accuracies(run: Run) -> Vector:
        return tests(run).final(window)

    def accuracy(d: int) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(lambda run: 100 * float(accuracies(run)[d]))

    def over(row: Summary) -> Column:
        return Column(
            row.heading,
            lambda method: method.over_domains(accuracies, summarized(row, domains)),
            row.better,
            whole=lambda method: all(tests(run).fully_tested(window) for run in method.runs),
        )

    return [
        *(Column(domain, accuracy(d), 1) for d, domain in enumerate(domains)),
        *map(over, (AVG, STD, STD0, MIN, GAP)),
    ]


#: Caption of `held_out_columns`.
_HELD_OUT = (
    "Held out: accuracy on a domain that no client has; it is not part of AVG, STD, MIN and GAP. "
)


def held_out_columns(comparison: Comparison, window: int = WINDOW) -> list[Column]:
    """The accuracy on each domain that was held out of a method's runs, in percent."""

    def accuracy(domain: str) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(
            lambda run: 100 * run.held_out_accuracy(domain, window)
        )

    return [Column(f"{name} (held out)", accuracy(name), 1) for name in comparison.held_out]


def fairness_table(comparison: Comparison, level: str) -> Table:
    """All `SUMMARIES` over ``"domains"`` or ``"clients"``, of methods that have them."""

    def values(run: Run) -> Vector:
        found = (run if level == "domains" else run.by_client).final()
        return found[np.isfinite(found)]

    def of(row: Summary) -> Callable[[Method], MeanStd]:
        figure = summarized(row, comparison.domains)
        if level == "domains":
            return lambda method: method.over_domains(Run.final, figure)
        return lambda method: method.over_seeds(lambda run: figure(values(run)))

    methods = [m for m in comparison.methods if all(values(run).size for run in m.runs)]
    sizes = sorted({values(run).size for m in methods for run in m.runs})
    counted = " or ".join(str(size) for size in sizes)
    highest = " or ".join(f"{math.log(size):.4f}" for size in sizes)
    return metric_table(
        f"Fairness over {counted} {level}, {comparison.span()}",
        f"Of the test accuracies of {level}. In %: AVG (plain mean), STD, MIN, MAX, GAP (best "
        "minus worst), worst 10 % (mean of the ⌊K/10⌋ lowest, at least one). Without unit: "
        "Jain's index (at most 1 = equal), Gini coefficient (at least 0 = equal) and entropy "
        f"in nats (at most ln K = {highest} = equal); "
        "these three are relative and look good when all are equally bad: read them with AVG "
        f"and MIN. {how_to_read(comparison)}",
        [
            Column(row.heading, of(row), row.better, 4 if row.relative else 2, Method.fully_tested)
            for row in SUMMARIES
        ],
        group_comparable(comparison, methods),
    )


def types_table(comparison: Comparison) -> Table:
    """FedGCR's Table 1: average and spread over client types (domains) and over clients.

    Where every domain has equally many clients they are the same: it is of no method, unless one
    found clusters and the table is wanted beside FedGCR's.
    """

    def domains(row: Summary) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_domains(Run.final, summarized(row, comparison.domains))

    def clients(row: Summary) -> Callable[[Method], MeanStd]:
        value = summarized(row, comparison.domains)
        return lambda method: method.over_seeds(lambda run: value(of_clients(run)))

    columns = (
        ("Avg over domains", domains(AVG), AVG.better),
        ("Avg over clients", clients(AVG), AVG.better),
        (f"{SIGMA} type", domains(STD0), STD0.better),
        (f"{SIGMA} client", clients(STD0), STD0.better),
    )
    return metric_table(
        f"Client types and clients, {comparison.span()}",
        "In %. Avg over domains: plain mean, the Avg of FedGCR's tables. Avg over clients: a "
        f"domain counts once for each of its clients. {SIGMA} type and {SIGMA} client: "
        "standard deviations over domains and over clients (ddof 0). A client's accuracy is "
        "that on its own test data if all clients tested, else that of its domain. "
        f"{how_to_read(comparison)}",
        [Column(*column, whole=Method.fully_tested) for column in columns],
        group_comparable(comparison, typed_methods(comparison)),
    )


def clusters_table(comparison: Comparison, window: int) -> Table:
    """FedGCR's Table 3: clusters of clients against their types, of methods that found them."""

    def of(name: clusters.ClusterMetric, unit: float) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(
            lambda run: unit * clusters.final_cluster_metric(run, name, window)
        )

    return metric_table(
        f"Clusters, {comparison.span(window)}",
        "Of the clients that took part in a round, against their true types, their domains. "
        "Clustering accuracy, in %: share of the clients whose type is the commonest in their "
        "cluster (of types that tie, one counts); splitting clusters never lowers it. "
        "Adjusted Rand index: at most 1 = the types themselves, 0 = chance. "
        f"{how_to_read(comparison)}",
        [
            Column("clusters found", of("number", 1), 0, 1),
            Column("clustering accuracy", of("accuracy", 100), 1),
            Column("adjusted Rand index", of("rand", 1), 1, 4),
        ],
        group_comparable(comparison, clusters.methods_with_clusters(comparison.methods)),
    )
