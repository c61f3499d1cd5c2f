"""The conclusions of a leaderboard in the sentences that its protocol prescribes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from experiments.leaderboard.analysis import Findings
from experiments.leaderboard.benchmarks import ranks
from experiments.leaderboard.design import Benchmark, Sweep
from fairflower.config.text import counted, join_words
from fairflower.registry import REFERENCES
from fairflower.report.cells import FEW_PAIRS, format_interval, format_number, within_range
from fairflower.statistics import LEVEL, MIN_PAIRS, Difference

#: Pairs for question 2 of the protocol: a method, and the same method without its local training.
WITH_ITS_CLIENTS = (("gsam+fedism", "fedism"), ("scaffold+uniform", "uniform"))

#: The kinds of conclusions, and what is said instead of one.
KINDS = ("better", "equivalent", "worse", "undecided")
BETTER, EQUIVALENT, WORSE, UNDECIDED = KINDS
TOO_FEW = "too few"

#: Gain in points that sweeps are designed to detect.
_GAIN = 2.0


def conclusion(difference: Difference) -> str:
    """Describe a difference in the words of the protocol.

    >>> conclusion(Difference(3.0, 1.0, 24, 1.5, 4.5, 0.001))
    'better by at least 1.50 points'
    >>> conclusion(Difference(-1.5, 1.0, 24, -3.0, 0.0, 0.04))
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
    if within_range(difference.detectable, least) != least:
        return f"{word}; {FEW_PAIRS} to find any difference"
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
    yield _main_conclusion(findings, benchmark, enough)
    yield from _stability(findings, benchmark, enough)
    yield from _tuning_limits(findings, benchmark)
    yield from _with_local_training(findings, benchmark, enough)


def _caveats(findings: Findings, benchmark: Benchmark) -> Iterator[str]:
    """Yield what restricts the conclusions: margins set afterwards, and lost and diverged runs."""
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
    for method, count in Counter(row.method for row in findings.diverged(benchmark)).items():
        yield (
            f"{name}: {method} diverged in {count} of {len(benchmark.federations)} federations, "
            "whose accuracies count."
        )


def _main_conclusion(
    findings: Findings, benchmark: Benchmark, enough: Mapping[str, Difference]
) -> str:
    """State how many methods are better, equivalent, worse or undecided, and which."""
    pairs = sorted({difference.n for difference in enough.values()})
    federations = f"{pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else str(pairs[0])
    largest = largest_detectable(enough, " points")
    return (
        f"{benchmark.name}: {len(enough)} {'methods were' if len(enough) > 1 else 'method was'} "
        f"compared with {findings.design.reference} on the worst half of the "
        f"domains in {federations} federations: {_count_by_kind(enough)}; the largest "
        f"difference that is detectable with 80 % power is {largest}."
    )


def _stability(
    findings: Findings, benchmark: Benchmark, enough: Mapping[str, Difference]
) -> Iterator[str]:
    """Yield how many conclusions stay with the reference's other finalists, if it has any."""
    if others := findings.other_references(benchmark):
        kept = unchanged_by_reference(findings, benchmark)
        counts = ", ".join(
            f"{len(kept[word])} of {len(names)} {word}"
            for word, names in _by_kind(enough).items()
            if names
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
            yield f"{benchmark.name}: {method}, compared with {other}{alone} is {conclusion(pair)}."


def unchanged_by_reference(findings: Findings, benchmark: Benchmark) -> dict[str, list[str]]:
    """Return the methods by conclusion, without those that another reference would change."""
    others = findings.other_references(benchmark).values()
    return _by_kind(
        {
            method: one
            for method, one in findings.judged(benchmark).items()
            if all(method in family and kind(family[method]) == kind(one) for family in others)
        }
    )


def _lost(method: str, count: int, federations: int) -> str:
    if count == federations:
        return f"{method} is lost in all federations, so it is not compared."
    return f"{method} is lost in {count} of {federations} federations; the others are compared."


def largest_detectable(judged: Mapping[str, Difference], unit: str = "") -> str:
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
    if not is_over_all(findings):
        yield (
            f"{count} of {counted(planned, 'benchmark')} {'is' if count == 1 else 'are'} finished, "
            f"with {counted(sources, 'independent data set')}. "
            f"Conclusions over benchmarks need all of them, their runs with {reference}'s other "
            f"finalists, and {MIN_PAIRS} data sets."
        )
        return
    over = f"{count} benchmarks with {sources} independent data sets"
    judged = findings.judged_over_benchmarks
    confirmed = chain.from_iterable(b.confirmed for b in findings.design.benchmarks)
    for method in dict.fromkeys(confirmed):
        if method not in judged and method not in (reference, *REFERENCES):
            yield f"Over {over}, {method} is not compared, because a benchmark does not judge it."
    yield (
        f"Over {over}, the mean gain over {reference} on the worst half: {_count_by_kind(judged)}; "
        "the largest difference that is detectable with 80 % power is "
        f"{largest_detectable(judged, ' points')}."
    )
    if findings.over_with_other_references:
        stay = [method for method in judged if not changes_over_all(findings, method)]
        yield (
            f"Over {over}, compared with each of {reference}'s other finalists on one benchmark at "
            f"a time, these conclusions stay: {_count_by_kind({m: judged[m] for m in stay})}."
        )
    yield (
        f"Over {over}, by a mixed model with Dunnett's intervals, which assumes that all methods "
        f"depend equally much on the benchmark: {_count_by_kind(findings.over_by_mixed_model)}."
    )
    if len(judged) > 1:  # ranks need three methods
        yield _ranked(findings, over)


def is_over_all(findings: Findings) -> bool:
    """Return whether all that conclusions over benchmarks need is finished."""
    return (
        len(findings.benchmarks) == len(findings.design.benchmarks)
        and len(findings.sources) >= MIN_PAIRS
        and not findings.references_left()
    )


def _count_by_kind(judged: Mapping[str, Difference]) -> str:
    """Return how many methods have which conclusion, with their names."""
    return ", ".join(
        f"{len(names)} {word}{f' ({join_words(names)})' if names else ''}"
        for word, names in _by_kind(judged).items()
    )


def _by_kind(judged: Mapping[str, Difference]) -> dict[str, list[str]]:
    """Return the methods of each of `KINDS`."""
    return {word: [m for m, one in judged.items() if kind(one) == word] for word in KINDS}


def changes_over_all(findings: Findings, method: str) -> list[str]:
    """Return the conclusions on a method that differ if the reference is another finalist."""
    word = kind(findings.judged_over_benchmarks[method])
    return [
        f"{kind(judged[method])} ({name})"
        for name, judged in findings.over_with_other_references.items()
        if method in judged and kind(judged[method]) != word
    ]


def _ranked(findings: Findings, over: str) -> str:
    reference = findings.design.reference
    sources = len(findings.sources)
    ranked = ranks({reference: [0.0] * sources, **findings.over_sources()})
    text = f"By ranks over {over}: Friedman's test has p = {format_p_value(ranked.p)}"
    if ranked.p >= LEVEL:
        return f"{text}, so no ranks are compared."
    mine = ranked.mean[reference]
    if ranked.critical > max(mine - 1, len(ranked.mean) - mine):
        return (
            f"{text}; with so few data sets no rank can be shown to differ from {reference}'s, "
            f"{format_number(mine)} of {len(ranked.mean)} (Nemenyi: by more than "
            f"{format_number(ranked.critical)})."
        )
    differ = [m for m, rank in ranked.mean.items() if abs(rank - mine) > ranked.critical]
    return (
        f"{text}; mean ranks that differ from {reference}'s, {format_number(mine)}, by more than "
        f"{format_number(ranked.critical)} (Nemenyi): "
        f"{join_words([f'{m} {format_number(ranked.mean[m])}' for m in differ]) or 'none'}."
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
        variations = len({variation for variation, _ in judged})
        yield (
            f"Sweep {sweep.name}: no gain of more than {_GAIN:g} points over "
            f"{findings.design.reference} is shown for any of "
            f"{counted(variations, 'variation')}; the largest upper limit of an interval is "
            f"{format_number(judged[place, method].high)} ({method}, {place})."
        )


def interval_text(difference: Difference) -> str:
    """Format a difference's interval."""
    return format_interval(difference.low, difference.high)


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


def recorded(findings: Findings) -> str:
    """State how many runs are recorded, and how long they took."""
    ledger = findings.stages.ledger.rows
    hours = sum(row.seconds for row in ledger.values()) / 3600
    planned = {run.key for run in findings.stages.planned()}
    unused = len(ledger.keys() - planned)
    return (
        f"All {len(ledger):,} recorded runs took {format_number(hours, 1)} core-hours. "
        f"{unused:,} of them are with settings that are not planned any more."
    )


def format_p_value(p: float) -> str:
    """Format a p-value."""
    return "< 0.001" if p < 0.0005 else format_number(p, 3)
