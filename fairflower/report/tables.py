"""The tables of a report: the primary score per domain, fairness, clusters and all others."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np

from fairflower.config.text import grouped
from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import DIFFERENCES, METRICS
from fairflower.numerics.metrics import STD0, Summary, over_domains, summaries
from fairflower.numerics.scores import AUC, BALANCED_ACCURACY, Score
from fairflower.report.cells import (
    DASH,
    GUIDE,
    UNDEFINED,
    Cell,
    Column,
    Group,
    Row,
    Table,
    bold,
    capitalized,
    column,
    difference_cell,
    how_to_read,
    metric_table,
    remark,
)
from fairflower.report.contrasts import (
    FURTHER,
    SIGMA,
    Contrast,
    Contrasts,
    Measure,
    of_clients,
    of_people,
    over,
    pairs_text,
)
from fairflower.report.methods import (
    BASELINES,
    BEST_ROUND,
    Comparison,
    Method,
    client_strategy_grids,
    differing,
    legible,
    mean_of_last,
)
from fairflower.report.notes import machine_line, model_line, model_sizes, tests_line
from fairflower.report.reading import CLUSTER_SCORES, PERSONAL, Run
from fairflower.server.contents import scores_of
from fairflower.server.history import LEVELS, WINDOW
from fairflower.statistics import MIN_PAIRS, MeanStd


def score_tables(comparison: Comparison, contrasts: Sequence[Contrasts]) -> list[Table]:
    """Return tables of the primary score (last five tested rounds, last round), and others."""
    windows = [WINDOW]
    if any(m.runs[0].final_rounds() != m.runs[0].final_rounds(1) for m in comparison.methods):
        windows.append(1)
    first, *others = (score_table(comparison, window) for window in windows)
    further = (
        quality_table(comparison),
        *further_tables(comparison),
        labels_table(comparison),
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
    footers = [line for line in lines if line]
    return [replace(first, footers=footers), *others, *(t for t in further if t.groups)]


def score_table(comparison: Comparison, window: int) -> Table:
    """Return the primary score per domain, AVG, STD, worst and GAP, as papers show them."""
    score, held_out = comparison.score, ""
    _, worst, _, gaps = over_domains(score)
    if comparison.held_out:
        held_out = (
            f"Held out: {score.title} on a domain that no client has; it is not part of AVG, STD, "
            f"{worst.title} or GAP. "
        )
    if any(tested_adapted(comparison, domain) for domain in comparison.held_out):
        held_out += (
            "AdaBN: with BatchNorm statistics estimated from the domain's unlabeled test examples. "
        )
    return metric_table(
        f"{comparison.heading} per domain, {comparison.span(window)}",
        f"{comparison.examples.capitalize()} {score.stated}. {_spelled(comparison, score)}"
        f"{worst.title}: {worst.phrase}. GAP: {gaps.phrase}. "
        f"{held_out}{how_to_read(comparison)}",
        [*columns(comparison, window=window), *held_out_columns(comparison, window)],
        comparison.groups(comparison.methods),
        comparison.lacking,
    )


def _spelled(comparison: Comparison, score: Score) -> str:
    """Spell out the short name of a score, and say what it is if clients tested; may be empty."""
    told = score.phrase.lower() == score.title.lower()
    name = "" if told else f"{capitalized(score.title)}: {score.phrase}. "
    of_clients = (run.config.get("evaluate.by") == "clients" for run in comparison.kept_runs)
    if comparison.classes or not any(of_clients):
        return name
    return (
        f"{name}Clients tested, so a score that needs all of a domain's examples at once, as an "
        "AUC does, is the mean over its clients, weighted by examples. "
    )


def further_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield a table for each other score of a task; `quality_table` is that of classes."""
    for score, methods in comparison.methods_by_score(
        lambda run: () if comparison.classes else run.further
    ):
        shown = legible(score, [run for method in methods for run in method.runs])
        worst = over_domains(score).worst
        yield metric_table(
            f"{capitalized(score.title)} per domain, {comparison.span()}",
            f"{comparison.examples.capitalize()} {score.stated}. {_spelled(comparison, score)}"
            f"{worst.title}: {worst.phrase}. {how_to_read(comparison)}",
            columns(comparison, shown),
            comparison.groups(methods),
            comparison.lacking,
        )


def labels_table(comparison: Comparison) -> Table:
    """Return the scores of each label or class, if there are several, in the last round."""
    labels, groups, columns = comparison.kept_runs[0].info.get("labels", ()), [], list[Column]()

    def last(run: Run, name: str, d: int) -> float:
        level = LEVELS[run.split][0]
        return float(run.tests(level, name, run.domains, run.rounds[-1:]).values[0, d])

    for label in labels if len(labels) > 1 else ():
        columns = [
            column(f"{score.title} {domain}", partial(last, name=score.name, d=d), score)
            for d, domain in enumerate(comparison.domains)
            for score in scores_of(label)
        ]
        counts = [label["counts"].get(domain, {}) for domain in comparison.domains]
        texts = [" / ".join(map(str, of.values())) for of in counts]
        beside = [Cell("")] * (len(label["scores"]) - 1)
        cells = [cell for text in texts for cell in (Cell(text), *beside)]
        counted = [Row(" / ".join(counts[0]), "test examples", cells)] if any(texts) else []
        for group in metric_table("", "", columns, comparison.groups(comparison.methods)).groups:
            heading = ", ".join(filter(None, (label["name"], group.heading)))
            groups.append(Group(heading, [*counted, *group.rows]))
    scores = scores_of(labels[0]) if labels else ()
    return Table(
        f"{' and '.join(score.title for score in scores)} of each label, {comparison.span(1)}",
        f"{comparison.examples.capitalize()} {', '.join(score.stated for score in scores)}. "
        f"{DASH}: not defined by the examples. "
        f"{''.join(_spelled(comparison, score) for score in scores[:1])}{how_to_read(comparison)}",
        [column.title for column in columns],
        groups,
    )


def quality_table(comparison: Comparison) -> Table:
    """Return FedISM's Table 1: ACC and AUC on clean and corrupted images, in percent."""
    methods = comparison.rated()
    auc = all(AUC.name in run.scores for method in methods for run in method.runs)

    def of(score: Score, d: int) -> Callable[[Method], MeanStd]:
        def estimate(method: Method) -> MeanStd:
            rounds = [run.scores[score.name].values[run.last()] for run in method.runs]
            by_domain = score.shown(np.concatenate(rounds))
            values = np.column_stack([by_domain, by_domain.mean(axis=1)])[:, d]
            return MeanStd(float(values.mean()), float(values.std()), len(values))

        return estimate

    several = len(comparison.domains) > 1
    return metric_table(
        f"Class-balanced accuracy{' and AUC' * auc}, {comparison.span().removeprefix('mean of ')}",
        f"In %. ACC: class-balanced accuracy.{' AUC: one-vs-one.' * auc} ±: standard "
        f"deviation over rounds and {comparison.replicates} (ddof 0). {bold(comparison)}",
        [
            Column(f"{where} {score.title}", score, of(score, d))
            for d, where in enumerate([*comparison.domains, *several * ["average"]])
            for score in (BALANCED_ACCURACY, *auc * [AUC])
        ],
        comparison.groups(methods),
    )


def personal_spread_table(comparison: Comparison) -> Table:
    """Return the spread of personal models over a domain's clients, if it has several clients."""
    methods = comparison.having(lambda run: run.personal_by_client.rounds.size)

    def spread(run: Run, domain: str) -> float:
        values = run.personal_by_client.final()[[c.domain == domain for c in run.clients]]
        return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

    score = comparison.score
    clients = [Counter(client.domain for client in m.runs[0].clients) for m in methods]
    several = [d for d in comparison.domains if any(count[d] > 1 for count in clients)]
    return metric_table(
        f"Spread of personal models within a domain, {comparison.span()}",
        f"Standard deviation (ddof 1) of {score.title} over the clients of a domain"
        f"{score.points and f', in {score.points}'}. Each client tests its personal model on its "
        f"own {comparison.examples} data.",
        [
            column(domain, partial(spread, domain=domain), over_domains(score).spread)
            for domain in several
        ],
        comparison.groups(methods if several else ()),
    )


def personal_table(comparison: Comparison) -> Table:
    """Return the primary score of personal models, for methods that have them."""
    score = comparison.score
    return metric_table(
        f"{comparison.heading} of personal models, {comparison.span()}",
        f"{in_unit(score)}Each client tests its personal model on its own {comparison.examples} "
        f"data, so the {score.title} is not comparable with that of the global model.",
        columns(comparison, replace(score, name=PERSONAL + score.name)),
        comparison.groups(comparison.having(lambda run: run.personal.rounds.size)),
    )


def in_unit(score: Score) -> str:
    """Return the beginning of a caption: the unit of a score, as a sentence; empty for none."""
    return f"In {score.unit}. " if score.unit else ""


def user_tables(comparison: Comparison) -> list[Table]:
    """Return a table for each user metric, with the methods that have this metric."""
    return [
        metric_table(
            f"{score.name} per domain, {comparison.span()}",
            f"Your metric {score.name}, times 100; {'higher' if score.better > 0 else 'lower'} is "
            f"better. {worst.title}: {worst.phrase}. {how_to_read(comparison)}",
            columns(comparison, score),
            comparison.groups(methods),
        )
        for score, methods in comparison.methods_by_score(lambda run: run.user_scores)
        for worst in [over_domains(score).worst]
    ]


def product_table(comparison: Comparison) -> Table:
    """Return FedHEAL's Table 2: strategies grouped by local training."""
    largest = next(iter(client_strategy_grids(comparison)), {})
    return metric_table(
        f"Local training and aggregation, {comparison.span()}",
        f"The {comparison.score.title} table, grouped by local training. Bold: best strategy of a "
        "group.",
        columns(comparison),
        largest.items(),
    )


def columns(
    comparison: Comparison, score: Score | None = None, window: int = WINDOW
) -> list[Column]:
    """Return columns for each domain's score, AVG, STD, worst, GAP; by default of the primary."""
    by = score or comparison.score

    def values(run: Run) -> Vector:
        return run.tests_by(by.name).final(window)

    def whole(method: Method) -> bool:
        return all(run.tests_by(by.name).fully_tested(window) for run in method.runs)

    average, worst, spread, gaps = over_domains(by)
    return [
        *(
            column(domain, lambda run, d=d: float(values(run)[d]), by)  # type: ignore[misc]
            for d, domain in enumerate(comparison.domains)
        ),
        *(
            Column(row.heading, row, over(row, comparison, domains=values), whole)
            for row in (average, spread, _population(spread), worst, gaps)
        ),
    ]


def _population(spread: Summary) -> Summary:
    """Return the standard deviation of a population, in the unit of this of a sample."""
    return replace(spread, formula=STD0.formula, ddof=0)


def held_out_columns(comparison: Comparison, window: int = WINDOW) -> list[Column]:
    """Return columns with the primary score on each held-out domain, and with that of AdaBN."""
    return [
        column(
            f"{name} (held out{', AdaBN' * adapted})",
            partial(Run.held_out_score, domain=name, window=window, adapted=adapted),
            comparison.score,
        )
        for name in comparison.held_out
        for adapted in ((False, True) if tested_adapted(comparison, name) else (False,))
    ]


def tested_adapted(comparison: Comparison, domain: str) -> bool:
    """Return whether some run was tested on a held-out domain with AdaBN."""
    return any(
        run.held_out_domain == domain and run.adapted.rounds.size for run in comparison.kept_runs
    )


def fairness_tables(comparison: Comparison) -> list[Table]:
    """Return tables of all fairness metrics over domains and, if clients tested, over clients."""
    tables = (fairness_table(comparison, level) for level in ("domains", "clients"))
    return [table for table in tables if table.groups]


def fairness_table(comparison: Comparison, level: str) -> Table:
    """Return a table of all `summaries` over ``"domains"`` or ``"clients"`` that were tested."""

    def tested(run: Run) -> Vector:
        values = (run if level == "domains" else run.by_client).final()
        return values[np.isfinite(values)]

    def whole(method: Method) -> bool:
        if level == "domains":
            return method.fully_tested()
        return all(run.all_clients_tested for run in method.runs)

    clients = None if level == "domains" else tested
    methods = comparison.having(lambda run: tested(run).size)
    sizes = sorted({tested(run).size for m in methods for run in m.runs})
    highest = " or ".join(f"{math.log(size):.4f}" for size in sizes)
    score, rows = comparison.score, summaries(comparison.score)
    relative = (
        "Jain's index (1: all equal), Gini coefficient (0: all equal) and entropy "
        f"(ln K = {highest}: all equal). "
    )
    if score.like_accuracy:
        caption = f"In %, except {relative}"
    else:
        there = rows[-1].title == "entropy"
        caption = f"{capitalized(score.stated)}. {there * f'Without unit: {relative}'}"
    return metric_table(
        f"Fairness over {' or '.join(map(str, sizes))} {level}, {comparison.span()}",
        f"{caption}{how_to_read(comparison)}",
        [Column(row.heading, row, over(row, comparison, clients=clients), whole) for row in rows],
        comparison.groups(methods),
        comparison.lacking,
        f"{score.stated} over {level}",
    )


def types_table(comparison: Comparison) -> Table:
    """Return FedGCR's Table 1: average and spread over client types (domains) and over clients."""
    methods = comparison.typed()
    score = comparison.score
    rows = over_domains(score)
    average, spread = rows.average, _population(rows.spread)
    by_domain = (
        f"A client counts with its domain's {score.title}, because in some runs not all clients "
        "tested. "
        if len({run.all_clients_tested for method in methods for run in method.runs}) > 1
        else ""
    )
    clients = of_clients(methods)
    return metric_table(
        f"Client types and clients, {comparison.span()}",
        f"{in_unit(score)}{SIGMA} type and {SIGMA} client: standard deviations over domains and "
        f"over clients (ddof 0). {by_domain}{how_to_read(comparison)}",
        [
            Column(title, row, over(row, comparison, clients=values), Method.fully_tested)
            for title, row, values in (
                ("Avg over domains", average, None),
                ("Avg over clients", average, clients),
                (f"{SIGMA} type", spread, None),
                (f"{SIGMA} client", spread, clients),
            )
        ],
        comparison.groups(methods),
    )


def clusters_table(comparison: Comparison, window: int) -> Table:
    """Return FedGCR's Table 3, which compares clusters with domains, for methods with clusters."""
    return metric_table(
        f"Clusters, {comparison.span(window)}",
        "Clustering accuracy: % of clients whose domain is the most frequent in their cluster. "
        "Adjusted Rand "
        f"index: 1 is perfect, 0 is chance. {how_to_read(comparison)}",
        [
            column(score.title, partial(Run.final_clusters, name=name, window=window), score)
            for name, score in CLUSTER_SCORES.items()
        ],
        comparison.groups(comparison.having(lambda run: run.clusters)),
    )


def group_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield the tables of fairness between groups of people for each attribute, in percent."""
    examples, span = comparison.examples, comparison.span()
    for attribute, methods in comparison.attributes():
        title = f"Fairness between groups by {attribute}"
        groups = comparison.groups(methods)
        known = (run.info.get("classes") for method in methods for run in method.runs)
        positive = ", ".join(sorted({f"({classes[1]})" for classes in known if classes}))
        for place, who, words in (
            (0, "all people", "From the sums of counts over all clients"),
            (
                1,
                "worst client",
                f"The worst value of any client, computed on the client's own {examples} examples",
            ),
        ):
            yield metric_table(
                f"{title}, {who}, {span}",
                f"{words}, times 100. diff.: largest difference between two groups' rates (0: "
                "equal); ratio: smallest rate divided by largest (100: equal). Parity: rates of "
                f"positive predictions{positive and ' '}{positive}; opportunity: true positive "
                f"rates; odds: true and false positive rates. {how_to_read(comparison)}",
                [column(m.title, of_people(m.name, place), m, UNDEFINED) for m in METRICS],
                groups,
            )
        for metric in DIFFERENCES:
            yield metric_table(
                f"{title}: {metric.phrase} in each domain, {span}",
                f"{metric.phrase.capitalize()} times 100, on a domain's {examples} "
                f"examples. Lower is better. {how_to_read(comparison)}",
                [
                    column(domain, of_people(metric.name, place), metric, UNDEFINED)
                    for place, domain in enumerate(comparison.domains, start=2)
                ],
                groups,
            )


def participation_table(comparison: Comparison) -> Table:
    """Return `participation` and the primary score, of methods that did not merge all clients."""
    rounds = Score("rounds", 0)
    shown = replace(comparison.score, better=0)  # and not compared
    return metric_table(
        "Participation",
        "Percentage of rounds in which a client's model was merged (mean over the domain's "
        f"clients), and the domain's {comparison.examples} {comparison.score.stated} "
        f"({comparison.span()}).",
        [
            column(f"{domain}: {score.title}", lambda run, d=d, of=of: float(of(run)[d]), score)  # type: ignore[misc]
            for d, domain in enumerate(comparison.domains)
            for score, of in ((rounds, participation), (shown, Run.final))
        ],
        comparison.groups(comparison.having(participation)),
    )


def participation(run: Run) -> list[float]:
    """Return in which fraction of rounds a domain's clients were merged; empty if 1 or unknown."""
    if run.summarized:
        return list(run.info.get("participation", ()))
    if run.config.get("strategy.name") == "pooled":  # one client trains on all examples
        return []
    rounds = [record["client_ids"] for record in run.diagnostics if "client_ids" in record]
    if all(len(merged) == len(run.clients) for merged in rounds):
        return []
    shares = []
    for domain in run.domains:
        there = {client.client_id for client in run.clients if client.domain == domain}
        merged = sum(len(there.intersection(ids)) for ids in rounds)
        shares.append(merged / max(1, len(there) * len(rounds)))
    return shares


def model_table(comparison: Comparison) -> Table:
    """Return a table with the size of each method's model; no groups if all sizes are equal."""
    sizes = model_sizes(comparison)
    members = comparison.methods if len(set(sizes.values())) > 1 else ()
    groups = [
        Group(heading, [Row(n, remark(m), [Cell(s or DASH) for s in sizes[n]]) for n, m in methods])
        for heading, methods in ((h, ms.items()) for h, ms in comparison.groups(members))
    ]
    caption = "Size of the model in bytes; it is sent in each direction, per client and round."
    return Table("Model", caption, ["bytes", "trained parameters"], groups)


# --- differences between methods ------------------------------------------------------


def difference_tables(comparison: Comparison, contrasts: Sequence[Contrasts]) -> Iterator[Table]:
    """Yield the tables of differences from the baselines, and of other contrasts, by measure."""
    for one in contrasts:
        against = one.against_baselines
        names = [
            name for name in BASELINES.values() if any(name in row for row in against.values())
        ]
        judged = [method for method in one.measure.methods if not method.reference]
        kind = "" if one is contrasts[0] else f", {one.measure.name}"
        yield difference_table(
            f"Difference from the baselines{kind}, {comparison.span()}",
            one.measure,
            [f" vs {name}" for name in names],
            [
                (heading, {n: [against[n].get(name) for name in names] for n in members})
                for heading, members in comparison.groups(judged if names else ())
            ],
        )
    for title in FURTHER:
        for one in contrasts:
            yield difference_table(
                f"{title}, {one.measure.name}, {comparison.span()}",
                one.measure,
                [""],
                [
                    (
                        f"{group.heading} against {group.other}",
                        {name: [contrast] for name, contrast in group.contrasts.items()},
                    )
                    for group in one.further[title]
                ],
            )


def difference_table(
    title: str,
    measure: Measure,
    others: Sequence[str],
    groups: Iterable[tuple[str, Mapping[str, Sequence[Contrast | None]]]],
) -> Table:
    """Return a table with the contrasts of each method, in the order of ``others``, by heading."""

    def row(name: str, contrasts: Sequence[Contrast | None]) -> Row:
        cells: list[Cell] = []
        for one in contrasts:
            cells += starmap(difference_cell, one.by_metric) if one else [Cell(DASH)] * len(metrics)
        there = [one for one in contrasts if one]
        return Row(name, pairs_text(there) if there else "nothing to compare with", cells)

    metrics = measure.metrics
    points = f"in {metrics[0].points}: " if metrics[0].points else ""
    std = " STD: ddof 1." if any(f.title.split()[0] == "STD" for f in metrics) else ""
    less = " Lower is better." if all(f.better < 0 for f in metrics) else ""
    found = [Group(heading, [*starmap(row, rows.items())]) for heading, rows in groups]
    judged = any(cell.spread for group in found for each in group.rows for cell in each.cells)
    explained = (
        ", [95 % interval]; difference detectable with 80 % power. ▲ better, ▼ worse: p < 0.05 "
        f"(corrected), with at least {MIN_PAIRS} pairs"
    ) * judged
    return Table(
        title,
        f"{capitalized(f'{points}mean over pairs')}{explained}.{less}{std}",
        [f"{metric.title}{other}" for other in others for metric in metrics],
        found,
        of=measure.name,
    )


# --- leave one domain out ------------------------------------------------------------


def _without_domain(settings: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    return frozenset(i for i in settings if i[0] not in ("data.held-out", "data.domains"))


def held_out_tables(comparisons: Iterable[Comparison]) -> Iterator[Table]:
    """Yield a table with a column per held-out domain, their mean and their worst, by score.

    A row combines runs of a method that differ only in the held-out domain. There is no table of
    fewer than two held-out domains. If runs were tested with AdaBN, a second table shows these
    tests.
    """
    for alike in grouped((one.score.stated, one) for one in comparisons).values():
        rows: dict[Any, dict[str, Method]] = {}  # a method's settings and reach -> runs by domain
        score = max((comparison.score for comparison in alike), key=lambda score: score.digits)
        for method in (method for comparison in alike for method in comparison.methods):
            domain = method.runs[0].held_out_domain
            if domain and all(run.held_out.rounds.size for run in method.runs):
                key = _without_domain(method.identity), method.runs[0].reach
                rows.setdefault(key, {})[domain] = method
        domains = list(dict.fromkeys(domain for row in rows.values() for domain in row))
        if len(domains) < 2:
            continue
        yield _held_out_table(score, domains, [*rows.values()])
        adapted = [
            row
            for row in rows.values()
            if all(run.adapted.rounds.size for method in row.values() for run in method.runs)
        ]
        if adapted:
            yield _held_out_table(score, domains, adapted, adapted=True)


def _held_out_table(
    score: Score,
    domains: Sequence[str],
    rows: Sequence[Mapping[str, Method]],
    adapted: bool = False,
) -> Table:
    """Return the table of ``rows``, which are a method's runs by held-out domain."""
    row_of: dict[int, Mapping[str, Method]] = {}  # by the id of its first method
    groups: dict[Any, dict[str, Method]] = {}
    for row in rows:
        first = next(iter(row.values()))
        row_of[id(first)] = row
        setting = _without_domain(first.setting), first.runs[0].reach
        groups.setdefault(setting, {})[first.name] = first
    apart = differing([dict(setting) for setting, _ in groups])
    headings = [
        ", ".join([*(f"{key} = {values[i]}" for key, values in apart.items()), f"round {reach}"])
        for i, (_, reach) in enumerate(groups)
    ]

    def across(
        title: str, names: Sequence[str], value_of: Callable[[list[float]], float] = min
    ) -> Column:
        def estimate(method: Method) -> MeanStd:
            row = row_of[id(method)]
            scores = [
                {run.replicate: score.shown(tested(run)) for run in row[name].runs}
                if name in row
                else {}
                for name in names
            ]
            seeds = [seed for seed in scores[0] if all(seed in found for found in scores)]
            values = [value_of([found[seed] for found in scores]) for seed in seeds]
            return MeanStd.of(values) if values else MeanStd(math.nan, math.nan, 0)

        return Column(title, score, estimate)

    def tested(run: Run) -> float:
        return run.held_out_score(run.held_out_domain, adapted=adapted)

    held = [run for row in rows for method in row.values() for run in method.runs]
    span = mean_of_last(len(run.held_out.final_rounds()) for run in held)
    span = BEST_ROUND if any(run.chosen for run in held) else span
    worst = "minimum" if score.better > 0 else "maximum"
    of_model = score.stated.replace(score.title, f"{score.title} of the global model", 1)
    what = (
        f"Test {score.stated}, {span}, of the global model with BatchNorm statistics that are "
        "estimated from the domain's unlabeled test examples."
        if adapted
        else f"Test {of_model}, {span}."
    )
    own = any(method.reference == "alone" for row in rows for method in row.values())
    what += " Alone: mean over the clients' own models." * own
    return metric_table(
        f"Leave one domain out{', with AdaBN' * adapted}: {score.title} on the held-out domain",
        f"{what} Each column shows runs without clients of this domain. Mean "
        f"and {worst} over the held-out domains are computed per seed. Bold: best comparable "
        "method, after rounding.",
        [
            *(across(domain, [domain]) for domain in domains),
            across("mean", domains, lambda values: sum(values) / len(values)),
            across(worst, domains, min if score.better > 0 else max),
        ],
        zip(headings if len(groups) > 1 else [""], groups.values(), strict=True),
    )
