"""Tables of accuracy per domain, personal models, fairness, client types and clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import methodcaller

import numpy as np

from fairflower.numerics import Vector
from fairflower.numerics.metrics import (
    AVG,
    GAP,
    MIN,
    STD,
    STD0,
    SUMMARIES,
    Summary,
    average_and_worst,
)
from fairflower.report.clusters import ClusterMetric
from fairflower.report.grids import largest_grid
from fairflower.report.measures import (
    SIGMA,
    all_clients_tested,
    by_user_metric,
    of_clients,
    rated_methods,
    summarized,
    typed_methods,
)
from fairflower.report.methods import Comparison, Method, methods_with_clusters
from fairflower.report.reading import SCORES, AccuracyHistory, Run
from fairflower.report.tables.cells import (
    Column,
    Table,
    bold,
    group_comparable,
    how_to_read,
    metric_table,
)
from fairflower.server.history import WINDOW
from fairflower.statistics.differences import MeanStd


def accuracy_table(comparison: Comparison, window: int) -> Table:
    """Return accuracy per domain, AVG, STD, MIN and GAP in percent, as papers show them."""
    return metric_table(
        f"Accuracy per domain, {comparison.span(window)}",
        f"{comparison.examples.capitalize()} accuracy in %. MIN: {MIN.phrase}. GAP: {GAP.phrase}. "
        f"{_HELD_OUT if comparison.held_out else ''}"
        f"{_ADAPTED if any(tested_adapted(comparison, d) for d in comparison.held_out) else ''}"
        f"{how_to_read(comparison)}",
        [*columns(comparison.domains, window), *held_out_columns(comparison, window)],
        group_comparable(comparison, comparison.methods),
    )


def quality_table(comparison: Comparison) -> Table:
    """Return FedISM's Table 1: ACC and AUC on clean and corrupted images, in percent.

    The table shows methods whose runs have an AUC or corrupted images.
    """

    def of(score: str, d: int | None) -> Callable[[Method], MeanStd]:
        def values(run: Run) -> Vector:
            scores = 100 * run.final_scores(score)
            return scores.mean(axis=1) if d is None else scores[:, d]

        return lambda method: method.over_rounds(values)

    methods = rated_methods(comparison)
    auc = all(set(run.scores) >= set(SCORES) for method in methods for run in method.runs)
    places: dict[str, int | None] = {name: d for d, name in enumerate(comparison.domains)}
    if len(places) > 1:
        places["average"] = None
    return metric_table(
        f"Class-balanced accuracy{' and AUC' if auc else ''}, "
        f"{comparison.span().removeprefix('mean of ')}",
        f"In %. ACC: class-balanced accuracy.{' AUC: one-vs-one.' if auc else ''} ±: standard "
        f"deviation over rounds and {comparison.replicates} (ddof 0). {bold(comparison)}",
        [
            Column(f"{name} {shown.title}", of(score, d), 1)
            for name, d in places.items()
            for score, shown in SCORES.items()
            if auc or score != "auc"
        ],
        group_comparable(comparison, methods),
    )


def personal_spread_table(comparison: Comparison) -> Table:
    """Return the spread of personal models over a domain's clients, if it has several clients."""
    methods = [
        m for m in comparison.methods if all(r.personal_by_client.rounds.size for r in m.runs)
    ]

    def spread(domain: str) -> Callable[[Method], MeanStd]:
        def of(run: Run) -> float:
            own = [client.domain == domain for client in run.clients]
            values = run.personal_by_client.final()[own]
            return 100 * float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

        return lambda method: method.over_seeds(of)

    several = [d for d in comparison.domains if _clients(methods, d) > 1]
    return metric_table(
        f"Spread of personal models within a domain, {comparison.span()}",
        "Standard deviation (ddof 1) of accuracy over the clients of a domain, in points. Each "
        f"client tests its personal model on its own {comparison.examples} data.",
        [Column(domain, spread(domain), -1) for domain in several],
        group_comparable(comparison, methods) if several else [],
    )


def _clients(methods: Sequence[Method], domain: str) -> int:
    """Return the number of clients in a domain; 0 if there are no methods."""
    runs = [method.runs[0] for method in methods]
    return max((sum(c.domain == domain for c in run.clients) for run in runs), default=0)


def personal_table(comparison: Comparison) -> Table:
    """Return the accuracy table of personal models, for methods that have them."""
    methods = [m for m in comparison.methods if all(run.personal.rounds.size for run in m.runs)]
    return metric_table(
        f"Accuracy of personal models, {comparison.span()}",
        f"In %. Each client tests its personal model on its own {comparison.examples} data, so the "
        "accuracy is not comparable with that of the global model.",
        columns(comparison.domains, tests=lambda run: run.personal),
        group_comparable(comparison, methods),
    )


def user_tables(comparison: Comparison) -> list[Table]:
    """Return a table for each user metric, with the methods that have this metric."""
    return [
        metric_table(
            f"{metric} per domain, {comparison.span()}",
            f"Your metric {metric}, times 100; {'higher' if better > 0 else 'lower'} is better. "
            f"{worst.title}: {worst.phrase}. {how_to_read(comparison)}",
            columns(comparison.domains, tests=methodcaller("tests_by", metric), better=better),
            group_comparable(comparison, methods),
        )
        for metric, better, methods in by_user_metric(comparison)
        for _, worst in [average_and_worst(better)]
    ]


def product_table(comparison: Comparison) -> Table:
    """Return FedHEAL's Table 2: strategies grouped by local training."""
    return metric_table(
        f"Local training and aggregation, {comparison.span()}",
        "The accuracy table, grouped by local training. Bold: best strategy of a group.",
        columns(comparison.domains),
        largest_grid(comparison).items(),
    )


def columns(
    domains: Sequence[str],
    window: int = WINDOW,
    tests: Callable[[Run], AccuracyHistory] = lambda run: run,
    better: int = 1,
) -> list[Column]:
    """Return columns for each domain's accuracy in ``tests``, AVG, STD, MIN and GAP, in percent.

    ``better`` is -1 if lower values of the metric in ``tests`` are better.
    """

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

    average, worst = average_and_worst(better)
    return [
        *(Column(domain, accuracy(d), better) for d, domain in enumerate(domains)),
        *map(over, (average, STD, STD0, worst, GAP)),
    ]


#: Caption of `held_out_columns`.
_HELD_OUT = (
    "Held out: accuracy on a domain that no client has; it is not part of AVG, STD, MIN or GAP. "
)

#: The caption of columns with AdaBN.
_ADAPTED = "AdaBN: with BatchNorm statistics estimated from the domain's unlabeled test examples. "


def held_out_columns(comparison: Comparison, window: int = WINDOW) -> list[Column]:
    """Return columns with the accuracy on each held-out domain, in percent.

    If runs were also tested with AdaBN, this accuracy follows in another column.
    """

    def accuracy(domain: str, adapted: bool) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(
            lambda run: 100 * run.held_out_accuracy(domain, window, adapted=adapted)
        )

    return [
        Column(f"{name} (held out{', AdaBN' * adapted})", accuracy(name, adapted), 1)
        for name in comparison.held_out
        for adapted in ((False, True) if tested_adapted(comparison, name) else (False,))
    ]


def tested_adapted(comparison: Comparison, domain: str) -> bool:
    """Return whether some run was tested on a held-out domain with AdaBN."""
    return any(
        run.held_out_domain == domain and run.adapted.rounds.size > 0
        for run in comparison.kept_runs
    )


def fairness_table(comparison: Comparison, level: str) -> Table:
    """Return a table of all `SUMMARIES` over ``"domains"`` or ``"clients"``.

    It contains the methods whose runs all have accuracies at this level.
    """

    def values(run: Run) -> Vector:
        accuracies = (run if level == "domains" else run.by_client).final()
        return accuracies[np.isfinite(accuracies)]

    def of(row: Summary) -> Callable[[Method], MeanStd]:
        value = summarized(row, comparison.domains)
        if level == "domains":
            return lambda method: method.over_domains(Run.final, value)
        return lambda method: method.over_seeds(lambda run: value(values(run)))

    def whole(method: Method) -> bool:
        if level == "domains":
            return method.fully_tested()
        return all(map(all_clients_tested, method.runs))

    methods = [m for m in comparison.methods if all(values(run).size for run in m.runs)]
    sizes = sorted({values(run).size for m in methods for run in m.runs})
    counted = " or ".join(str(size) for size in sizes)
    highest = " or ".join(f"{math.log(size):.4f}" for size in sizes)
    return metric_table(
        f"Fairness over {counted} {level}, {comparison.span()}",
        "In %, except Jain's index (1: all equal), Gini coefficient (0: all equal) and entropy "
        f"(ln K = {highest}: all equal). {how_to_read(comparison)}",
        [Column(row.heading, of(row), row.better, row.digits, whole) for row in SUMMARIES],
        group_comparable(comparison, methods),
    )


#: Caption of a table over clients, some of which did not test.
_BY_DOMAIN = (
    "A client counts with its domain's accuracy, because in some runs not all clients tested. "
)


def types_table(comparison: Comparison) -> Table:
    """Return FedGCR's Table 1: average and spread over client types (domains) and over clients.

    `typed_methods` selects the methods to show.
    """

    def domains(row: Summary) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_domains(Run.final, summarized(row, comparison.domains))

    methods = typed_methods(comparison)
    accuracies = of_clients(methods)

    def clients(row: Summary) -> Callable[[Method], MeanStd]:
        value = summarized(row, comparison.domains)
        return lambda method: method.over_seeds(lambda run: value(accuracies(run)))

    some = {all_clients_tested(run) for method in methods for run in method.runs}
    columns = (
        ("Avg over domains", domains(AVG), AVG.better),
        ("Avg over clients", clients(AVG), AVG.better),
        (f"{SIGMA} type", domains(STD0), STD0.better),
        (f"{SIGMA} client", clients(STD0), STD0.better),
    )
    return metric_table(
        f"Client types and clients, {comparison.span()}",
        f"In %. {SIGMA} type and {SIGMA} client: standard deviations over domains and over "
        f"clients (ddof 0). {_BY_DOMAIN if len(some) > 1 else ''}{how_to_read(comparison)}",
        [Column(*column, whole=Method.fully_tested) for column in columns],
        group_comparable(comparison, methods),
    )


def clusters_table(comparison: Comparison, window: int) -> Table:
    """Return FedGCR's Table 3, which compares clusters with domains, for methods with clusters."""

    def of(name: ClusterMetric, unit: float) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(lambda run: unit * run.final_clusters(name, window))

    return metric_table(
        f"Clusters, {comparison.span(window)}",
        "Clustering accuracy: % of clients whose domain is the most frequent in their cluster. "
        "Adjusted Rand "
        f"index: 1 is perfect, 0 is chance. {how_to_read(comparison)}",
        [
            Column("clusters found", of("number", 1), 0, 1),
            Column("clustering accuracy", of("accuracy", 100), 1),
            Column("adjusted Rand index", of("rand", 1), 1, 4),
        ],
        group_comparable(comparison, methods_with_clusters(comparison.methods)),
    )
