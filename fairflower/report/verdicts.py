"""One honest sentence per method, and the notes that a reader must not miss.

A difference counts when the 95 % Student-t interval of the differences paired by seed
excludes zero, with at least three seeds. A method is *fairer* than a baseline when its
worst domain is higher or its STD lower by that rule, and neither is worse by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairflower import metrics
from fairflower.report.methods import (
    BASELINES,
    FEWEST_SEEDS,
    MARK,
    WINDOW,
    Comparison,
    Estimate,
    Method,
    listed_rounds,
    number,
    paired,
    untested,
)
from fairflower.report.reading import Run

TITLES = {"fedavg": "FedAvg", "uniform": "Uniform"}


@dataclass(frozen=True)
class Difference:
    """A method minus a baseline, in percentage points, paired by seed."""

    average: Estimate
    std: Estimate
    worst: Estimate

    @property
    def judgement(self) -> str:
        """``fairer (STD) than``, ``not distinguishable from``, ..., by what counts."""
        if self.worst.n < FEWEST_SEEDS:
            return f"too few seeds to tell ({FEWEST_SEEDS} needed) against"
        signs = {"worst domain": self.worst.sign, "STD": -self.std.sign}
        counted = ", ".join(name for name, sign in signs.items() if sign)
        if not counted:
            return "not distinguishable from"
        if 0 not in signs.values() and self.worst.sign == self.std.sign:
            return "mixed (worst domain against STD) beside"
        return f"{'fairer' if max(signs.values()) > 0 else 'less fair'} ({counted}) than"


@dataclass(frozen=True)
class Verdict:
    """What can be said of one method: ``"<name>: <numbers>: <conclusion>."``."""

    name: str
    numbers: str
    conclusion: str

    def __str__(self) -> str:
        numbers = f"{self.numbers}: " if self.numbers else ""
        return f"{self.name}: {numbers}{self.conclusion}."


def difference(method: Method, baseline: Method, window: int) -> Difference | None:
    """The paired difference, or None where the two have no seed in common.

    Runs that were not tested on every domain throughout do not count.
    """
    method, baseline = (
        replace(each, runs=tuple(run for run in each.runs if run.whole(window)))
        for each in (method, baseline)
    )
    if not {run.seed for run in method.runs} & {run.seed for run in baseline.runs}:
        return None
    return Difference(
        average=paired(method, baseline, lambda run: 100 * metrics.mean(run.final(window))),
        std=paired(method, baseline, lambda run: 100 * metrics.std(run.final(window), ddof=1)),
        worst=paired(method, baseline, lambda run: 100 * metrics.worst(run.final(window))),
    )


def differences(
    comparison: Comparison, method: Method, window: int = WINDOW
) -> dict[str, Difference]:
    """Against each baseline that is there: name -> difference."""
    found = {}
    for name in BASELINES:
        baseline = comparison.baseline(method, name) if method.strategy != name else None
        against = difference(method, baseline, window) if baseline else None
        if against:
            found[name] = against
    return found


def verdicts(comparison: Comparison) -> list[Verdict]:
    """The sentences on all methods."""
    return [verdict(comparison, method) for method in comparison.methods]


def verdict(comparison: Comparison, method: Method) -> Verdict:
    """The sentence on one method, on the mean of the last five tested rounds."""
    against = differences(comparison, method)
    if not (against or method.whole(WINDOW)):
        return Verdict(method.name, "", "not compared, as not every domain was tested throughout")
    if not against:
        wanted = [TITLES[name] for name in BASELINES if name != method.strategy]
        conclusion = f"no {' or '.join(wanted)} run with the same settings, rounds and seeds"
        others = (comparison.baseline(method, name) for name in BASELINES)
        whole = all(other is None or other.whole(WINDOW) for other in others)
        tested = "" if whole else ", tested on every domain throughout,"
        return Verdict(method.name, "", f"{conclusion}{tested} to compare with")
    worst = [f"{signed(d.worst)} points against {TITLES[name]}" for name, d in against.items()]
    spread = [signed(d.std) for d in against.values()]
    counts = {d.worst.n for d in against.values()}
    seeds = f"{' and '.join(map(str, sorted(counts)))} seed{'s' if counts != {1} else ''}"
    numbers = f"worst domain {', '.join(worst)}, STD {' and '.join(spread)} ({seeds})"
    return Verdict(method.name, numbers, _conclusion(against))


def rule(comparison: Comparison) -> str:
    """What the words of the verdicts mean; empty where nothing was compared."""
    if not any(differences(comparison, method) for method in comparison.methods):
        return ""
    return (
        "Differences are paired by seed: mean ± sample standard deviation over seeds (ddof 1). "
        "A difference counts when its 95 % Student-t interval, mean ± t·std/√n, excludes zero, "
        f"with at least {FEWEST_SEEDS} seeds; many comparisons are not corrected for. Fairer: the "
        "worst domain is higher or STD is lower by this rule, and neither is worse by it."
    )


def _conclusion(against: Mapping[str, Difference]) -> str:
    by_judgement: dict[str, list[str]] = {}
    for name, d in against.items():
        by_judgement.setdefault(d.judgement, []).append(TITLES[name])
    parts = [
        f"{judgement} {(' or ' if judgement.startswith('not') else ' and ').join(names)}"
        for judgement, names in by_judgement.items()
    ]
    lower = [f"{TITLES[name]}'s" for name, d in against.items() if d.average.sign < 0]
    if lower:
        parts.append(f"with an average below {' and '.join(lower)}")
    return ", ".join(parts)


def signed(estimate: Estimate) -> str:
    """A difference with its sign and spread.

    >>> signed(Estimate(0.5, 0.25, 3)), signed(Estimate(0.5, float("nan"), 1))
    ('+0.50 ± 0.25', '+0.50')
    """
    text = number(estimate.mean, signed=True)
    return f"{text} ± {number(estimate.std)}" if estimate.n > 1 else text


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know before comparing the rows of the table."""
    found = [
        f"The runs differ in {key}: {_values(values)}. "
        "Only methods with equal settings are compared."
        for key, values in comparison.differing.items()
    ]
    if len({m.runs[0].last_round for m in comparison.methods}) > 1:
        reached = {m.name: str(m.runs[0].last_round) for m in comparison.methods}
        found.append(
            f"The runs reached different rounds: {_values(reached)}. "
            "Only methods at the same round are compared."
        )
    if all(method.strategy != "uniform" for method in comparison.methods):
        found.append(
            "Uniform averaging is not among the runs. Much of the published gain over FedAvg "
            "is already there with uniform weights, so a gain over FedAvg alone says little."
        )
    for method in comparison.methods:
        for run in method.runs:
            who = f"{method.name}, seed {run.seed}"
            if run.status != "completed":
                error = f" ({run.info['error']})" if run.info.get("error") else ""
                found.append(f"{who}: {run.progress}{error}.")
            dropped = [client for record in run.diagnostics for client in record.get("dropped", ())]
            if dropped:
                found.append(
                    f"{who}: {len(dropped)} replies were dropped, of client {_clients(dropped)}."
                )
            found += [f"{who}: {note}" for note in _absences(run)]
        for run, reason in method.left_out:
            found.append(
                f"{method.name}, seed {run.seed}, {run.progress} is left out of tables and "
                f"figures: {reason} ({run.path})."
            )
    if any(m.config.get("evaluate.by") == "clients" for m in comparison.methods):
        found.append(
            "With evaluate.by = clients, a domain's accuracy is the mean of its clients' "
            "accuracies on their own test data, weighted by test images."
        )
    return [*found, *_unequal(comparison)]


def _clients(dropped: Sequence[str]) -> str:
    return ", ".join(sorted(set(dropped), key=lambda client: (len(client), client)))


def _absences(run: Run) -> list[str]:
    """Who did not answer when models were tested, and what that means for the figures."""
    found = []
    silent = [
        answer
        for record in run.diagnostics
        for answer in dict(record.get("dropped_in_test", {})).items()
    ]
    if silent:
        clients, reasons = zip(*silent, strict=True)
        why = f" ({reasons[0]})" if len(set(reasons)) == 1 else ""
        found.append(
            f"{len(silent)} replies to tests were dropped, of client {_clients(clients)}{why}. A "
            "domain's accuracy is then that of its other clients, if it has any."
        )
    lacks = untested(run.domains, run.rounds, run.accuracy)
    if lacks:
        last = np.isin(run.rounds, run.final_rounds(WINDOW))
        tested = np.isfinite(run.accuracy)
        means = [
            f" The mean of {domain} is over {listed_rounds(run.rounds, last & there)} alone."
            for domain, there in zip(run.domains, tested.T, strict=True)
            if (last & there).any() and (last & ~there).any()
        ]
        compared = (
            ""
            if run.whole(WINDOW)
            else f" Figures marked {MARK} are not of all domains in the same rounds, and so are "
            "compared with no other run."
        )
        found.append(f"{lacks}.{''.join(means)}{compared}")
    personal = untested(run.domains, run.personal_rounds, run.personal_accuracy)
    if personal and personal != lacks:
        found.append(f"personal models: {personal}.")
    return found


def _unequal(comparison: Comparison) -> list[str]:
    """Things outside the config that should be equal and are not."""
    found = []
    by_data: dict[object, set[object]] = {}
    for method in comparison.methods:
        data = frozenset(item for item in method.setting if item[0].startswith("data."))
        by_data.setdefault(data, set()).update(
            (run.clients, *run.info.get("sources", ())) for run in method.runs
        )
    if any(len(partitions) > 1 for partitions in by_data.values()):
        found.append("Runs with the same data settings had different data or clients.")
    versions: dict[str, dict[str, str]] = {}
    for method in comparison.methods:
        for run in method.runs:
            for package, version in dict(run.info.get("versions") or {}).items():
                versions.setdefault(package, {}).setdefault(str(version), method.name)
    for package, first in sorted(versions.items()):
        if len(first) > 1:
            found.append(f"The runs used several versions of {package}: {', '.join(first)}.")
    return found


def _values(values: Mapping[str, str]) -> str:
    """``0.1 (fedavg, uniform), 0.01 (fedheal)``."""
    owners: dict[str, list[str]] = {}
    for name, value in values.items():
        owners.setdefault(value, []).append(name)
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())
