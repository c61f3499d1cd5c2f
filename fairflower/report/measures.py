"""Metrics by which methods are compared, each with the direction that is better and a margin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np

from fairflower.numerics import Vector
from fairflower.numerics.group_fairness import DIFFERENCES
from fairflower.numerics.metrics import AVG, GAP, STD, STD0, Summary, average_and_worst
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.report.methods import Comparison, Method
from fairflower.report.reading import SCORES, Run
from fairflower.statistics import example_worth

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
    metrics: Sequence[Metric]
    methods: Sequence[Method]  # those that have these metrics
    #: Adjectives for a better and for a worse method.
    words: tuple[str, str] = ("fairer", "less fair")

    def __getitem__(self, title: str) -> Metric:
        """Return the metric with this title."""
        return next(metric for metric in self.metrics if metric.title == title)


def measures(comparison: Comparison) -> list[Measure]:
    """Return a comparison's measures: fairness over domains, then measures that runs recorded."""
    found = [fairness(comparison)]
    rated = comparison.rated()
    for score in SCORES.values():
        if scored := [m for m in rated if all(score.name in run.scores for run in m.runs)]:
            found.append(_by_domain(comparison, score, scored))
    found += [_over_domains(comparison, *of_user) for of_user in comparison.user_scores()]
    for attribute, methods in comparison.attributes():
        found += [_between_groups(attribute, methods, place) for place in (0, 1)]
    typed = comparison.typed()
    return [*found, _over_clients(typed)] if typed else found


def fairness(comparison: Comparison) -> Measure:
    """Return the fairness measure: worst domain, STD and the average, which is not judged."""
    return _over_domains(comparison, comparison.score, comparison.methods)


def _over_domains(comparison: Comparison, score: Score, methods: Sequence[Method]) -> Measure:
    """Return the measure for a score over domains: worst value, STD and average."""

    def value(run: Run, row: Summary) -> float:
        tests = run.tests_by(score.name)
        return row(tests.final()) if tests.fully_tested() else math.nan

    average, worst = average_and_worst(score.better)
    primary = score is comparison.score
    metrics = [
        Metric(
            row.phrase if primary else f"{row.phrase} of {score.phrase}",
            row.better,
            score.unit,
            score.low,
            score.high,
            row.margin * score.margin,
            title=row.title if primary else f"{row.title} {score.title}",
            of=partial(value, row=row),
            judged=row is not average,
            gradient=row.gradient if score is ACCURACY else None,  # a mean over examples
        )
        for row in (worst, STD, average)
    ]
    return Measure(f"{score.phrase} over domains", metrics, methods)


def _by_domain(comparison: Comparison, score: Score, methods: Sequence[Method]) -> Measure:
    """Return the measure for a score: the mean over the last rounds by domain, average and gap."""

    def value(run: Run, of: Callable[[Vector], float]) -> float:
        scores = run.final_scores(score.name).mean(axis=0)
        return float(of(scores)) if np.isfinite(scores).all() else math.nan

    rows: list[tuple[str, int, float, Callable[[Vector], float]]] = [
        (f"{domain} {score.title}", score.better, 2 * score.margin, itemgetter(d))
        for d, domain in enumerate(comparison.domains)
    ]
    if len(rows) > 1:
        rows += [
            (f"{AVG.phrase} {score.title}", AVG.better, score.margin, AVG),
            (f"{score.title} gap", GAP.better, GAP.margin, GAP),
        ]
    metrics = [
        Metric(name, better, margin=margin, of=partial(value, of=of))
        for name, better, margin, of in rows
    ]
    return Measure(score.phrase, metrics, methods, ("better", "worse"))


def _between_groups(attribute: str, methods: Sequence[Method], place: int) -> Measure:
    """Return the measure of differences between groups at a ``place``, if they are defined."""
    where, whose = (", worst client", "worst client's ") if place else ("", "")
    metrics = [
        Metric(
            f"{whose}{score.phrase}", score.better, title=score.title, margin=1.0 + place, of=value
        )
        for score in DIFFERENCES
        for value in [of_people(score.name, place)]
        if all(np.isfinite(value(run)) for method in methods for run in method.runs)
    ]
    name = f"fairness between groups by {attribute}{where}"
    return Measure(name, metrics, methods if metrics else ())


def _over_clients(methods: Sequence[Method]) -> Measure:
    """Return FedGCR's measure: the average over clients, and the spread over types and clients."""
    clients = of_clients(methods)
    metrics = (
        Metric("average over clients", title="Avg over clients", of=lambda run: AVG(clients(run))),
        Metric(f"{SIGMA} type", STD0.better, of=lambda run: STD0(run.final())),
        Metric(f"{SIGMA} client", STD0.better, of=lambda run: STD0(clients(run))),
    )
    return Measure("client types and clients", metrics, methods, ("better", "worse"))


def of_people(metric: str, place: int) -> Callable[[Run], float]:
    """Return a function that computes a run's metric of group fairness.

    ``place`` is 0 for all people, 1 for the worst client, and 2 or more for the domains. The value
    is the mean over the last tested rounds, or NaN if it is undefined.
    """
    return lambda run: float(run.group_metrics[metric].final()[place])


def of_clients(methods: Sequence[Method]) -> Callable[[Run], Vector]:
    """Return a function that returns the accuracy of each client of a run, [K].

    It is the accuracy on the client's test data if all clients in all runs of the methods tested,
    else that of its domain, without clients of an untested domain.
    """
    if all(run.all_clients_tested for method in methods for run in method.runs):
        return lambda run: run.by_client.final()

    def of_domains(run: Run) -> Vector:
        values = run.final()[[run.domains.index(client.domain) for client in run.clients]]
        return values[np.isfinite(values)]

    return of_domains


def summarized(row: Summary, domains: Sequence[str]) -> Callable[[Vector], float]:
    """Return a function that computes a summary of fractions, in the summary's unit.

    The function returns NaN if the summary compares domains but only one domain was tested.
    """

    def value(values: Vector) -> float:
        single = row.compares and len(values) < 2 <= len(domains)
        return math.nan if single else row.shown(row(values))

    return value
