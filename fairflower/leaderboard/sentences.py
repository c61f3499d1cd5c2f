"""The tables of a leaderboard, and sentences with the conclusions that its protocol prescribes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from fairflower.leaderboard.analysis import Findings, primary, secondary
from fairflower.leaderboard.design import Benchmark, Sweep
from fairflower.report.tables.cells import MARKS, Cell, Group, Row, Table
from fairflower.report.text import DASH, format_number, format_p_value, format_std, join_words
from fairflower.statistics.benchmarks import over_benchmarks, ranks
from fairflower.statistics.differences import MIN_PAIRS, Difference, MeanStd

#: Pairs for question 2 of the protocol: a method, and the same method without its local training.
WITH_ITS_CLIENTS = (("gsam+fedism", "fedism"), ("scaffold+uniform", "uniform"))

#: The kinds of conclusions, and what is said instead of one.
KINDS = ("better", "equivalent", "worse", "undecided")
BETTER, EQUIVALENT, WORSE, UNDECIDED = KINDS
TOO_FEW = "too few"

#: Gain in points that sweeps are designed to detect.
_GAIN = 2.0


def outcome(difference: Difference) -> str:
    """Describe a difference in the words of the protocol.

    >>> outcome(Difference(3.0, 1.0, 24, 1.5, 4.5, 0.001))
    'better by at least 1.50 points'
    >>> outcome(Difference(-1.5, 1.0, 24, -3.0, 0.0, 0.04))
    'worse by more than 0 points'
    """
    word = kind(difference)
    if word == TOO_FEW:
        return f"{difference.n} federations: {TOO_FEW}"
    if difference.sign:
        least = format_number(min(abs(difference.low), abs(difference.high)))
        if least == format_number(0.0):  # the interval ends at 0, or next to it
            return f"{word} by more than 0 points"
        return f"{word} by at least {least} points"
    if difference.equivalent:
        return f"{word} within {difference.margin:g} points"
    if math.isnan(difference.detectable):
        return word
    least = format_number(difference.detectable)
    return f"{word}; a difference of {least} points would have been found with 80 % power"


def kind(difference: Difference) -> str:
    """Return one of `KINDS`, or `TOO_FEW`.

    >>> kind(Difference(3.0, 1.0, 24, 1.5, 4.5, 0.001))
    'better'
    """
    if difference.n < MIN_PAIRS:
        return TOO_FEW
    if difference.sign:
        return BETTER if difference.sign > 0 else WORSE
    return EQUIVALENT if difference.equivalent else UNDECIDED


def sentences(findings: Findings) -> list[str]:
    """Return the conclusions for each benchmark, over all benchmarks, and from the sweeps."""
    lines = []
    for benchmark in findings.stages.benchmarks:
        if benchmark in findings.benchmarks:
            lines += list(_of_benchmark(findings, benchmark))
        elif not findings.left(benchmark):
            lines.append(
                f"{benchmark.name}: nothing is compared, because no run of "
                f"{findings.design.reference} or of the other methods completed."
            )
    lines += list(_over_all(findings))
    for sweep in findings.stages.sweeps:
        lines += list(_of_sweep(findings, sweep))
    return lines


def _of_benchmark(findings: Findings, benchmark: Benchmark) -> Iterator[str]:
    yield from _caveats(findings, benchmark)
    judged = findings.judged(benchmark)
    enough = {m: d for m, d in judged.items() if d.n >= MIN_PAIRS}
    if not enough:
        yield (
            f"{benchmark.name}: fewer than {MIN_PAIRS} federations so far, so there is no "
            "conclusion."
        )
        return
    kinds: dict[str, list[str]] = {word: [] for word in KINDS}
    for method, difference in enough.items():
        kinds[kind(difference)].append(method)
    yield _main_conclusion(findings, benchmark, enough, kinds)
    yield from _stability(findings, benchmark, kinds)
    yield from _tuning_limits(findings, benchmark)
    yield from _with_local_training(findings, benchmark, enough)


def _caveats(findings: Findings, benchmark: Benchmark) -> Iterator[str]:
    """Yield what restricts the conclusions: margins set afterwards, and lost methods and runs."""
    name = benchmark.name
    for margins in findings.earlier_margins(benchmark):
        yield (
            f"{name}: the margins are {findings.design.margins} points and were {margins} when "
            "runs were confirmed, so its equivalences are by margins set afterwards."
        )
    for method in findings.never_completed(benchmark):
        yield f"{name}: {method} is not compared, because no finalist completed all its trials."
    for method, count in Counter(row.method for row in findings.lost(benchmark)).items():
        yield f"{name}: {_lost(method, count, len(benchmark.federations))}"


def _main_conclusion(
    findings: Findings,
    benchmark: Benchmark,
    enough: Mapping[str, Difference],
    kinds: Mapping[str, Sequence[str]],
) -> str:
    """State how many methods are better, equivalent, worse or undecided, and which."""
    pairs = sorted({difference.n for difference in enough.values()})
    federations = f"{pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else str(pairs[0])
    counts = ", ".join(
        f"{len(names)} {word}{f' ({join_words(names)})' if names else ''}"
        for word, names in kinds.items()
    )
    largest = _largest_detectable(enough, " points")
    return (
        f"{benchmark.name}: {len(enough)} {'methods were' if len(enough) > 1 else 'method was'} "
        f"compared with {findings.design.reference} on the worst half of the "
        f"domains in {federations} federations: {counts}; the largest "
        f"difference that is detectable with 80 % power is {largest}."
    )


def _stability(
    findings: Findings, benchmark: Benchmark, kinds: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield how many conclusions stay with the reference's other finalists, if it has any."""
    if others := findings.other_references(benchmark):
        kept = _kept(findings, benchmark)
        counts = ", ".join(
            f"{len(kept[word])} of {len(names)} {word}" for word, names in kinds.items() if names
        )
        yield (
            f"{benchmark.name}: compared with each of {findings.design.reference}'s other "
            f"finalists, too ({join_words(list(others))}), these conclusions stay: {counts}."
        )


def _tuning_limits(findings: Findings, benchmark: Benchmark) -> Iterator[str]:
    """Yield the methods for which tuning chose the end of the range of learning rates."""
    if highest := findings.at_largest_rate(benchmark):
        yield (
            f"{benchmark.name}: tuning chose the largest learning rate that it tried for "
            f"{join_words(highest)}, so larger ones may be better."
        )


def _with_local_training(
    findings: Findings, benchmark: Benchmark, enough: Mapping[str, Difference]
) -> Iterator[str]:
    """Yield the conclusions on methods compared with the same method without local training."""
    for method, other in WITH_ITS_CLIENTS:
        if other == findings.design.reference:  # tested in the family of the main conclusion
            pair, alone = enough.get(method), ","
        else:
            pair, alone = findings.against(benchmark, method, other), ", tested alone,"
        if pair and pair.n >= MIN_PAIRS:
            yield f"{benchmark.name}: {method}, compared with {other}{alone} is {outcome(pair)}."


def _kept(findings: Findings, benchmark: Benchmark) -> dict[str, list[str]]:
    """Return the methods by conclusion, without those that another reference would change."""
    families = [findings.judged(benchmark), *findings.other_references(benchmark).values()]
    kinds: dict[str, list[str]] = {word: [] for word in KINDS}
    for method in families[0]:
        words = {kind(family[method]) if method in family else TOO_FEW for family in families}
        if len(words) == 1 and (word := words.pop()) in kinds:
            kinds[word].append(method)
    return kinds


def _lost(method: str, count: int, federations: int) -> str:
    if count == federations:
        return f"{method} is lost in all federations, so it is not compared."
    return f"{method} is lost in {count} of {federations} federations; the others are compared."


def _largest_detectable(judged: Mapping[str, Difference], unit: str = "") -> str:
    """Return the largest detectable difference that is known, with its method."""
    enough = {m: d.detectable for m, d in judged.items() if d.n >= MIN_PAIRS}
    known = {method: value for method, value in enough.items() if not math.isnan(value)}
    if not known:
        return "unknown"
    method = max(known, key=known.__getitem__)
    return f"{format_number(known[method])}{unit} ({method})"


def _over_all(findings: Findings) -> Iterator[str]:
    count, planned = len(findings.benchmarks), len(findings.design.benchmarks)
    sources, reference = len(findings.sources), findings.design.reference
    if count < planned or sources < MIN_PAIRS:
        yield (
            f"{count} of {planned} benchmark{'s' * (planned != 1)} {'is' if count == 1 else 'are'} "
            f"finished, with {sources} independent data set{'s' * (sources != 1)}. "
            f"Conclusions over benchmarks need all of them, and {MIN_PAIRS} data sets."
        )
        return
    over = f"{count} benchmarks with {sources} independent data sets"
    gains = findings.over_sources()
    confirmed = chain.from_iterable(b.confirmed for b in findings.design.benchmarks)
    for method in dict.fromkeys(confirmed):
        if method not in gains and method != reference:
            yield f"Over {over}, {method} is not compared, because a benchmark does not judge it."
    judged = over_benchmarks(gains, primary(findings.design).margin)
    for method, difference in sorted(judged.items(), key=lambda item: -item[1].mean):
        yield (
            f"Over {over}, {method} gains {format_number(difference.mean, signed=True)}"
            f" {_interval(difference)} points over {reference} on the worst half: "
            f"{outcome(difference)}."
        )
    if len(gains) < 2:  # ranks need three methods
        return
    ranked = ranks({reference: [0.0] * sources, **gains})
    best = sorted(ranked.mean, key=ranked.mean.__getitem__)[:3]
    yield (
        f"By ranks over {over}: Friedman's test has p = {format_p_value(ranked.p)}, "
        f"and mean ranks differ significantly from {format_number(ranked.critical)} on (Nemenyi). "
        f"The lowest mean ranks: "
        f"{join_words([f'{m} {format_number(ranked.mean[m])}' for m in best])}."
    )


def _of_sweep(findings: Findings, sweep: Sweep) -> Iterator[str]:
    judged = {
        key: difference
        for key, difference in findings.swept(sweep).items()
        if difference.n >= MIN_PAIRS
    }
    if not judged:
        return
    for (place, method), count in findings.lost_in_sweep(sweep).items():
        yield f"Sweep {sweep.name}, {place}: {_lost(method, count, len(sweep.federations))}"
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
        known = {key: d.high for key, d in judged.items() if not math.isnan(d.high)}
        place, method = max(known or judged, key=lambda key: judged[key].high)
        yield (
            f"Sweep {sweep.name}: no gain of more than {_GAIN:g} points over "
            f"{findings.design.reference} is shown for any of "
            f"{len({p for p, _ in judged})} variations; the largest upper limit of an interval is "
            f"{format_number(judged[place, method].high)} ({method}, {place})."
        )


def tables(findings: Findings) -> list[Table]:
    """Return the summary, a table for each finished benchmark, and one for each finished sweep."""
    parts = [summary(findings)] if findings.benchmarks else []
    parts += [_benchmark(findings, benchmark) for benchmark in findings.benchmarks]
    parts += [_sweep(findings, s) for s in findings.stages.sweeps if findings.swept(s)]
    return parts


def summary(findings: Findings) -> Table:
    """Count the conclusions on each finished benchmark."""
    rows = []
    for benchmark in findings.benchmarks:
        judged = findings.judged(benchmark)
        counts, kept = Counter(map(kind, judged.values())), _kept(findings, benchmark)
        tried = bool(findings.other_references(benchmark))
        numbers = [
            f"{counts[name]} ({len(kept[name])})" if tried and counts[name] else str(counts[name])
            for name in KINDS
        ]
        numbers.append(_largest_detectable(judged))
        title = f"{benchmark.name} ({len(findings.domains(benchmark))} domains)"
        rows.append(Row(title, "", [Cell(number) for number in numbers]))
    return Table(
        "Summary",
        f"Number of methods, compared with {findings.design.reference} on the worst half of the "
        "domains. In brackets, where known: for how many the conclusion is the same with each of "
        f"{findings.design.reference}'s finalists. Detectable: the largest of the differences, in "
        "points, that are detected with 80 % power, with its method.",
        [*KINDS, "detectable"],
        [Group("", rows)],
        heading="benchmark",
    )


def _benchmark(findings: Findings, benchmark: Benchmark) -> Table:
    metric, reference = primary(findings.design), findings.design.reference
    first, others = findings.judged(benchmark), findings.secondary(benchmark)
    better = {
        m.title: m.summary.better for m in secondary(findings.design, findings.domains(benchmark))
    }
    chosen = {row.method: row.settings for row in findings.rows[benchmark.name]}
    accuracies = findings.accuracies(benchmark)
    values = {m: [metric.summary(a) for a in by_f.values()] for m, by_f in accuracies.items()}
    rows = []
    for method in sorted(values, key=lambda name: -sum(values[name]) / len(values[name])):
        difference = first.get(method)
        estimate = MeanStd.of(values[method])
        cells = [
            Cell(format_number(estimate.mean), format_std(estimate.std, estimate.n)),
            _difference(difference),
        ]
        cells += [Cell(outcome(difference) if difference else "reference")]
        cells += [_difference(others.get((title, method)), sign) for title, sign in better.items()]
        rows.append(Row(method, chosen[method], cells))
    made = len(findings.rows[benchmark.name])
    hours = findings.hours(benchmark)
    processors = sorted({row.processor for row in findings.rows[benchmark.name]} - {""})
    elsewhere = findings.elsewhere(benchmark)
    mixed = (
        f" Runs on another kind of processor than the {reference} run of the same federation: "
        f"{', '.join(f'{method} {runs}' for method, runs in elsewhere.items())}."
        if elsewhere
        else ""
    )
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
        f"are another). {_MARKS} Below each name: settings chosen on validation examples."
        f"{redrawn} {made} runs on {join_words(processors)}; with all trials they took "
        f"{format_number(hours, 1)} hours, each on one core beside others.{mixed}",
        [metric.title, f"against {reference}", "conclusion", *better],
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
        f"points, with simultaneous 95 % intervals for all variations and methods. {_MARKS}",
        methods,
        [Group("", rows)],
        heading="variation",
    )


#: One-sided tests reject more than a two-sided interval shows.
_MARKS = (
    "▲ better, ▼ worse, ≈ equivalent (by one-sided tests, so an interval may reach beyond the "
    "margin)."
)


def _difference(difference: Difference | None, better: int = 1) -> Cell:
    """Return a difference with its mark; ``better`` is -1 if lower values are better."""
    if difference is None:
        return Cell(DASH)
    mark = MARKS[better * difference.sign][0] or (" ≈" if difference.equivalent else "")
    interval = _interval(difference) if difference.n > 1 else ""
    return Cell(format_number(difference.mean, signed=True) + mark, interval)


def _interval(difference: Difference) -> str:
    return f"[{format_number(difference.low)}, {format_number(difference.high)}]"


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
