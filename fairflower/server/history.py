"""The metrics of a run by round and name, for callbacks, trackers and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fairflower.arguments import Range
from fairflower.numerics.metrics import AVG, criterion, over_domains
from fairflower.numerics.scores import ACCURACY, Score, from_numbers
from fairflower.server.contents import Value, read_history
from fairflower.tasks import Task

if TYPE_CHECKING:  # Flower is slow to import, and reports read histories
    from flwr.app import MetricRecord

    from fairflower.config import RunConfig
    from fairflower.data import Federation

WINDOW = 5  # number of tested rounds over which the papers' tables average (FedHEAL §4.1)

#: Metrics by name.
Metrics = dict[str, float]

#: Split -> levels of the history for results per domain and per client.
LEVELS = {"test": ("domain", "client"), "validation": ("validation", "client-validation")}

#: Split -> level for the models that clients keep; the names are ``<client>/<domain>``.
OWN_LEVELS = {"test": "own", "validation": "own-validation"}

#: The same of models that sites share, which sites test.
SHARED_LEVELS = {"test": "shared", "validation": "shared-validation"}

#: Level for tests on the held-out domain, and the prefix at this level of the primary score with
#: BatchNorm statistics of the domain's test examples.
HELD_OUT, ADAPTED = "held-out", "adabn_"

#: Split -> level for metrics of group fairness over all clients.
OVERALL = {"test": "all", "validation": "all-validation"}

#: Names at this level: the metric over all people, from summed counts, and the worst client's
#: metric.
ALL, WORST_CLIENT = "global", "worst_client"

#: Prefix for the held-out domain, which is excluded from metrics over domains.
HELD_OUT_PREFIX = "held_out_"

#: Level -> a metric's name among the metrics of a round. Levels of clients have none.
_NAMES = {
    "domain": "{metric}/{name}",
    "validation": "validation_{metric}/{name}",
    HELD_OUT: HELD_OUT_PREFIX + "{metric}/{name}",
    OVERALL["test"]: "{name}_{metric}",
    OVERALL["validation"]: "validation_{name}_{metric}",
    "run": "{metric}",
}


class History:
    """The metrics of all rounds so far.

    The metrics of a round have these names:

    - ``<metric>/<domain>`` for each test metric, for example ``accuracy/mnist``, a fraction;
    - ``accuracy/AVG``, ``accuracy/MIN`` and, with two or more domains, ``accuracy/STD`` (ddof 1),
      if every domain was tested; of another task, its primary score instead of accuracy, and MAX
      instead of MIN if lower values are better;
    - the same with the prefix ``validation_`` for validation examples, and ``held_out_`` for a
      held-out domain, which AVG, MIN and STD leave out; ``held_out_adabn_accuracy/<domain>`` is for
      the model with BatchNorm statistics of that domain's examples (``evaluate.adabn``);
    - ``global_<metric>`` and ``worst_client_<metric>`` for each metric of group fairness, if the
      data have groups of people; with the prefix ``validation_`` for validation examples;
    - ``train_loss``, the mean over the training examples of the merged clients;
    - metrics of the whole round, for example ``seconds``, or ``best_round``, the best round so far
      (``checkpoint.best``).
    """

    def __init__(self, domains: Sequence[str], primary: Score = ACCURACY) -> None:
        self.domains = tuple(domains)
        self.primary = primary
        #: (level, metric) -> round -> name -> value.
        self.values: dict[tuple[str, str], dict[int, Metrics]] = {}
        self._losses: dict[int, tuple[float, float]] = {}  # (sum of losses, examples)

    def read(self, path: Path) -> None:
        """Add the contents of a ``history.csv``."""
        for (server_round, level, name), group in groupby(read_history(path), itemgetter(0, 1, 2)):
            self.add(server_round, level, name, {row.metric: row.value for row in group})

    def add(self, server_round: int, level: str, name: str, values: Mapping[str, float]) -> None:
        """Add metrics of a domain, of a client or, with the name "", of the whole run.

        Of the clients, only the training losses are kept.
        """
        if level in _NAMES:
            for metric, value in values.items():
                self.put(Value(server_round, level, name, metric, float(value)))
        elif "train_loss" in values and "num-examples" in values:
            total, count = self._losses.get(server_round, (0.0, 0.0))
            examples = float(values["num-examples"])
            total += examples * float(values["train_loss"])
            self._losses[server_round] = total, count + examples

    def put(self, row: Value) -> None:
        """Add a value, also of a client."""
        by_round = self.values.setdefault((row.level, row.metric), {})
        by_round.setdefault(row.round, {})[row.name] = row.value

    def __getitem__(self, key: tuple[str, str]) -> Mapping[int, Metrics]:
        """Return the values of a metric at a level: round -> name -> value."""
        return self.values.get(key, {})

    def of(self, server_round: int) -> Metrics:
        """Return the metrics of a round."""
        metrics = {
            _NAMES[level].format(metric=metric, name=name): value
            for (level, metric), by_round in self.values.items()
            if level in _NAMES
            for name, value in by_round.get(server_round, {}).items()
        }
        if server_round in self._losses:
            total, count = self._losses[server_round]
            metrics["train_loss"] = total / count
        over = [self._over_domains(metrics, level) for level in ("domain", "validation")]
        return metrics | over[0] | over[1]

    @property
    def train_losses(self) -> dict[int, float]:
        """Training loss of each round."""
        return {r: total / count for r, (total, count) in sorted(self._losses.items())}

    @property
    def validation_losses(self) -> dict[int, float]:
        """Mean validation loss over domains for each round in which all domains were tested."""
        return {
            r: float(np.mean([losses[domain] for domain in self.domains]))  # may be infinite or NaN
            for r, losses in sorted(self["validation", "loss"].items())
            if r > 0 and losses.keys() >= set(self.domains)
        }

    def merit(self, server_round: int, by: str) -> float:
        """Return a round's primary score on validation examples, negative if lower is better.

        ``by`` is a `fairflower.numerics.metrics.criterion` over domains. Minus infinity for round
        0, and if a domain has no finite score. Rounded, so that errors of sums break no tie.
        """
        tests = self["validation", self.primary.name].get(server_round, {}) if server_round else {}
        scores = [tests.get(domain, math.nan) for domain in self.domains]
        if not np.isfinite(scores).all():
            return -math.inf
        return self.primary.better * float(f"{criterion(by, self.primary)(scores):.12g}")

    def last_test(self) -> tuple[int, dict[str, float]]:
        """Return the last tested round and the score per domain, NaN if a domain was not tested.

        Scores are on test examples, or on validation examples if no round was tested on test
        examples. Returns round 0 and no domains if no round was tested.
        """
        tests = self[self._tested_level(), self.primary.name]
        if not tests:
            return 0, {}
        last = max(tests)
        return last, {domain: tests[last].get(domain, math.nan) for domain in self.domains}

    def _tested_level(self) -> str:
        """Return the level of test examples, or of validation examples if it has no tests."""
        return "domain" if self["domain", self.primary.name] else "validation"

    def final(self) -> Metrics:
        """Return primary scores by domain and over domains, means of the last five tested rounds.

        Scores on validation examples have the prefix ``validation_``; they are returned only if no
        round was tested on test examples. STD and MIN are computed from the averages, as in
        the papers' tables. Domains that were not tested in these rounds are omitted.
        """
        level = self._tested_level()
        tests = self[level, self.primary.name]
        last = ([r for r in sorted(tests) if r > 0] or sorted(tests))[-WINDOW:]
        metrics: Metrics = {}
        for domain in self.domains:
            values = [tests[r].get(domain, math.nan) for r in last]
            if values := [value for value in values if not math.isnan(value)]:
                metrics[self._named(level, domain)] = AVG(values)
        return metrics | self._over_domains(metrics, level)

    def _named(self, level: str, name: str) -> str:
        return _NAMES[level].format(metric=self.primary.name, name=name)

    def _over_domains(self, metrics: Mapping[str, float], level: str) -> Metrics:
        values = [metrics.get(self._named(level, domain), math.nan) for domain in self.domains]
        if any(map(math.isnan, values)):
            return {}
        average, worst, spread, _ = over_domains(self.primary)
        rows = (average, spread, worst) if len(values) > 1 else (average, worst)
        return {self._named(level, row.title): row(values) for row in rows}


def early_stop_round(losses: Mapping[int, float], patience: int, min_delta: float = 0.0) -> int:
    """Return the round with the lowest loss if it was at least ``patience`` rounds ago, else 0.

    Only decreases of more than ``min_delta`` count as improvements.

    >>> early_stop_round({1: 0.9, 2: 0.5, 3: 0.6, 4: 0.5}, patience=2)
    2
    >>> early_stop_round({1: 0.9, 2: 0.5, 3: 0.6, 4: 0.4}, patience=2)
    0
    """
    best, lowest = 0, math.inf
    for server_round, loss in sorted(losses.items()):
        if loss < lowest - min_delta:
            best, lowest = server_round, loss
    return best if best and max(losses) - best >= patience else 0


def early_stop_reason(config: RunConfig, history: History) -> str:
    """Return why ``stop.patience`` ends a run now; empty if it does not."""
    stop = config.stop
    validated = config.evaluates("validation") and config.evaluate.by != "clients"
    kind = "validation" if validated else "training"
    losses = history.validation_losses if validated else history.train_losses
    best = early_stop_round(losses, stop.patience, stop.min_delta) if stop.patience else 0
    if not best:
        return ""
    since = f"the {kind} loss has not improved since round {best} ({losses[best]:.6g})"
    return f"{since}; stop.patience = {stop.patience}"


def _domain_means(
    answers: Mapping[int, MetricRecord], keys: Mapping[str, str], federation: Federation
) -> dict[str, dict[str, float]]:
    """Return the mean metrics of each tested domain, weighted by its clients' test examples.

    ``keys`` maps names to keys in the answers. A domain has a metric only if all of its clients
    have reported it.
    """
    domain_of = {client.client_id: client.domain for client in federation.clients}
    sums = {domain: dict.fromkeys(keys, 0.0) for domain in federation.domains}
    tested = dict.fromkeys(federation.domains, 0.0)
    for client, answer in sorted(answers.items()):
        domain, n = domain_of[client], float(answer["num-examples"])  # type: ignore[arg-type]
        sums[domain] = {
            name: value + float(answer[keys[name]]) * n  # type: ignore[arg-type]
            for name, value in sums[domain].items()
            if keys[name] in answer
        }
        tested[domain] += n
    return {
        domain: {name: value / n for name, value in sums[domain].items()}
        for domain, n in tested.items()
        if n
    }


def test_keys(
    answers: Mapping[int, MetricRecord], task: Task, of_user: Iterable[str]
) -> dict[str, str]:
    """Return the keys in answers of the loss, a task's scores and the user's metrics, by name.

    All clients have sent the scores, or some have if examples may not define them, as an AUC.
    """
    numbers = [_numbers(answer) for answer in answers.values()] or [set[str]()]
    sent = set[str]().union(*numbers) if task.keeps == "outputs" else set.intersection(*numbers)
    scores = *(score.name for score in task.scores), f"personal_{task.primary.name}"
    known = [*(name for name in scores if name in sent), *of_user]
    return {**{name: name for name in known}, "loss": "eval_loss"}


def domain_scores(
    answers: Mapping[int, MetricRecord], keys: Mapping[str, str], federation: Federation
) -> dict[str, dict[str, float]]:
    """Return the metrics of each tested domain: means, and scores of the sums sent.

    Scores that sums do not define, or that are out of their range, are the means over clients.
    """
    task = federation.learns
    by_label = chain.from_iterable(task.scores_by_label(federation.num_classes).values())
    keys = {score.name: score.name for score in by_label} | {**keys}
    everywhere = set.intersection(*map(_numbers, answers.values())) if answers else set[str]()
    sums = {name: name for name in sorted(everywhere) if name not in keys.values()}
    means = _domain_means(answers, {**sums, **keys}, federation)
    results = {d: {n: v for n, v in of.items() if n in keys} for d, of in means.items()}
    ranges = {score.name: Range(score.low, score.high) for score in task.scores}
    for domain, values in means.items():
        # Clients of another package may send scores alone, or sums that do not fit.
        with suppress(LookupError, ArithmeticError, ValueError, TypeError):
            found = task.score(from_numbers(values)).items()
            scored = {n: v for n, v in found if math.isfinite(v) and v in ranges.get(n, Range())}
            results[domain] |= scored
    return results


def _numbers(answer: Mapping[str, object]) -> set[str]:
    return {name for name, value in answer.items() if not isinstance(value, list)}
