"""The tables and sentences of a leaderboard, as its protocol allows them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fairflower.leaderboard.analysis import Findings, primary
from fairflower.leaderboard.design import Benchmark, Sweep
from fairflower.report.tables.cells import Cell, Group, Row, Table
from fairflower.report.text import DASH, format_number, format_std, join_words
from fairflower.statistics.differences import MIN_PAIRS, Difference, MeanStd

#: Pairs of question 2: a method, and the same without what is asked about.
WITH_ITS_CLIENTS = (("gsam+fedism", "fedism"), ("scaffold+uniform", "uniform"))

#: Gain in points that the sweeps look for.
_GAIN = 2.0


def outcome(one: Difference) -> str:
    """The difference in the words of the protocol.

    >>> outcome(Difference(3.0, 1.0, 24, 1.5, 4.5, 0.001))
    'better by at least 1.50 points'
    """
    if one.n < MIN_PAIRS:
        return f"{one.n} federations: no sentence"
    if one.sign:
        word = "better" if one.sign > 0 else "worse"
        return f"{word} by at least {format_number(min(abs(one.low), abs(one.high)))} points"
    if one.equivalent:
        return f"equivalent within {one.margin:g} points"
    if math.isnan(one.detectable):
        return "undecided"
    return f"undecided; {format_number(one.detectable)} points would have been found"


def sentences(findings: Findings) -> list[str]:
    """What follows, benchmark after benchmark, then over all, then the three questions."""
    found = []
    for benchmark in findings.benchmarks:
        found += list(_of_benchmark(findings, benchmark))
    found += list(_over_all(findings))
    for sweep in findings.stages.sweeps:
        found += list(_of_sweep(findings, sweep))
    return found


def _of_benchmark(findings: Findings, benchmark: Benchmark) -> Iterator[str]:
    judged_there = findings.judged(benchmark)
    enough = {name: one for name, one in judged_there.items() if one.n >= MIN_PAIRS}
    reference, name = findings.design.reference, benchmark.name
    if not enough:
        yield f"{name}: fewer than {MIN_PAIRS} federations so far, and no sentence."
        return
    kinds: dict[str, list[str]] = {"better": [], "equivalent": [], "worse": [], "undecided": []}
    for method, one in enough.items():
        kinds[outcome(one).split(" ")[0].rstrip(";")].append(method)
    pairs = sorted({one.n for one in enough.values()})
    told = ", ".join(
        f"{len(names)} {kind}{f' ({join_words(names)})' if names and kind != 'undecided' else ''}"
        for kind, names in kinds.items()
    )
    least = max(one.detectable for one in enough.values())
    yield (
        f"{name}: of {len(enough)} methods against {reference}, by the worst half of the domains "
        f"on {' to '.join(map(str, pairs))} federations, {told}; the largest detectable difference "
        f"is {format_number(least)} points."
    )
    for method, other in WITH_ITS_CLIENTS:
        pair = findings.against(benchmark, method, other)
        if pair and pair.n >= MIN_PAIRS:
            yield f"{name}: {method} against {other} is {outcome(pair)}."


def _over_all(findings: Findings) -> Iterator[str]:
    found = findings.over_benchmarks()
    if found:
        told = "; ".join(
            f"{method} {format_number(one.mean, signed=True)} "
            f"[{format_number(one.low)}, {format_number(one.high)}]"
            for method, one in sorted(found.items(), key=lambda item: -item[1].mean)
        )
        count = max(one.n for one in found.values())
        yield (
            f"Over {count} benchmarks, by a mixed model with Dunnett's intervals against "
            f"{findings.design.reference}, points of the worst half: {told}."
        )


def _of_sweep(findings: Findings, sweep: Sweep) -> Iterator[str]:
    found = {key: one for key, one in findings.swept(sweep).items() if one.n >= MIN_PAIRS}
    if not found:
        return
    gains = {key: one for key, one in found.items() if one.sign > 0 and one.low > _GAIN}
    for (place, method), one in gains.items():
        yield (
            f"Sweep {sweep.name}, {place}: {method} beats {findings.design.reference} by at least "
            f"{format_number(one.low)} points."
        )
    if not gains:
        place, method = max(found, key=lambda key: found[key].high)
        yield (
            f"Sweep {sweep.name}: at none of {len({p for p, _ in found})} places is a gain of more "
            f"than {_GAIN:g} points over {findings.design.reference} shown; the largest upper end "
            f"of an interval is {format_number(found[place, method].high)} ({method}, {place})."
        )


def tables(findings: Findings) -> list[Table]:
    """A table for each benchmark that has pairs, each sweep, and what is still to be made."""
    found = [_benchmark(findings, one) for one in findings.benchmarks]
    found += [_sweep(findings, s) for s in findings.stages.sweeps if findings.swept(s)]
    return found


def _benchmark(findings: Findings, benchmark: Benchmark) -> Table:
    measure = primary(findings.design)
    figures, reference = findings.figures(benchmark), findings.design.reference
    first, others = findings.judged(benchmark), findings.secondary(benchmark)
    titles = list(dict.fromkeys(title for title, _ in others))
    chosen = {row.method: row.settings for row in findings.rows[benchmark.name]}
    values = {m: [measure.value(a) for a in own.values()] for m, own in figures.items()}
    rows = []
    for method in sorted(values, key=lambda name: -sum(values[name]) / len(values[name])):
        one = first.get(method)
        own = MeanStd.of(values[method])
        cells = [Cell(format_number(own.mean), format_std(own.std, own.n)), _difference(one)]
        cells += [Cell(outcome(one) if one else "reference")]
        cells += [_difference(others.get((title, method))) for title in titles]
        rows.append(Row(method, chosen[method], cells, anchor=f"{benchmark.name}-{method}"))
    made, planned = (
        len(findings.rows[benchmark.name]),
        len(benchmark.confirmed) * len(benchmark.federations),
    )
    processors = sorted({row.processor for row in findings.rows[benchmark.name]})
    redrawn = (
        f" Federations are redraws of mostly the same examples: Nadeau and Bengio's variance, "
        f"1/n + {benchmark.overlap:g}."
        if benchmark.overlap
        else ""
    )
    return Table(
        f"{benchmark.name}, confirmed",
        f"In %, mean over federations ± sample standard deviation; differences to {reference} in "
        "points with simultaneous 95 % intervals (Bonferroni), the worst half a family of its own, "
        "all others one family. Settings under the name are those chosen on validation examples."
        f"{redrawn} {made} of {planned} runs; made on {join_words(processors)}.",
        [measure.title, f"against {reference}", "so it is", *titles],
        [Group("", rows)],
        [
            f"{row.method}, federation {row.federation}, is lost: {row.reason}"
            for row in findings.lost(benchmark)
        ],
    )


def _sweep(findings: Findings, sweep: Sweep) -> Table:
    found = findings.swept(sweep)
    methods = [name for name in sweep.methods if name != findings.design.reference]
    rows = [
        Row(place, "", [_difference(found.get((place, method))) for method in methods])
        for place in dict.fromkeys(place for place, _ in found)
    ]
    return Table(
        f"Sweep {sweep.name}",
        f"The worst half of the domains minus that of {findings.design.reference}, in points, with "
        "95 % intervals that hold together for all places and methods.",
        methods,
        [Group("", rows)],
    )


def _difference(one: Difference | None) -> Cell:
    if one is None:
        return Cell(DASH)
    mark = {1: " ▲", -1: " ▼"}.get(one.sign, " ≈" if one.equivalent else "")
    interval = f"[{format_number(one.low)}, {format_number(one.high)}]" if one.n > 1 else ""
    return Cell(format_number(one.mean, signed=True) + mark, interval)


def left(findings: Findings) -> str:
    """How many runs of the confirmation are still to be made; empty if all are there."""
    missing = {
        one.name: len(one.confirmed) * len(one.federations) - len(findings.rows[one.name])
        for one in findings.stages.benchmarks
    }
    told = [f"{name} {count}" for name, count in missing.items() if count]
    return f"Confirmed runs still to be made: {', '.join(told)}." if told else ""
