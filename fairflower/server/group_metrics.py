"""Metrics of group fairness in a run: of all people, of each domain and of each client."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from flwr.app import MetricRecord

from fairflower.data import Federation
from fairflower.errors import logger
from fairflower.numerics.group_fairness import (
    COUNTS,
    GROUP_COUNTS,
    METRICS,
    Counts,
    undefined,
)
from fairflower.server.folder import LEVELS, RunFolder
from fairflower.server.history import ALL, OVERALL, WORST_CLIENT


class GroupMetrics:
    """Writes the metrics of a run's tests into its folder.

    A metric that is undefined, as a group has nobody with a positive label, is not written; the
    place and the reason are logged and noted in ``run.json``.
    """

    def __init__(self, folder: RunFolder, federation: Federation) -> None:
        self.folder, self.federation = folder, federation
        self._undefined: dict[str, str] = dict(folder.fact("undefined_metrics") or {})

    @property
    def number(self) -> int:
        """The number of groups; 0 without groups of people."""
        return len(self.federation.group_names)

    def record(
        self, server_round: int, split: str, counts: Mapping[int, Counts]
    ) -> dict[str, dict[str, float]]:
        """Write the metrics over all clients and of each client; return those of the domains.

        ``counts`` are of the clients' test examples, shape (groups, 6) each, by client id.
        """
        if not counts:
            return {}
        beside = "" if split == "test" else f" ({split})"
        each = {}
        for client, of_client in sorted(counts.items()):
            domain = self.federation.clients[client].domain
            values = self.of(of_client, f"client {client} of {domain}{beside}")
            self.folder.history(server_round, LEVELS[split][1], str(client), values)
            each[client] = values
        whole = self.of(np.sum(list(counts.values()), axis=0), f"all clients{beside}")
        worst = {m.name: m.worst([v.get(m.name, math.nan) for v in each.values()]) for m in METRICS}
        self.folder.history(server_round, OVERALL[split], ALL, whole)
        self.folder.history(server_round, OVERALL[split], WORST_CLIENT, _defined(worst))
        by_domain: dict[str, list[Counts]] = {}
        for client, of_client in counts.items():
            by_domain.setdefault(self.federation.clients[client].domain, []).append(of_client)
        return {
            domain: self.of(np.sum(parts, axis=0), f"domain {domain}{beside}")
            for domain, parts in by_domain.items()
        }

    def of(self, counts: Counts, where: str) -> dict[str, float]:
        """Return the metrics of counts by name, and note those that are undefined."""
        names, positive = self.federation.group_names, self.federation.class_names[1]
        wrong = undefined(counts, names, positive)
        if wrong and where not in self._undefined:
            text = "; ".join(f"{metrics} ({reason})" for reason, metrics in wrong.items())
            logger.warning("Undefined for %s: %s.", where, text)
            self._undefined[where] = text
            self.folder.note("undefined_metrics", dict(self._undefined))
        return _defined({metric.name: metric(counts) for metric in METRICS})


def counts_in(answers: Mapping[int, MetricRecord]) -> dict[int, Counts]:
    """Return the counts in the clients' test metrics, shape (groups, 6) each, by client."""
    return {
        client: np.reshape(answer[GROUP_COUNTS], (-1, len(COUNTS)))
        for client, answer in answers.items()
        if GROUP_COUNTS in answer
    }


def _defined(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not math.isnan(value)}
