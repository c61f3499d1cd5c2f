"""A run's figures by round and name: what callbacks and trackers are told, and what ends a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from fairflower.numerics.metrics import AVG, MIN, STD, mean
from fairflower.server.contents import read_history

#: Tested rounds that the papers' tables average (FedHEAL §4.1).
WINDOW = 5

#: A figure by its name.
Figures = dict[str, float]

#: By level of the history, what precedes the names of a domain's metrics.
_PREFIXES = {"domain": "", "validation": "validation_"}

#: The same for the held-out domain, which no figure over domains includes.
HELD_OUT_PREFIX = "held_out_"

#: Level of the history for tests on the held-out domain.
HELD_OUT = "held-out"


class History:
    """The figures of every round so far.

    Of a round they are ``<metric>/<domain>`` for all metrics of a domain's test, as in
    ``accuracy/mnist``, a fraction; where every domain was tested also ``accuracy/AVG``,
    ``accuracy/STD`` (ddof 1; of two domains or more) and ``accuracy/MIN``; the same of images for
    validation as ``validation_accuracy/mnist`` and so on; of a held-out domain, which is in no
    figure over domains, ``held_out_accuracy/sketch``; ``train_loss``, the mean over the
    examples of the clients that were merged; and ``seconds`` and its like.
    """

    def __init__(self, domains: Sequence[str]) -> None:
        self.domains = tuple(domains)
        self._rounds: dict[int, Figures] = {}
        self._losses: dict[int, tuple[float, float]] = {}  # sum over examples, and how many

    def read(self, path: Path) -> None:
        """Add all that a ``history.csv`` holds."""
        for (server_round, level, name), group in groupby(read_history(path), itemgetter(0, 1, 2)):
            self.add(server_round, level, name, {row.metric: row.value for row in group})

    def add(self, server_round: int, level: str, name: str, values: Mapping[str, float]) -> None:
        """Add metrics of a domain, a client or (name "") the run as a whole."""
        found = self._rounds.setdefault(server_round, {})
        if level in _PREFIXES or level == HELD_OUT:
            prefix = _PREFIXES.get(level, HELD_OUT_PREFIX)
            found |= {f"{prefix}{metric}/{name}": float(value) for metric, value in values.items()}
        elif level == "run":
            found |= {metric: float(value) for metric, value in values.items()}
        elif "train_loss" in values and "num-examples" in values:
            total, count = self._losses.get(server_round, (0.0, 0.0))
            examples = float(values["num-examples"])
            self._losses[server_round] = (
                total + examples * float(values["train_loss"]),
                count + examples,
            )

    def of(self, server_round: int) -> Figures:
        """The figures of one round."""
        figures = dict(self._rounds.get(server_round, {}))
        if server_round in self._losses:
            total, count = self._losses[server_round]
            figures["train_loss"] = total / count
        over = [_over_domains(figures, self.domains, prefix) for prefix in _PREFIXES.values()]
        return figures | over[0] | over[1]

    @property
    def train_losses(self) -> dict[int, float]:
        """The training loss of every round that has one."""
        return {r: total / count for r, (total, count) in sorted(self._losses.items())}

    @property
    def validation_losses(self) -> dict[int, float]:
        """The mean over domains of the loss in validation, of every round that has all of them."""
        keys = [f"validation_loss/{domain}" for domain in self.domains]
        return {
            r: float(np.mean([found[key] for key in keys]))  # infinite or NaN, if one is
            for r, found in sorted(self._rounds.items())
            if r > 0 and found.keys() >= set(keys)
        }

    def last_test(self) -> tuple[int, dict[str, float]]:
        """Return the last tested round, and accuracy by domain: NaN for domains without a test.

        Accuracies are on test examples, or on validation examples if no round was tested on
        others. Round 0 and no domain if nothing was tested.
        """
        for key in (f"{prefix}accuracy/" for prefix in _PREFIXES.values()):
            for server_round, metrics_ in sorted(self._rounds.items(), reverse=True):
                if any(name.startswith(key) for name in metrics_):
                    return server_round, {
                        domain: metrics_.get(f"{key}{domain}", math.nan) for domain in self.domains
                    }
        return 0, {}

    def final(self) -> Figures:
        """Accuracy by domain and over all, the mean of the last five tested rounds.

        Spread and worst domain are those of the means, as in the papers' tables. A domain
        without a test in these rounds is left out.
        """
        tested = sorted(
            r for r, found in self._rounds.items() if any(f.startswith("accuracy/") for f in found)
        )
        last = ([r for r in tested if r > 0] or tested)[-WINDOW:]
        figures: Figures = {}
        for key in (f"accuracy/{domain}" for domain in self.domains):
            values = [self._rounds[r][key] for r in last if key in self._rounds[r]]
            values = [value for value in values if not math.isnan(value)]
            if values:
                figures[key] = mean(values)
        return figures | _over_domains(figures, self.domains)


def settled(losses: Mapping[int, float], patience: int, min_delta: float = 0.0) -> int:
    """The round of the lowest loss, if ``patience`` rounds have passed since; else 0.

    A loss is lower if it is by more than ``min_delta``.

    >>> settled({1: 0.9, 2: 0.5, 3: 0.6, 4: 0.5}, patience=2)
    2
    >>> settled({1: 0.9, 2: 0.5, 3: 0.6, 4: 0.4}, patience=2)
    0
    """
    best, lowest = 0, math.inf
    for server_round, loss in sorted(losses.items()):
        if loss < lowest - min_delta:
            best, lowest = server_round, loss
    return best if best and max(losses) - best >= patience else 0


def _over_domains(
    figures: Mapping[str, float], domains: Sequence[str], prefix: str = ""
) -> Figures:
    found = [figures.get(f"{prefix}accuracy/{domain}", math.nan) for domain in domains]
    if any(map(math.isnan, found)):
        return {}
    rows = (AVG, STD, MIN) if len(found) > 1 else (AVG, MIN)
    return {f"{prefix}accuracy/{row.title}": row(found) for row in rows}
