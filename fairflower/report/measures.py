"""What methods are compared by: figures that every run has, of which more or less is better."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from fairflower.numerics.metrics import (
    AVG,
    GAP,
    MIN,
    STD,
    STD0,
    Summary,
    Vector,
    average_and_worst,
)
from fairflower.report.clusters import methods_with_clusters
from fairflower.report.methods import Comparison, Method
from fairflower.report.reading import SCORES, Run

SIGMA = "\N{GREEK SMALL LETTER SIGMA}"


@dataclass(frozen=True)
class Figure:
    """One figure of a run, in percent.

    ``better`` is 1 if more is, -1 if less is; ``said`` is its name in sentences, by default
    ``title``, that in tables. One that is not ``judged`` decides nothing. Two methods are
    equivalent whose difference is smaller than the ``margin``, in points. ``gradient`` is that of
    the figure by the accuracies of the domains, where it is known.
    """

    title: str
    value: Callable[[Run], float]
    better: int
    said: str = ""
    judged: bool = True
    margin: float = 1.0
    gradient: Callable[[Vector], Vector] | None = None

    @property
    def name(self) -> str:
        """Its name in sentences."""
        return self.said or self.title

    def sampling(self, run: Run) -> tuple[float, float]:
        """What one test example is worth, and the variance that drawing them gives; 0 if unknown.

        The variance is binomial in every domain, at an accuracy of one right and one wrong
        example more than there are. In percent, and its square.
        """
        sizes = np.array(run.info.get("test_sizes") or (), dtype=np.float64)
        accuracy = run.final()
        if self.gradient is None or sizes.shape != accuracy.shape or not (sizes > 0).all():
            return 0.0, 0.0
        slopes = np.abs(100 * self.gradient(accuracy))
        chance = (sizes * accuracy + 1) / (sizes + 2)
        variance = slopes**2 * chance * (1 - chance) / sizes
        return float((slopes / sizes).max()), float(variance.sum())


@dataclass(frozen=True)
class Measure:
    """Figures that are judged together."""

    name: str  # what they are of
    figures: tuple[Figure, ...]
    #: What a method is that is better by them than another, and what if it is worse.
    words: tuple[str, str]
    of: tuple[Method, ...]  # that have them

    def __getitem__(self, title: str) -> Figure:
        """The figure of this title."""
        return next(figure for figure in self.figures if figure.title == title)


def measures(comparison: Comparison) -> list[Measure]:
    """Fairness over domains, and what else the tables show of several methods."""
    groups = [fairness(comparison)]
    rated = rated_methods(comparison)
    for score in SCORES:
        of = [m for m in rated if all(score in run.scores for run in m.runs)]
        if of:
            groups.append(_scored(comparison, score, of))
    groups += [_by_user(*metric) for metric in by_user_metric(comparison)]
    typed = typed_methods(comparison)
    return [*groups, _over_clients(typed)] if typed else groups


def fairness(comparison: Comparison) -> Measure:
    """Worst domain and STD, by which methods are fairer, and the average beside them."""
    return Measure(
        "accuracy over domains",
        (
            _over_domains(MIN, margin=2.0),
            _over_domains(STD),
            _over_domains(AVG, judged=False),
        ),
        ("fairer", "less fair"),
        comparison.methods,
    )


def _over_domains(row: Summary, judged: bool = True, margin: float = 1.0) -> Figure:
    def value(run: Run) -> float:
        return 100 * row(run.final())

    return Figure(row.title, value, row.better, row.phrase, judged, margin, row.gradient)


def by_user_metric(comparison: Comparison) -> Iterator[tuple[str, int, list[Method]]]:
    """The users' metrics: name, 1 if more is better or -1 if less is, methods that have it."""
    metrics = {
        name: better
        for method in comparison.methods
        for run in method.runs
        for name, better in run.user_metrics.items()
    }
    for name, better in metrics.items():
        of = [m for m in comparison.methods if all(name in run.user_metrics for run in m.runs)]
        if of:
            yield name, better, of


def _by_user(metric: str, better: int, of: list[Method]) -> Measure:
    """A user's metric over domains, as `fairness` has accuracy."""

    def over(row: Summary) -> Callable[[Run], float]:
        def value(run: Run) -> float:
            tests = run.tests_by(metric)
            return 100 * row(tests.final()) if tests.fully_tested() else math.nan

        return value

    average, worst = average_and_worst(better)
    rows = {worst: 2.0, STD: 1.0, average: 1.0}
    figures = [
        Figure(
            *(f"{row.title} {metric}", over(row), row.better, f"{row.phrase} of {metric}"),
            judged=row is not average,
            margin=margin,
        )
        for row, margin in rows.items()
    ]
    return Measure(f"{metric} over domains", tuple(figures), ("fairer", "less fair"), tuple(of))


def rated_methods(comparison: Comparison) -> list[Method]:
    """Those of FedISM's tables."""
    return [method for method in comparison.methods if all(map(rated, method.runs))]


def rated(run: Run) -> bool:
    """Whether it has an AUC, or class-balanced accuracies and corrupted images."""
    corrupted = bool(run.config.get("data.corrupted-clients"))
    return "auc" in run.scores or (corrupted and "balanced_accuracy" in run.scores)


def typed_methods(comparison: Comparison) -> list[Method]:
    """Those of FedGCR's Table 1: domains count for unequally many clients.

    Or for equally many, but several, where a method found clusters.
    """
    wanted = bool(methods_with_clusters(comparison.methods))

    def several(method: Method) -> bool:
        counts = set(Counter(client.domain for client in method.runs[0].clients).values())
        corrupted = method.config.get("data.corrupted-clients")
        return (len(counts) > 1 or (wanted and max(counts) > 1)) and not corrupted

    return [method for method in comparison.methods if several(method)]


def of_clients(run: Run) -> Vector:
    """Accuracy per client [K]: on its own test data if all clients tested, else its domain's."""
    own = run.by_client.final()
    theirs = run.final()[[run.domains.index(client.domain) for client in run.clients]]
    return own if np.isfinite(own).all() else theirs[np.isfinite(theirs)]


def summarized(row: Summary, domains: Sequence[str]) -> Callable[[Vector], float]:
    """Return the function that computes a summary of fractions, in percent if it has a unit.

    It gives NaN where the summary compares domains, and a single one of several was tested.
    """
    unit = 1 if row.relative else 100

    def value(values: Vector) -> float:
        single = row.compares and len(values) < 2 <= len(domains)
        return math.nan if single else unit * row(values)

    return value


def _scored(comparison: Comparison, score: str, of: list[Method]) -> Measure:
    """One of the scores in every group, and over the groups: the mean over the last rounds."""
    title, name = SCORES[score]

    def over(figure: Callable[[Vector], float]) -> Callable[[Run], float]:
        def value(run: Run) -> float:
            scores = run.final_scores(score).mean(axis=0)
            return 100 * float(figure(scores)) if np.isfinite(scores).all() else math.nan

        return value

    figures = [
        Figure(f"{group} {title}", over(itemgetter(d)), 1, margin=2.0)
        for d, group in enumerate(comparison.domains)
    ]
    if len(figures) > 1:
        figures += [
            Figure(f"{AVG.phrase} {title}", over(AVG), AVG.better),
            Figure(f"{title} gap", over(GAP), GAP.better, margin=2.0),
        ]
    return Measure(name, tuple(figures), ("better", "worse"), tuple(of))


def _over_clients(of: list[Method]) -> Measure:
    """FedGCR's figures over client types and over clients."""
    return Measure(
        "client types and clients",
        (
            Figure(
                *("Avg over clients", lambda run: 100 * AVG(of_clients(run)), AVG.better),
                "average over clients",
            ),
            Figure(f"{SIGMA} type", lambda run: 100 * STD0(run.final()), STD0.better),
            Figure(f"{SIGMA} client", lambda run: 100 * STD0(of_clients(run)), STD0.better),
        ),
        ("better", "worse"),
        tuple(of),
    )
