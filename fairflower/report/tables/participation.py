"""Table of participation: how often the clients of each domain were merged."""

from __future__ import annotations

from collections.abc import Callable

from fairflower.report.methods import Comparison, MeanStd, Method
from fairflower.report.reading import Run
from fairflower.report.tables.cells import Column, Table, group_comparable, metric_table


def participation_table(comparison: Comparison) -> Table:
    """Share of the rounds in which a domain's clients were merged, in percent.

    Of methods of which some client sat out a round.
    """

    def of(domain: str) -> Callable[[Method], MeanStd]:
        return lambda method: method.over_seeds(lambda run: 100 * participation(run)[domain])

    methods = [m for m in comparison.methods if all(_partial(run) for run in m.runs)]
    return metric_table(
        "Participation",
        "Share of the rounds in which a client of the domain was merged, in %, mean over its "
        "clients.",
        [Column(domain, of(domain), 0) for domain in comparison.domains],
        group_comparable(comparison, methods) if methods else [],
    )


def participation(run: Run) -> dict[str, float]:
    """Return the share of client-rounds of each domain in which a client was merged."""
    merged = [client for record in run.diagnostics for client in record.get("client_ids", ())]
    shares = {}
    for domain in run.domains:
        there = [info.client_id for info in run.clients if info.domain == domain]
        count = sum(client in there for client in merged)
        shares[domain] = count / max(1, len(there) * len(run.diagnostics))
    return shares


def _partial(run: Run) -> bool:
    records = [record for record in run.diagnostics if "client_ids" in record]
    return any(len(record["client_ids"]) < len(run.clients) for record in records)
