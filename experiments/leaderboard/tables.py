"""The tables of a leaderboard."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain

from experiments.leaderboard.analysis import Findings, primary, secondary
from experiments.leaderboard.design import Benchmark, Sweep
from experiments.leaderboard.sentences import (
    KINDS,
    changes_over_all,
    conclusion,
    interval_text,
    is_over_all,
    kind,
    largest_detectable,
    unchanged_by_reference,
)
from fairflower.config.text import join_words
from fairflower.registry import REFERENCES
from fairflower.report.cells import (
    DASH,
    MARKS,
    Cell,
    Group,
    Row,
    Table,
    format_number,
    format_std,
)
from fairflower.statistics import Difference, MeanStd

#: One-sided tests reject more than a two-sided interval shows.
_MARKS = (
    "▲ better, ▼ worse, ≈ equivalent (by one-sided tests, so an interval may reach beyond the "
    "margin)."
)


def tables(findings: Findings) -> list[Table]:
    """Return the summary, and tables over benchmarks, of each benchmark and of each sweep."""
    parts = [summary(findings)] if findings.benchmarks else []
    parts += [_over_all_table(findings)] if is_over_all(findings) else []
    parts += [_benchmark(findings, benchmark) for benchmark in findings.benchmarks]
    tuning = _tuning(findings)
    parts += [tuning] if tuning.groups[0].rows else []
    parts += [_sweep(findings, s) for s in findings.stages.sweeps if findings.swept(s)]
    return parts


def summary(findings: Findings) -> Table:
    """Count the conclusions on each finished benchmark."""
    rows = []
    for benchmark in findings.benchmarks:
        judged = findings.judged(benchmark)
        counts = Counter(map(kind, judged.values()))
        kept = unchanged_by_reference(findings, benchmark)
        tried = bool(findings.other_references(benchmark))
        numbers = [
            f"{counts[name]} ({len(kept[name])})" if tried and counts[name] else str(counts[name])
            for name in KINDS
        ]
        numbers.append(largest_detectable(judged))
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


def _over_all_table(findings: Findings) -> Table:
    """Return the methods' gains on each independent data set, and their means."""
    reference, by_model = findings.design.reference, findings.over_by_mixed_model
    gains, judged = findings.over_sources(), findings.judged_over_benchmarks
    rows = []
    for method in sorted(judged, key=lambda name: -judged[name].mean):
        cells = [Cell(format_number(gain, signed=True)) for gain in gains[method]]
        cells += [_difference(judged[method]), Cell(conclusion(judged[method]))]
        changes = changes_over_all(findings, method)
        cells += [Cell(join_words(changes) or "the same"), _difference(by_model[method])]
        rows.append(Row(method, "", cells))
    names = [" and ".join(b.name for b in of) for of in findings.sources.values()]
    return Table(
        "Over the benchmarks",
        f"Differences from {reference} in points, worst half of the domains. Each data set counts "
        "once: benchmarks with the same people or images are averaged. Mean: with simultaneous "
        f"95 % intervals for data sets like these, from Student's test for each method. {_MARKS} "
        "The conclusions are about the mean: on a single data set a method may differ by more. "
        f"Other finalists: the conclusion if {reference} has the settings of another finalist of "
        "its tuning on one benchmark. Mixed model: Dunnett's intervals, which assume that all "
        "methods depend equally much on the data set.",
        [*names, "mean", "conclusion", "other finalists", "mixed model"],
        [Group("", rows)],
    )


def _benchmark(findings: Findings, benchmark: Benchmark) -> Table:
    metric, reference = primary(findings.design), findings.design.reference
    first, others = findings.judged(benchmark), findings.judged_secondary(benchmark)
    beside = findings.of_references(benchmark)
    better = {m.title: m.better for m in secondary(findings.design, findings.domains(benchmark))}
    chosen = {row.method: row.settings for row in findings.rows[benchmark.name]}
    accuracies = findings.accuracies(benchmark)
    values = {m: [metric(a) for a in by_f.values()] for m, by_f in accuracies.items()}
    rows = []
    means = {method: sum(of) / len(of) for method, of in values.items()}
    order = {method: -means[method] if method not in REFERENCES else math.inf for method in means}
    for method in sorted(values, key=order.__getitem__):
        difference = first.get(method)
        estimate = MeanStd.of(values[method])
        cells = [Cell(format_number(estimate.mean), format_std(estimate.std, estimate.n))]
        if method in REFERENCES:
            gains = [beside.get((title, method), math.nan) for title in (metric.title, *better)]
            cells += [Cell(format_number(gain, signed=True)) for gain in gains]
            cells.insert(2, Cell("not judged"))
        else:
            cells += [_difference(difference)]
            cells += [Cell(conclusion(difference) if difference else "reference")]
            cells += [_difference(others.get((title, method)), s) for title, s in better.items()]
        rows.append(Row(method, chosen[method], cells))
    unjudged = (
        f" {' and '.join(names).capitalize()}: mean differences, not judged."
        if (names := [method for method in values if method in REFERENCES])
        else ""
    )
    made = len(findings.rows[benchmark.name])
    hours = findings.hours(benchmark)
    processors = sorted({row.processor for row in findings.rows[benchmark.name]} - {""})
    elsewhere = findings.on_other_processors(benchmark)
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
        f"are another). {_MARKS} A lower STD can come from losses of the best domains: see the "
        "average, too. Below each name: settings chosen on validation examples."
        f"{unjudged}{redrawn} {made} runs on {join_words(processors)}; with all trials they took "
        f"{format_number(hours, 1)} hours, each on one core beside others.{mixed}",
        [metric.title, f"against {reference}", "conclusion", *better],
        [Group("", rows)],
        [
            f"{row.method}, federation {row.federation}, is lost: {row.reason}"
            for row in findings.lost(benchmark)
        ]
        + [
            f"{row.method}, federation {row.federation}, counts, but {row.reason}"
            for row in findings.diverged(benchmark)
        ],
    )


def _tuning(findings: Findings) -> Table:
    """Return what tuning found on validation examples, for all methods that are tuned."""
    design, stages = findings.design, findings.stages
    confirmed = chain.from_iterable(b.confirmed for b in design.benchmarks)
    rows = []
    for method in dict.fromkeys([*confirmed, *design.screened]):
        found = [findings.validated(benchmark, method) for benchmark in stages.benchmarks]
        if any(value is not None for value in found):
            cells = [Cell(DASH if v is None else format_number(v)) for v in found]
            rows.append(Row(method, "", cells))
    return Table(
        "Tuning",
        "Accuracy in % on the worst half of the domains, on validation examples: mean over "
        f"{len(design.tuned_on)} tuning federations of the settings that tuning chose. They were "
        "chosen by this number, so it is too high, and no claim is made from it. "
        f"{DASH}: not tuned (yet).",
        [benchmark.name for benchmark in stages.benchmarks],
        [Group("", rows)],
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


def _difference(difference: Difference | None, better: int = 1) -> Cell:
    """Return a difference with its mark; ``better`` is -1 if lower values are better."""
    if difference is None:
        return Cell(DASH)
    mark = MARKS[better * difference.sign][0] or (" ≈" if difference.equivalent else "")
    interval = interval_text(difference) if difference.n > 1 else ""
    return Cell(format_number(difference.mean, signed=True) + mark, interval)
