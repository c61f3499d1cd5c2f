"""The tables of a leaderboard, and sentences with the conclusions that its protocol prescribes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fairflower.leaderboard.analysis import Findings, primary
from fairflower.leaderboard.design import Benchmark, Sweep
from fairflower.report.tables.cells import Cell, Group, Row, Table
from fairflower.report.text import DASH, format_number, format_std, join_words
from fairflower.statistics.differences import MIN_PAIRS, Difference, MeanStd

#: Pairs for question 2 of the protocol: a method, and the same method without its local training.
WITH_ITS_CLIENTS = (("gsam+fedism", "fedism"), ("scaffold+uniform", "uniform"))

#: Gain in points that sweeps are designed to detect.
_GAIN = 2.0


def outcome(difference: Difference) -> str:
    """Describe a difference in the words of the protocol.

    >>> outcome(Difference(3.0, 1.0, 24, 1.5, 4.5, 0.001))
    'better by at least 1.50 points'
    >>> outcome(Difference(-1.5, 1.0, 24, -3.0, 0.0, 0.04))
    'worse by more than 0 points'
    """
    if difference.n < MIN_PAIRS:
        return f"{difference.n} federations: too few"
    if difference.sign:
        word = "better" if difference.sign > 0 else "worse"
        least = format_number(min(abs(difference.low), abs(difference.high)))
        if least == format_number(0.0):  # the interval ends at 0, or next to it
            return f"{word} by more than 0 points"
        return f"{word} by at least {least} points"
    if difference.equivalent:
        return f"equivalent within {difference.margin:g} points"
    if math.isnan(difference.detectable):
        return "undecided"
    least = format_number(difference.detectable)
    return f"undecided; a difference of {least} points would have been found"


def sentences(findings: Findings) -> list[str]:
    """Return the conclusions for each benchmark, over all benchmarks, and from the sweeps."""
    lines = []
    for benchmark in findings.benchmarks:
        lines += list(_of_benchmark(findings, benchmark))
    lines += list(_over_all(findings))
    for sweep in findings.stages.sweeps:
        lines += list(_of_sweep(findings, sweep))
    return lines


def _of_benchmark(findings: Findings, benchmark: Benchmark) -> Iterator[str]:
    judged_there = findings.judged(benchmark)
    enough = {
        name: difference for name, difference in judged_there.items() if difference.n >= MIN_PAIRS
    }
    reference, name = findings.design.reference, benchmark.name
    if not enough:
        yield f"{name}: fewer than {MIN_PAIRS} federations so far, so there is no conclusion."
        return
    kinds: dict[str, list[str]] = {"better": [], "equivalent": [], "worse": [], "undecided": []}
    for method, difference in enough.items():
        kinds[outcome(difference).split(" ")[0].rstrip(";")].append(method)
    pairs = sorted({difference.n for difference in enough.values()})
    counts = ", ".join(
        f"{len(names)} {kind}{f' ({join_words(names)})' if names and kind != 'undecided' else ''}"
        for kind, names in kinds.items()
    )
    least = max(difference.detectable for difference in enough.values())
    yield (
        f"{name}: {len(enough)} methods were compared with {reference} on the worst half of the "
        f"domains in {' to '.join(map(str, pairs))} federations: {counts}; the largest detectable "
        f"difference is {format_number(least)} points."
    )
    for method, other in WITH_ITS_CLIENTS:
        pair = findings.against(benchmark, method, other)
        if pair and pair.n >= MIN_PAIRS:
            yield f"{name}: {method}, compared with {other}, is {outcome(pair)}."


def _over_all(findings: Findings) -> Iterator[str]:
    judged = findings.over_benchmarks()
    if judged:
        gains = "; ".join(
            f"{method} {format_number(difference.mean, signed=True)} "
            f"[{format_number(difference.low)}, {format_number(difference.high)}]"
            for method, difference in sorted(judged.items(), key=lambda item: -item[1].mean)
        )
        count = max(difference.n for difference in judged.values())
        yield (
            f"Gains over {findings.design.reference} on the worst half, in points, across {count} "
            f"benchmarks (mixed model, Dunnett's intervals): {gains}."
        )


def _of_sweep(findings: Findings, sweep: Sweep) -> Iterator[str]:
    judged = {
        key: difference
        for key, difference in findings.swept(sweep).items()
        if difference.n >= MIN_PAIRS
    }
    if not judged:
        return
    gains = {
        key: difference
        for key, difference in judged.items()
        if difference.sign > 0 and difference.low > _GAIN
    }
    for (place, method), difference in gains.items():
        yield (
            f"Sweep {sweep.name}, {place}: {method} beats {findings.design.reference} by at least "
            f"{format_number(difference.low)} points."
        )
    if not gains:
        place, method = max(judged, key=lambda key: judged[key].high)
        yield (
            f"Sweep {sweep.name}: no gain of more than {_GAIN:g} points over "
            f"{findings.design.reference} is shown for any of "
            f"{len({p for p, _ in judged})} variations; the largest upper limit of an interval is "
            f"{format_number(judged[place, method].high)} ({method}, {place})."
        )


def tables(findings: Findings) -> list[Table]:
    """Return a table for each benchmark that has pairs, and for each sweep that has rows."""
    parts = [_benchmark(findings, benchmark) for benchmark in findings.benchmarks]
    parts += [_sweep(findings, s) for s in findings.stages.sweeps if findings.swept(s)]
    return parts


def _benchmark(findings: Findings, benchmark: Benchmark) -> Table:
    measure = primary(findings.design)
    figures, reference = findings.figures(benchmark), findings.design.reference
    first, others = findings.judged(benchmark), findings.secondary(benchmark)
    titles = list(dict.fromkeys(title for title, _ in others))
    chosen = {row.method: row.settings for row in findings.rows[benchmark.name]}
    values = {m: [measure.value(a) for a in by_f.values()] for m, by_f in figures.items()}
    rows = []
    for method in sorted(values, key=lambda name: -sum(values[name]) / len(values[name])):
        difference = first.get(method)
        estimate = MeanStd.of(values[method])
        cells = [
            Cell(format_number(estimate.mean), format_std(estimate.std, estimate.n)),
            _difference(difference),
        ]
        cells += [Cell(outcome(difference) if difference else "reference")]
        cells += [_difference(others.get((title, method))) for title in titles]
        rows.append(Row(method, chosen[method], cells, anchor=f"{benchmark.name}-{method}"))
    made = len(findings.rows[benchmark.name])
    processors = sorted({row.processor for row in findings.rows[benchmark.name]})
    redrawn = (
        f" Federations are redraws of mostly the same examples, so variances use Nadeau and "
        f"Bengio's factor, 1/n + {benchmark.overlap:g}."
        if benchmark.overlap
        else ""
    )
    return Table(
        f"{benchmark.name}, confirmed",
        f"In %, mean over federations ± sample standard deviation; differences from {reference} in "
        "points with simultaneous 95 % intervals (the worst half is one family, all other metrics "
        "are another). Below each name: settings chosen on validation examples."
        f"{redrawn} {made} runs on {join_words(processors)}.",
        [measure.title, f"against {reference}", "conclusion", *titles],
        [Group("", rows)],
        [
            f"{row.method}, federation {row.federation}, is lost: {row.reason}"
            for row in findings.lost(benchmark)
        ],
    )


def _sweep(findings: Findings, sweep: Sweep) -> Table:
    judged = findings.swept(sweep)
    methods = [name for name in sweep.methods if name != findings.design.reference]
    rows = [
        Row(place, "", [_difference(judged.get((place, method))) for method in methods])
        for place in dict.fromkeys(place for place, _ in judged)
    ]
    return Table(
        f"Sweep {sweep.name}",
        f"Accuracy on the worst half of the domains minus that of {findings.design.reference}, in "
        "points, with simultaneous 95 % intervals for all variations and methods.",
        methods,
        [Group("", rows)],
    )


def _difference(difference: Difference | None) -> Cell:
    if difference is None:
        return Cell(DASH)
    mark = {1: " ▲", -1: " ▼"}.get(difference.sign, " ≈" if difference.equivalent else "")
    interval = (
        f"[{format_number(difference.low)}, {format_number(difference.high)}]"
        if difference.n > 1
        else ""
    )
    return Cell(format_number(difference.mean, signed=True) + mark, interval)


def left(findings: Findings) -> str:
    """State how many runs of the confirmation remain; empty if none do."""
    missing = {benchmark.name: findings.left(benchmark) for benchmark in findings.stages.benchmarks}
    counts = [f"{name} {count}" for name, count in missing.items() if count]
    if not counts:
        return ""
    return (
        f"Remaining runs of the confirmation: {', '.join(counts)}. A benchmark is judged when all "
        "its runs are finished."
    )
