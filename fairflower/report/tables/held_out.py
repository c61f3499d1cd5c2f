"""Table of leave-one-domain-out runs: the accuracy of each method on every held-out domain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fairflower.report.methods import Comparison, Method, differing, mean_of_last
from fairflower.report.reading import Run
from fairflower.report.tables.cells import Column, Table, metric_table
from fairflower.statistics.differences import MeanStd

#: Config keys in which the runs of a row differ.
_OWN = ("data.held-out", "data.domains")

_Runs = Mapping[str, Method]


def held_out_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """Return a table with a column per held-out domain, their mean and their minimum, in percent.

    A row combines runs of a method that differ only in the held-out domain. The result is empty for
    fewer than two held-out domains. If runs were tested with AdaBN, a second table shows these
    tests.
    """
    rows: dict[Any, dict[str, Method]] = {}  # a method's settings and reach -> its runs by domain
    for comparison in comparisons:
        for method in comparison.methods:
            domain = method.runs[0].held_out_domain
            if domain and all(run.held_out.rounds.size for run in method.runs):
                key = _without_own(method.identity), method.runs[0].reach
                rows.setdefault(key, {})[domain] = method
    domains = list(dict.fromkeys(domain for by_domain in rows.values() for domain in by_domain))
    if len(domains) < 2:
        return []
    groups: dict[Any, dict[str, _Runs]] = {}
    for by_domain in rows.values():
        first = next(iter(by_domain.values()))
        setting = _without_own(first.setting), first.runs[0].reach
        groups.setdefault(setting, {})[first.name] = by_domain
    adapted = {
        setting: {name: found for name, found in rows.items() if _all_adapted(found)}
        for setting, rows in groups.items()
    }
    adapted = {setting: rows for setting, rows in adapted.items() if rows}
    tables = [_table(domains, groups, _PLAIN, _accuracy)]
    return [*tables, *([_table(domains, adapted, _ADABN, _adapted)] if adapted else [])]


_PLAIN = (
    "Leave one domain out: accuracy on the held-out domain",
    "Test accuracy of the global model in %, {span}.",
)
_ADABN = (
    "Leave one domain out, with AdaBN: accuracy on the held-out domain",
    "Test accuracy in %, {span}, of the global model with BatchNorm statistics that are estimated "
    "from the domain's unlabeled test examples.",
)


def _table(
    domains: Sequence[str],
    groups: Mapping[Any, Mapping[str, _Runs]],
    texts: tuple[str, str],
    accuracy: Callable[[Run], float],
) -> Table:
    runs = {id(next(iter(r.values()))): r for rows in groups.values() for r in rows.values()}

    def on(domain: str) -> Callable[[Method], MeanStd]:
        def estimate(method: Method) -> MeanStd:
            held = runs[id(method)].get(domain)
            return MeanStd(math.nan, math.nan, 0) if held is None else held.over_seeds(accuracy)

        return estimate

    def over(value_of: Callable[[list[float]], float]) -> Callable[[Method], MeanStd]:
        def estimate(method: Method) -> MeanStd:
            by_seed = [
                {run.replicate: accuracy(run) for run in runs[id(method)][domain].runs}
                for domain in domains
                if domain in runs[id(method)]
            ]
            seeds = [seed for seed in by_seed[0] if all(seed in found for found in by_seed)]
            if len(by_seed) < len(domains) or not seeds:
                return MeanStd(math.nan, math.nan, 0)
            return MeanStd.of([value_of([found[seed] for found in by_seed]) for seed in seeds])

        return estimate

    held = (run for found in runs.values() for method in found.values() for run in method.runs)
    span = mean_of_last(len(run.held_out.final_rounds()) for run in held)
    return metric_table(
        texts[0],
        f"{texts[1].format(span=span)} Each column shows runs without clients of this domain. Mean "
        "and minimum over the held-out domains are computed per seed. Bold: best comparable method,"
        " after rounding.",
        [
            *(Column(domain, on(domain), 1) for domain in domains),
            Column("mean", over(lambda values: sum(values) / len(values)), 1),
            Column("minimum", over(min), 1),
        ],
        _headed(groups),
    )


def _headed(groups: Mapping[Any, Mapping[str, _Runs]]) -> Iterable[tuple[str, dict[str, Method]]]:
    """Yield each group's heading (empty for a single group) and the first method of each row."""
    apart = differing([dict(setting) for setting, _ in groups])
    for place, ((_, reach), rows) in enumerate(groups.items()):
        parts = [f"{key} = {values[place]}" for key, values in apart.items()]
        heading = ", ".join([*parts, f"round {reach}"]) if len(groups) > 1 else ""
        yield heading, {name: next(iter(by_domain.values())) for name, by_domain in rows.items()}


def _accuracy(run: Run) -> float:
    return 100 * run.held_out_accuracy(run.held_out_domain)


def _adapted(run: Run) -> float:
    return 100 * run.held_out_accuracy(run.held_out_domain, adapted=True)


def _all_adapted(by_domain: _Runs) -> bool:
    return all(run.adapted.rounds.size for held in by_domain.values() for run in held.runs)


def _without_own(settings: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in settings if item[0] not in _OWN)
