"""The tables of a report: accuracy per domain, fairness, clusters and all others of a method."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import DIFFERENCES, METRICS, GroupMetric
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
from fairflower.numerics.scores import ACCURACY, AUC, Score
from fairflower.report.clusters import ClusterMetric
from fairflower.report.contrasts import (
    TITLES,
    Contrast,
    Contrasts,
    MetricDifference,
    pairs_text,
)
from fairflower.report.grids import largest_grid
from fairflower.report.measures import (
    SIGMA,
    Measure,
    all_clients_tested,
    by_attribute,
    by_user_metric,
    of_clients,
    of_people,
    rated_methods,
    summarized,
    typed_methods,
)
from fairflower.report.methods import (
    Comparison,
    Method,
    differing,
    mean_of_last,
    methods_with_clusters,
)
from fairflower.report.reading import SCORES, AccuracyHistory, Run
from fairflower.report.tables.cells import (
    Cell,
    Column,
    Group,
    Row,
    Table,
    bold,
    column,
    group_comparable,
    how_to_read,
    judged_cell,
    metric_table,
)
from fairflower.report.tables.notes import machine_line, model_line, model_table, tests_line
from fairflower.report.text import (
    DASH,
    GUIDE,
    UNDEFINED,
    format_interval,
    format_number,
    within_range,
)
from fairflower.server.history import WINDOW
from fairflower.statistics.differences import MIN_PAIRS, MeanStd


def accuracy_tables(comparison: Comparison, contrasts: Contrasts) -> list[Table]:
    """Return tables of accuracy (last five tested rounds, last round) and of differences."""
    windows = [WINDOW]
    if any(m.runs[0].final_rounds() != m.runs[0].final_rounds(1) for m in comparison.methods):
        windows.append(1)
    first, *others = (accuracy_table(comparison, window) for window in windows)
    further = (
        quality_table(comparison),
        *user_tables(comparison),
        *group_tables(comparison),
        types_table(comparison),
        *(clusters_table(comparison, window) for window in windows),
        personal_table(comparison),
        personal_spread_table(comparison),
        product_table(comparison),
        participation_table(comparison),
        *difference_tables(comparison, contrasts),
        model_table(comparison),
    )
    lines = (tests_line(comparison), model_line(comparison), machine_line(comparison), GUIDE)
    return [
        replace(first, footers=[line for line in lines if line]),
        *others,
        *(table for table in further if table.groups),
    ]


def fairness_tables(comparison: Comparison) -> list[Table]:
    """Return tables of all fairness metrics over domains and, if clients tested, over clients."""
    tables = (fairness_table(comparison, level) for level in ("domains", "clients"))
    return [table for table in tables if table.groups]


def accuracy_table(comparison: Comparison, window: int) -> Table:
    """Return accuracy per domain, AVG, STD, MIN and GAP in percent, as papers show them."""
    held_out = adapted = ""
    if comparison.held_out:
        held_out = (
            "Held out: accuracy on a domain that no client has; it is not part of AVG, STD, MIN or "
            "GAP. "
        )
    if any(tested_adapted(comparison, domain) for domain in comparison.held_out):
        adapted = (
            "AdaBN: with BatchNorm statistics estimated from the domain's unlabeled test examples. "
        )
    return metric_table(
        f"Accuracy per domain, {comparison.span(window)}",
        f"{comparison.examples.capitalize()} accuracy in %. MIN: {MIN.phrase}. GAP: {GAP.phrase}. "
        f"{held_out}{adapted}{how_to_read(comparison)}",
        [*columns(comparison.domains, window), *held_out_columns(comparison, window)],
        group_comparable(comparison, comparison.methods),
    )


def quality_table(comparison: Comparison) -> Table:
    """Return FedISM's Table 1: ACC and AUC on clean and corrupted images, in percent.

    The table shows methods whose runs have an AUC or corrupted images.
    """

    def of(score: Score, d: int | None) -> Column:
        def values(run: Run) -> Vector:
            scores = score.shown(run.final_scores(score.name))
            return scores.mean(axis=1) if d is None else scores[:, d]

        where = "average" if d is None else comparison.domains[d]
        return Column(
            f"{where} {score.title}",
            score.better,
            score.unit,
            estimate=lambda method: method.over_rounds(values),
        )

    methods = rated_methods(comparison)
    auc = all(set(run.scores) >= set(SCORES) for method in methods for run in method.runs)
    count = len(comparison.domains)
    return metric_table(
        f"Class-balanced accuracy{' and AUC' if auc else ''}, "
        f"{comparison.span().removeprefix('mean of ')}",
        f"In %. ACC: class-balanced accuracy.{' AUC: one-vs-one.' if auc else ''} ±: standard "
        f"deviation over rounds and {comparison.replicates} (ddof 0). {bold(comparison)}",
        [
            of(score, d)
            for d in (*range(count), *(None for _ in range(count > 1)))
            for score in SCORES.values()
            if auc or score is not AUC
        ],
        group_comparable(comparison, methods),
    )


def personal_spread_table(comparison: Comparison) -> Table:
    """Return the spread of personal models over a domain's clients, if it has several clients."""
    methods = [
        m for m in comparison.methods if all(r.personal_by_client.rounds.size for r in m.runs)
    ]

    def spread(domain: str) -> Column:
        def of(run: Run) -> float:
            own = [client.domain == domain for client in run.clients]
            values = run.personal_by_client.final()[own]
            return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

        return column(domain, of, -1)

    clients = [Counter(client.domain for client in m.runs[0].clients) for m in methods]
    several = [d for d in comparison.domains if any(count[d] > 1 for count in clients)]
    return metric_table(
        f"Spread of personal models within a domain, {comparison.span()}",
        "Standard deviation (ddof 1) of accuracy over the clients of a domain, in points. Each "
        f"client tests its personal model on its own {comparison.examples} data.",
        [*map(spread, several)],
        group_comparable(comparison, methods) if several else [],
    )


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

    def accuracy(d: int) -> Column:
        return column(domains[d], lambda run: float(accuracies(run)[d]), better)

    def over(row: Summary) -> Column:
        return Column(
            row.heading,
            row.better,
            row.unit,
            estimate=lambda method: method.over_domains(accuracies, summarized(row, domains)),
            whole=lambda method: all(tests(run).fully_tested(window) for run in method.runs),
        )

    average, worst = average_and_worst(better)
    return [
        *map(accuracy, range(len(domains))),
        *map(over, (average, STD, STD0, worst, GAP)),
    ]


def held_out_columns(comparison: Comparison, window: int = WINDOW) -> list[Column]:
    """Return columns with the accuracy on each held-out domain, in percent.

    If runs were also tested with AdaBN, this accuracy follows in another column.
    """
    return [
        column(
            f"{name} (held out{', AdaBN' * adapted})",
            partial(Run.held_out_accuracy, domain=name, window=window, adapted=adapted),
        )
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
        [
            Column(
                *(row.heading, row.better, row.unit),
                digits=row.digits,
                estimate=of(row),
                whole=whole,
            )
            for row in SUMMARIES
        ],
        group_comparable(comparison, methods),
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

    by_domain = (
        "A client counts with its domain's accuracy, because in some runs not all clients tested. "
        if len({all_clients_tested(run) for method in methods for run in method.runs}) > 1
        else ""
    )
    columns = (
        ("Avg over domains", AVG, domains),
        ("Avg over clients", AVG, clients),
        (f"{SIGMA} type", STD0, domains),
        (f"{SIGMA} client", STD0, clients),
    )
    return metric_table(
        f"Client types and clients, {comparison.span()}",
        f"In %. {SIGMA} type and {SIGMA} client: standard deviations over domains and over "
        f"clients (ddof 0). {by_domain}{how_to_read(comparison)}",
        [
            Column(title, row.better, estimate=over(row), whole=Method.fully_tested)
            for title, row, over in columns
        ],
        group_comparable(comparison, methods),
    )


def clusters_table(comparison: Comparison, window: int) -> Table:
    """Return FedGCR's Table 3, which compares clusters with domains, for methods with clusters."""

    def of(name: ClusterMetric) -> Callable[[Run], float]:
        return lambda run: run.final_clusters(name, window)

    return metric_table(
        f"Clusters, {comparison.span(window)}",
        "Clustering accuracy: % of clients whose domain is the most frequent in their cluster. "
        "Adjusted Rand "
        f"index: 1 is perfect, 0 is chance. {how_to_read(comparison)}",
        [
            column("clusters found", of("number"), 0, "", digits=1),
            column("clustering accuracy", of("accuracy")),
            column("adjusted Rand index", of("rand"), unit="", digits=4),
        ],
        group_comparable(comparison, methods_with_clusters(comparison.methods)),
    )


def group_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield the tables of fairness between groups of people for each attribute, in percent."""
    for attribute, methods in by_attribute(comparison):
        title = f"Fairness between groups by {attribute}"
        groups = group_comparable(comparison, methods)
        known = (run.info.get("classes") for method in methods for run in method.runs)
        positive = ", ".join(sorted({f"({classes[1]})" for classes in known if classes}))
        for place, who, words in (
            (0, "all people", "From the sums of counts over all clients"),
            (
                1,
                "worst client",
                "The worst value of any client, computed on the client's own "
                f"{comparison.examples} examples",
            ),
        ):
            yield metric_table(
                f"{title}, {who}, {comparison.span()}",
                f"{words}, times 100. diff.: largest difference between two groups' rates (0: "
                "equal); ratio: smallest rate divided by largest (100: equal). Parity: rates of "
                f"positive predictions{positive and ' '}{positive}; opportunity: true positive "
                f"rates; odds: true and false positive rates. {how_to_read(comparison)}",
                [_of_people(metric, place, metric.title) for metric in METRICS],
                groups,
            )
        for metric in DIFFERENCES:
            yield metric_table(
                f"{title}: {metric.phrase} in each domain, {comparison.span()}",
                f"{metric.phrase.capitalize()} times 100, on a domain's {comparison.examples} "
                f"examples. Lower is better. {how_to_read(comparison)}",
                [
                    _of_people(metric, place, domain)
                    for place, domain in enumerate(comparison.domains, start=2)
                ],
                groups,
            )


def _of_people(metric: GroupMetric, place: int, title: str) -> Column:
    return column(title, of_people(metric.name, place), metric.better, missing=UNDEFINED)


def participation_table(comparison: Comparison) -> Table:
    """Return a table with the fraction of rounds in which a domain's clients were merged.

    The table also has the domain's accuracy. It shows the methods for which some client was not
    merged in some round.
    """

    def share(place: int) -> Callable[[Run], float]:
        return lambda run: participation(run)[place]

    def accuracy(place: int) -> Callable[[Run], float]:
        return lambda run: float(run.final()[place])

    methods = [m for m in comparison.methods if all(map(participation, m.runs))]
    return metric_table(
        "Participation",
        "Percentage of rounds in which a client's model was merged (mean over the domain's "
        f"clients), and the domain's {comparison.examples} accuracy in % ({comparison.span()}).",
        [
            column(f"{domain}: {title}", of(place), 0)
            for place, domain in enumerate(comparison.domains)
            for title, of in (("rounds", share), ("accuracy", accuracy))
        ],
        group_comparable(comparison, methods) if methods else [],
    )


def participation(run: Run) -> list[float]:
    """Return how often clients of each domain were merged, as a mean fraction of rounds.

    The result is empty if every client was merged in every round, or if this is unknown.
    """
    if "remarks" in run.info:  # read from a summary
        return list(run.info.get("participation", ()))
    rounds = [record["client_ids"] for record in run.diagnostics if "client_ids" in record]
    if all(len(merged) == len(run.clients) for merged in rounds):
        return []
    shares = []
    for domain in run.domains:
        there = {client.client_id for client in run.clients if client.domain == domain}
        merged = sum(len(there.intersection(ids)) for ids in rounds)
        shares.append(merged / max(1, len(there) * len(rounds)))
    return shares


# --- differences between methods ------------------------------------------------------


def difference_tables(comparison: Comparison, contrasts: Contrasts) -> Iterator[Table]:
    """Yield the tables of differences from the baselines, and of other contrasts, by measure.

    The table of the baselines has no groups if no baseline ran.
    """
    for measure, against in zip(contrasts.measures, contrasts.against_baselines, strict=True):
        if not measure.metrics:  # all are undefined, as with one group of people
            continue
        names = [name for name in TITLES.values() if any(name in row for row in against.values())]
        kind = "" if measure.metrics[0].title == "MIN" else f", {measure.name}"
        yield Table(
            title=f"Difference from the baselines{kind}, {comparison.span()}",
            caption=_difference_caption(measure),
            columns=[f"{metric.title} vs {name}" for name in names for metric in measure.metrics],
            groups=[
                Group(heading, [_difference_row(m, against[m], measure, names) for m in members])
                for heading, members in group_comparable(comparison, measure.methods)
                if names
            ],
        )
    for title, by_measure in contrasts.further.items():
        for measure, groups in zip(contrasts.measures, by_measure, strict=True):
            if measure.metrics:
                yield Table(
                    title=f"{title}, {measure.name}, {comparison.span()}",
                    caption=_difference_caption(measure),
                    columns=[metric.title for metric in measure.metrics],
                    groups=[
                        Group(
                            f"{group.heading} against {group.other}",
                            [
                                _difference_row(name, {group.other: c}, measure, [group.other])
                                for name, c in group.contrasts.items()
                            ],
                        )
                        for group in groups
                    ],
                )


def _difference_row(
    name: str, contrasts: Mapping[str, Contrast], measure: Measure, others: Sequence[str]
) -> Row:
    cells: list[Cell] = []
    for other in others:
        if other in contrasts:
            cells += [_difference_cell(one) for one in contrasts[other].by_metric]
        else:
            cells += [Cell(DASH)] * len(measure.metrics)
    paired = pairs_text(contrasts.values()) if contrasts else "nothing to compare with"
    return Row(name, paired, cells)


def _difference_cell(one: MetricDifference) -> Cell:
    """Return a cell with the mean and, below it, the interval and the detectable difference."""
    metric, difference, sign = one
    cell = judged_cell(difference, sign, signed=True)
    if math.isnan(difference.low):
        return cell
    parts = [format_interval(difference.low, difference.high, metric.largest)]
    if least := difference.detectable:
        parts.append(within_range(least, format_number(least), metric.largest))
    return replace(cell, spread="; ".join(dict.fromkeys(parts)))


def _difference_caption(measure: Measure) -> str:
    std = " STD: ddof 1." if any(f.title.split()[0] == "STD" for f in measure.metrics) else ""
    less = " Lower is better." if all(f.better < 0 for f in measure.metrics) else ""
    return (
        "In points: mean over pairs, [95 % interval]; difference detectable with 80 % power. ▲ "
        f"better, ▼ worse: p < 0.05 (corrected), with at least {MIN_PAIRS} pairs.{less}{std}"
    )


# --- leave one domain out ------------------------------------------------------------

#: Config keys in which the runs of a row differ.
_OWN = ("data.held-out", "data.domains")

_Runs = Mapping[str, Method]


def held_out_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """Return a table with a column per held-out domain, their mean and their minimum, in percent.

    A row combines runs of a method that differ only in the held-out domain. The result is empty for
    fewer than two held-out domains. If runs were tested with AdaBN, a second table shows these
    tests.
    """
    rows: dict[Any, dict[str, Method]] = {}  # a method's settings and reach -> its runs by domain
    for comparison in comparisons:
        for method in comparison.methods:
            domain = method.runs[0].held_out_domain
            if domain and all(run.held_out.rounds.size for run in method.runs):
                key = _without_own(method.identity), method.runs[0].reach
                rows.setdefault(key, {})[domain] = method
    domains = list(dict.fromkeys(domain for by_domain in rows.values() for domain in by_domain))
    if len(domains) < 2:
        return []
    groups: dict[Any, dict[str, _Runs]] = {}
    for by_domain in rows.values():
        first = next(iter(by_domain.values()))
        setting = _without_own(first.setting), first.runs[0].reach
        groups.setdefault(setting, {})[first.name] = by_domain
    tables = [_held_out_table(domains, groups)]
    with_adabn = {
        setting: {
            name: found
            for name, found in rows.items()
            if all(run.adapted.rounds.size for held in found.values() for run in held.runs)
        }
        for setting, rows in groups.items()
    }
    with_adabn = {setting: rows for setting, rows in with_adabn.items() if rows}
    return [*tables, *([_held_out_table(domains, with_adabn, True)] if with_adabn else [])]


def _held_out_table(
    domains: Sequence[str], groups: Mapping[Any, Mapping[str, _Runs]], adapted: bool = False
) -> Table:
    def accuracy(run: Run) -> float:
        return ACCURACY.shown(run.held_out_accuracy(run.held_out_domain, adapted=adapted))

    runs = {id(next(iter(r.values()))): r for rows in groups.values() for r in rows.values()}

    def on(domain: str) -> Callable[[Method], MeanStd]:
        def estimate(method: Method) -> MeanStd:
            held = runs[id(method)].get(domain)
            return MeanStd(math.nan, math.nan, 0) if held is None else held.over_seeds(accuracy)

        return estimate

    def over(value_of: Callable[[list[float]], float]) -> Callable[[Method], MeanStd]:
        def estimate(method: Method) -> MeanStd:
            by_seed = [
                {run.replicate: accuracy(run) for run in runs[id(method)][domain].runs}
                for domain in domains
                if domain in runs[id(method)]
            ]
            seeds = [seed for seed in by_seed[0] if all(seed in found for found in by_seed)]
            if len(by_seed) < len(domains) or not seeds:
                return MeanStd(math.nan, math.nan, 0)
            return MeanStd.of([value_of([found[seed] for found in by_seed]) for seed in seeds])

        return estimate

    held = (run for found in runs.values() for method in found.values() for run in method.runs)
    span = mean_of_last(len(run.held_out.final_rounds()) for run in held)
    tested = (
        f"Test accuracy in %, {span}, of the global model with BatchNorm statistics that are "
        "estimated from the domain's unlabeled test examples."
        if adapted
        else f"Test accuracy of the global model in %, {span}."
    )
    return metric_table(
        f"Leave one domain out{', with AdaBN' * adapted}: accuracy on the held-out domain",
        f"{tested} Each column shows runs without clients of this domain. Mean "
        "and minimum over the held-out domains are computed per seed. Bold: best comparable method,"
        " after rounding.",
        [
            *(Column(domain, estimate=on(domain)) for domain in domains),
            Column("mean", estimate=over(lambda values: sum(values) / len(values))),
            Column("minimum", estimate=over(min)),
        ],
        _headed(groups),
    )


def _headed(groups: Mapping[Any, Mapping[str, _Runs]]) -> Iterable[tuple[str, dict[str, Method]]]:
    """Yield each group's heading (empty for a single group) and the first method of each row."""
    apart = differing([dict(setting) for setting, _ in groups])
    for place, ((_, reach), rows) in enumerate(groups.items()):
        parts = [f"{key} = {values[place]}" for key, values in apart.items()]
        heading = ", ".join([*parts, f"round {reach}"]) if len(groups) > 1 else ""
        yield heading, {name: next(iter(by_domain.values())) for name, by_domain in rows.items()}


def _without_own(settings: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in settings if item[0] not in _OWN)
