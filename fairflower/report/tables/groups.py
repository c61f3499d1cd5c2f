"""Tables of group fairness for all people, for the worst client, and in each domain."""

from __future__ import annotations

from collections.abc import Iterator

from fairflower.numerics.group_fairness import DIFFERENCES, METRICS, GroupMetric
from fairflower.report.measures import by_attribute, of_people
from fairflower.report.methods import Comparison
from fairflower.report.tables.cells import (
    Column,
    Table,
    group_comparable,
    how_to_read,
    metric_table,
)
from fairflower.report.text import UNDEFINED


def group_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield the tables for each sensitive attribute, in percent."""
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
                [_column(metric, place, metric.title) for metric in METRICS],
                groups,
            )
        for metric in DIFFERENCES:
            yield metric_table(
                f"{title}: {metric.phrase} in each domain, {comparison.span()}",
                f"{metric.phrase.capitalize()} times 100, on a domain's {comparison.examples} "
                f"examples. Lower is better. {how_to_read(comparison)}",
                [
                    _column(metric, place, domain)
                    for place, domain in enumerate(comparison.domains, start=2)
                ],
                groups,
            )


def _column(metric: GroupMetric, place: int, title: str) -> Column:
    value = of_people(metric.name, place)
    return Column(title, lambda method: method.over_seeds(value), metric.better, missing=UNDEFINED)
