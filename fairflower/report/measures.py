"""Metrics by which methods are compared, each with the direction that is better and a margin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import DIFFERENCES
from fairflower.numerics.metrics import (
    AVG,
    GAP,
    STD,
    STD0,
    Summary,
    average_and_worst,
)
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.report.methods import Comparison, Method, methods_with_clusters
from fairflower.report.reading import SCORES, Run, user_score
from fairflower.statistics.differences import example_worth

SIGMA = "\N{GREEK SMALL LETTER SIGMA}"


@dataclass(frozen=True, kw_only=True)
class Metric(Score):
    """A score of a whole run, by which methods are compared; its name is that in sentences."""

    of: Callable[[Run], float]
    #: Whether the metric has an influence on verdicts.
    judged: bool = True
    #: Gradient with respect to the domains' accuracies, None if unknown.
    gradient: Callable[[Vector], Vector] | None = None

    def value(self, run: Run) -> float:
        """Return the metric of a run, in its unit."""
        return self.shown(self.of(run))

    def example_worth(self, run: Run) -> float:
        """Return the metric's `example_worth`, in points; 0 if it is unknown."""
        sizes = np.array(run.sizes, dtype=np.float64)
        accuracy = run.final()
        if self.gradient is None or sizes.shape != accuracy.shape or not (sizes > 0).all():
            return 0.0
        return example_worth(self.shown(self.gradient(accuracy)), sizes)


@dataclass(frozen=True)
class Measure:
    """Metrics that are judged together."""

    name: str  # for example "accuracy over domains"
    metrics: tuple[Metric, ...]
    #: Adjectives for a better and for a worse method.
    words: tuple[str, str]
    methods: tuple[Method, ...]  # those that have these metrics

    def __getitem__(self, title: str) -> Metric:
        """Return the metric with this title."""
        return next(metric for metric in self.metrics if metric.title == title)


def measures(comparison: Comparison) -> list[Measure]:
    """Return a comparison's measures: fairness over domains, then measures that runs recorded."""
    groups = [fairness(comparison)]
    rated = rated_methods(comparison)
    for score in SCORES.values():
        scored = [m for m in rated if all(score.name in run.scores for run in m.runs)]
        if scored:
            groups.append(_scored(comparison, score, scored))
    groups += [
        _over_domains(user_score(name, better), methods)
        for name, better, methods in by_user_metric(comparison)
    ]
    for attribute, with_groups in by_attribute(comparison):
        named = f"fairness between groups by {attribute}"
        groups.append(_between_groups(named, 0, "", 1.0, with_groups))
        groups.append(
            _between_groups(f"{named}, worst client", 1, "worst client's ", 2.0, with_groups)
        )
    typed = typed_methods(comparison)
    return [*groups, _over_clients(typed)] if typed else groups


def fairness(comparison: Comparison) -> Measure:
    """Return the fairness measure: worst domain, STD and the average, which is not judged."""
    return _over_domains(ACCURACY, comparison.methods)


def _over_domains(score: Score, methods: Sequence[Method]) -> Measure:
    """Return the measure for a score over domains: worst value, STD and average."""

    def over(row: Summary) -> Callable[[Run], float]:
        def value(run: Run) -> float:
            tests = run.tests_by(score.name)
            return row(tests.final()) if tests.fully_tested() else math.nan

        return value

    average, worst = average_and_worst(score.better)
    ours = score is ACCURACY  # a mean over examples
    metrics = [
        Metric(
            row.phrase if ours else f"{row.phrase} of {score.phrase}",
            row.better,
            score.unit,
            score.low,
            score.high,
            row.margin * score.margin,
            title=row.title if ours else f"{row.title} {score.title}",
            of=over(row),
            judged=row is not average,
            gradient=row.gradient if ours else None,
        )
        for row in (worst, STD, average)
    ]
    words = ("fairer", "less fair")
    return Measure(f"{score.phrase} over domains", tuple(metrics), words, tuple(methods))


def by_user_metric(comparison: Comparison) -> Iterator[tuple[str, int, list[Method]]]:
    """Yield each user metric: its name, 1 or -1 (higher or lower is better), and its methods."""
    metrics = {
        name: better for run in comparison.kept_runs for name, better in run.user_metrics.items()
    }
    for name, better in metrics.items():
        methods = [m for m in comparison.methods if all(name in r.user_metrics for r in m.runs)]
        if methods:
            yield name, better, methods


def by_attribute(comparison: Comparison) -> Iterator[tuple[str, list[Method]]]:
    """Yield each sensitive attribute, and the methods that have its metrics of group fairness."""
    names = {run.attribute: None for m in comparison.methods for run in m.runs if run.attribute}
    for name in names:
        yield name, [m for m in comparison.methods if all(r.attribute == name for r in m.runs)]


def of_people(metric: str, place: int) -> Callable[[Run], float]:
    """Return a function that computes a run's metric of group fairness.

    ``place`` is 0 for all people, 1 for the worst client, and 2 or more for the domains. The value
    is the mean over the last tested rounds, or NaN if it is undefined.
    """
    return lambda run: float(run.group_metrics[metric].final()[place])


def _between_groups(
    name: str, place: int, words: str, margin: float, methods: list[Method]
) -> Measure:
    """Return the measure of differences between groups at a ``place``, if they are defined."""
    metrics = [
        Metric(
            *(f"{words}{score.phrase}", score.better),
            title=score.title,
            margin=margin,
            of=of_people(score.name, place),
        )
        for score in DIFFERENCES
        if all(
            np.isfinite(of_people(score.name, place)(run))
            for method in methods
            for run in method.runs
        )
    ]
    return Measure(name, tuple(metrics), ("fairer", "less fair"), tuple(methods if metrics else ()))


def rated_methods(comparison: Comparison) -> list[Method]:
    """Return the methods for FedISM's tables, whose runs are all `rated`."""
    return [method for method in comparison.methods if all(map(rated, method.runs))]


def rated(run: Run) -> bool:
    """Return whether a run has an AUC, or class-balanced accuracies and corrupted images."""
    corrupted = bool(run.config.get("data.corrupted-clients"))
    return "auc" in run.scores or (corrupted and "balanced_accuracy" in run.scores)


def typed_methods(comparison: Comparison) -> list[Method]:
    """Return the methods for FedGCR's table, whose domains have different numbers of clients.

    If a method recorded clusters, equal numbers above 1 are also accepted.
    """
    wanted = bool(methods_with_clusters(comparison.methods))

    def several(method: Method) -> bool:
        counts = set(Counter(client.domain for client in method.runs[0].clients).values())
        corrupted = method.config.get("data.corrupted-clients")
        return (len(counts) > 1 or (wanted and max(counts) > 1)) and not corrupted

    return [method for method in comparison.methods if several(method)]


def of_clients(methods: Sequence[Method]) -> Callable[[Run], Vector]:
    """Return a function that returns the accuracy of each client of a run, [K].

    It is the accuracy on the client's test data if all clients in all runs of the methods tested,
    else that of its domain, without clients of an untested domain.
    """
    if all(all_clients_tested(run) for method in methods for run in method.runs):
        return lambda run: run.by_client.final()

    def of_domains(run: Run) -> Vector:
        values = run.final()[[run.domains.index(client.domain) for client in run.clients]]
        return values[np.isfinite(values)]

    return of_domains


def all_clients_tested(run: Run) -> bool:
    """Return whether each client tested the model in some of the last rounds."""
    return bool(np.isfinite(run.by_client.final()).all())


def summarized(row: Summary, domains: Sequence[str]) -> Callable[[Vector], float]:
    """Return a function that computes a summary of fractions, in the summary's unit.

    The function returns NaN if the summary compares domains but only one domain was tested.
    """

    def value(values: Vector) -> float:
        single = row.compares and len(values) < 2 <= len(domains)
        return math.nan if single else row.shown(row(values))

    return value


def _scored(comparison: Comparison, score: Score, methods: list[Method]) -> Measure:
    """Return the measure for a score: the mean over the last rounds by group, average and gap."""

    def over(value_of: Callable[[Vector], float]) -> Callable[[Run], float]:
        def value(run: Run) -> float:
            scores = run.final_scores(score.name).mean(axis=0)
            return float(value_of(scores)) if np.isfinite(scores).all() else math.nan

        return value

    metrics = [
        Metric(
            f"{group} {score.title}", score.better, margin=2 * score.margin, of=over(itemgetter(d))
        )
        for d, group in enumerate(comparison.domains)
    ]
    if len(metrics) > 1:
        metrics += [
            Metric(f"{AVG.phrase} {score.title}", AVG.better, of=over(AVG)),
            Metric(f"{score.title} gap", GAP.better, margin=GAP.margin, of=over(GAP)),
        ]
    return Measure(score.phrase, tuple(metrics), ("better", "worse"), tuple(methods))


def _over_clients(methods: list[Method]) -> Measure:
    """Return FedGCR's measure: the average over clients, and the spread over types and clients."""
    clients = of_clients(methods)
    return Measure(
        "client types and clients",
        (
            Metric(
                "average over clients", title="Avg over clients", of=lambda run: AVG(clients(run))
            ),
            Metric(f"{SIGMA} type", STD0.better, of=lambda run: STD0(run.final())),
            Metric(f"{SIGMA} client", STD0.better, of=lambda run: STD0(clients(run))),
        ),
        ("better", "worse"),
        tuple(methods),
    )
