"""Metrics of group fairness in a run: over all people, per domain and per client."""

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
from fairflower.server.folder import RunFolder
from fairflower.server.history import ALL, LEVELS, OVERALL, WORST_CLIENT


class GroupMetrics:
    """Writes metrics of group fairness from a run's tests to the run folder.

    A metric is undefined if, for example, nobody in a group has a positive label. It is then not
    written, and the reason is logged and stored in ``run.json``.
    """

    def __init__(self, folder: RunFolder, federation: Federation) -> None:
        self.folder, self.federation = folder, federation
        if self.number:
            text = "data.groups = %r: the positive class is %s."
            logger.info(text, federation.groups, federation.class_names[1])
        self._undefined: dict[str, str] = dict(folder.fact("undefined_metrics") or {})

    @property
    def number(self) -> int:
        """Number of groups of people, or 0 if there are none."""
        return len(self.federation.group_names)

    def record(
        self, server_round: int, split: str, counts: Mapping[int, Counts]
    ) -> dict[str, dict[str, float]]:
        """Write the metrics over all clients and per client; return the metrics per domain.

        ``counts`` are counts of the clients' test examples by client id, each of shape (groups, 6).
        """
        if not counts:
            return {}
        split_note = "" if split == "test" else f" ({split})"
        each = {}
        for client, of_client in sorted(counts.items()):
            domain = self.federation.clients[client].domain
            values = self.of(of_client, f"client {client} of {domain}{split_note}")
            self.folder.append_metrics(server_round, LEVELS[split][1], str(client), values)
            each[client] = values
        whole = self.of(np.sum(list(counts.values()), axis=0), f"all clients{split_note}")
        worst = {m.name: m.worst([v.get(m.name, math.nan) for v in each.values()]) for m in METRICS}
        self.folder.append_metrics(server_round, OVERALL[split], ALL, whole)
        self.folder.append_metrics(server_round, OVERALL[split], WORST_CLIENT, _defined(worst))
        by_domain: dict[str, list[Counts]] = {}
        for client, of_client in counts.items():
            by_domain.setdefault(self.federation.clients[client].domain, []).append(of_client)
        return {
            domain: self.of(np.sum(parts, axis=0), f"domain {domain}{split_note}")
            for domain, parts in by_domain.items()
        }

    def note(self) -> None:
        """Record the undefined metrics in ``run.json``: once a test, and not once a client."""
        if self._undefined:
            self.folder.note("undefined_metrics", dict(self._undefined))

    def of(self, counts: Counts, where: str) -> dict[str, float]:
        """Compute metrics from counts; return them by name, and log undefined metrics."""
        names, positive = self.federation.group_names, self.federation.class_names[1]
        wrong = undefined(counts, names, positive)
        if wrong and where not in self._undefined:
            text = "; ".join(f"{metrics} ({reason})" for reason, metrics in wrong.items())
            logger.warning("Undefined for %s: %s.", where, text)
            self._undefined[where] = text
        return _defined({metric.name: metric(counts) for metric in METRICS})


def counts_in(answers: Mapping[int, MetricRecord]) -> dict[int, Counts]:
    """Return the counts in clients' test metrics by client, each of shape (groups, 6)."""
    return {
        client: np.reshape(answer[GROUP_COUNTS], (-1, len(COUNTS)))
        for client, answer in answers.items()
        if GROUP_COUNTS in answer
    }


def _defined(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not math.isnan(value)}
