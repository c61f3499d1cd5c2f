"""Verdicts: sentences that say which methods are fairer than others.

A method is *fairer* than a baseline if its worst domain is higher or its STD is lower, and neither
is worse. It is *equivalent* if both differences are shown to be within a margin. Otherwise, it is
*undecided*, and the verdict states the smallest difference that is detectable with 80 % power.
`fairflower.report.contrasts` judges the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fairflower.report.contrasts import (
    PLAIN_TITLE,
    TITLES,
    TOO_FEW,
    UNDECIDED,
    Contrast,
    ContrastGroup,
    Contrasts,
)
from fairflower.report.methods import BASELINES, Comparison, Method
from fairflower.report.text import format_number, format_std, join_words
from fairflower.statistics.differences import MeanStd


@dataclass(frozen=True)
class Verdict:
    """A sentence about a method: ``"<name>: <numbers>: <conclusion>."``."""

    name: str
    numbers: str
    conclusion: str
    too_few: bool = False  # whether every comparison has too few pairs

    def __str__(self) -> str:
        numbers = f"{self.numbers}: " if self.numbers else ""
        return f"{self.name}: {numbers}{self.conclusion}."


@dataclass(frozen=True)
class Section:
    """Verdicts on a measure in one kind of comparison.

    ``title`` is empty for fairness over domains against the baselines.
    """

    title: str
    verdicts: Sequence[Verdict]


def verdicts(comparison: Comparison, contrasts: Contrasts) -> list[Section]:
    """Return the sentences about all methods, for every measure and every comparison."""
    fair, *others = contrasts.against_baselines
    found = [fairness_verdict(comparison, m, fair[m.name]) for m in comparison.methods]
    sections = [Section("", found)]
    for measure, by_method in zip(contrasts.measures[1:], others, strict=True):
        found = [
            plain_verdict(name, by_baseline)
            for name, by_baseline in by_method.items()
            if by_baseline
        ]
        sections.append(Section(f"Against the baselines, {measure.name}", found))
    by_title = {"Strategies by local training": contrasts.by_strategy, **contrasts.further}
    for title, by_measure in by_title.items():
        # A grid has too many methods for one sentence per method.
        write = _of_each if title in contrasts.further and title != PLAIN_TITLE else _of_group
        for measure, groups in zip(contrasts.measures, by_measure, strict=True):
            found = [verdict for group in groups for verdict in write(group)]
            sections.append(Section(f"{title}, {measure.name}", found))
    return [
        replace(section, verdicts=_with_few_summed_up(section.verdicts))
        for section in sections
        if section.verdicts
    ]


def _with_few_summed_up(found: Sequence[Verdict]) -> Sequence[Verdict]:
    """Merge the verdicts on methods with too few pairs into a single verdict."""
    few = [verdict for verdict in found if verdict.too_few]
    if len(few) < 2:
        return found
    names = join_words([verdict.name for verdict in few])
    together = Verdict(names, "", f"{TOO_FEW}; see the tables for the differences")
    return [together, *(verdict for verdict in found if verdict not in few)]


def fairness_verdict(
    comparison: Comparison, method: Method, against: Mapping[str, Contrast]
) -> Verdict:
    """Return the verdict on a method's fairness over the last five tested rounds."""
    if not (against or method.fully_tested()):
        return Verdict(
            method.name, "", "not compared, because some domains were not tested in every round"
        )
    if len(comparison.domains) < 2:
        return Verdict(method.name, "", "not judged, because a single domain has no spread")
    if not against:
        wanted = [TITLES[name] for name in BASELINES if name != method.strategy]
        conclusion = f"no {' or '.join(wanted)} run with the same settings, rounds and seeds"
        baselines = [comparison.baseline(method, name) for name in BASELINES]
        tested = all(baseline is None or baseline.fully_tested() for baseline in baselines)
        condition = "" if tested else ", tested on every domain,"
        return Verdict(method.name, "", f"{conclusion}{condition} to compare with")
    worst = [f"{signed(c['MIN'].difference)} points against {name}" for name, c in against.items()]
    std = [signed(contrast["STD"].difference) for contrast in against.values()]
    lower = [f"{name}'s" for name, contrast in against.items() if contrast["AVG"].sign < 0]
    return Verdict(
        method.name,
        f"worst domain {', '.join(worst)}, STD {' and '.join(std)} "
        f"({pairs_text(against.values())})",
        conclusion_text(against)
        + (f", with an average below {' and '.join(lower)}" if lower else ""),
        all_too_few(against),
    )


def _of_group(group: ContrastGroup) -> Iterator[Verdict]:
    """Yield one verdict on the whole group: ``fairer (STD) with a, b; ...``."""
    conclusion = "; ".join(
        f"{judgment} with {', '.join(names)}"
        for (judgment, _), names in _by_judgment(group.contrasts).items()
    )
    name = f"{group.heading} against {group.other}"
    yield Verdict(name, "", conclusion, all_too_few(group.contrasts))


def _of_each(group: ContrastGroup) -> Iterator[Verdict]:
    """Yield one verdict on each contrast of the group."""
    for name, contrast in group.contrasts.items():
        yield plain_verdict(f"{group.heading}, {name}", {group.other: contrast})


def verdict_legend(contrasts: Contrasts) -> str:
    """Explain the words used in verdicts; empty if no methods were compared."""
    if contrasts.empty:
        return ""
    return (
        "Fairer: higher worst domain or lower STD, neither worse; t tests, p < 0.05 (corrected). "
        "Mixed: one better, one worse. Equivalent: within the margins. Undecided: none of these."
    )


def plain_verdict(name: str, contrasts: Mapping[str, Contrast]) -> Verdict:
    """Return the verdict with a method's differences and the conclusion from them."""
    numbers = "; ".join(
        ", ".join(f"{one.metric.name} {signed(one.difference)}" for one in contrast.by_metric)
        + f" points against {other}"
        for other, contrast in contrasts.items()
    )
    return Verdict(
        name,
        f"{numbers} ({pairs_text(contrasts.values())})",
        conclusion_text(contrasts),
        all_too_few(contrasts),
    )


def all_too_few(contrasts: Mapping[str, Contrast]) -> bool:
    """Return whether no contrast has enough pairs for a verdict."""
    return all(contrast.judgment[0] == TOO_FEW for contrast in contrasts.values())


def conclusion_text(contrasts: Mapping[str, Contrast]) -> str:
    """Return the conclusion from a method's contrasts, for example ``fairer (STD) than FedAvg``."""
    parts = []
    for (judgment, preposition), names in _by_judgment(contrasts).items():
        if judgment == UNDECIDED:
            names = [f"{name} (detectable: {contrasts[name].detectable})" for name in names]
        parts.append(f"{judgment} {preposition} {' and '.join(names)}")
    return ", ".join(parts)


def pairs_text(contrasts: Iterable[Contrast]) -> str:
    """Return the number of pairs: ``10 federations``, ``2 and 3 seeds of federation 0``."""
    compared = list(contrasts)
    counts = join_words(sorted({str(contrast.n) for contrast in compared}, key=int))
    noun, *federation = compared[0].unit.split(" ", 1)
    return " ".join([counts, f"{noun}{'' if counts == '1' else 's'}", *federation])


def signed(difference: MeanStd) -> str:
    """Format a difference with its sign and standard deviation.

    >>> signed(MeanStd(0.5, 0.25, 3)), signed(MeanStd(0.5, float("nan"), 1))
    ('+0.50 ± 0.25', '+0.50')
    """
    mean = format_number(difference.mean, signed=True)
    return f"{mean} {format_std(difference.std, difference.n)}".strip()


def _by_judgment(contrasts: Mapping[str, Contrast]) -> dict[tuple[str, str], list[str]]:
    names: dict[tuple[str, str], list[str]] = {}
    for name, contrast in contrasts.items():
        names.setdefault(contrast.judgment, []).append(name)
    return names
