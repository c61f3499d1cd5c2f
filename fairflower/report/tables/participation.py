"""Table of participation: how often the clients of each domain were merged."""

from __future__ import annotations

from collections.abc import Callable

from fairflower.report.methods import Comparison, Method
from fairflower.report.reading import Run
from fairflower.report.tables.cells import Column, Table, group_comparable, metric_table
from fairflower.statistics.differences import MeanStd


def participation_table(comparison: Comparison) -> Table:
    """Return a table with the fraction of rounds in which a domain's clients were merged.

    The table also has the domain's accuracy. It shows the methods for which some client was not
    merged in some round.
    """

    def share(place: int) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(lambda run: 100 * (participation(run) or ())[place])

    def accuracy(place: int) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(lambda run: 100 * float(run.final()[place]))

    methods = [m for m in comparison.methods if all(map(participation, m.runs))]
    return metric_table(
        "Participation",
        "Percentage of rounds in which a client's model was merged (mean over the domain's "
        f"clients), and the domain's {comparison.examples} accuracy in % ({comparison.span()}).",
        [
            Column(f"{domain}: {title}", of(place), 0)
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
