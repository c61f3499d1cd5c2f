"""Methods against others: differences paired by seed, and honest sentences on their worth.

A difference counts when the t test of differences paired by federation or seed has p < 0.05, by
Holm's correction over all methods and figures that are compared with the same method, with at least
five pairs; variances are moderated over the methods (`fairflower.statistics.differences`). A
method is *fairer* than a baseline when its worst domain is higher or its STD lower by that rule,
and neither is worse by it; *equivalent* when both are shown to lie within a margin; and otherwise
*undecided*, with what could have been seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps

import numpy as np

from fairflower.registry import PLAIN_CLIENTS
from fairflower.report.measures import Figure, Measure, measures
from fairflower.report.methods import (
    BASELINES,
    Comparison,
    MeanStd,
    Method,
    client_strategy_grids,
    sweeps,
)
from fairflower.report.reading import Run
from fairflower.report.text import format_number, format_std, join_words
from fairflower.statistics.differences import MIN_PAIRS, Difference, differences, judged_as_family

#: What is said of differences that nobody can judge.
TOO_FEW = f"too few pairs for a verdict ({MIN_PAIRS} needed)"

#: What is said of those that may be none, or too small to be seen.
UNDECIDED = "undecided"

TITLES = {"fedavg": "FedAvg", "uniform": "Uniform"}


@dataclass(frozen=True)
class Pairs:
    """A method minus another in each pair of runs, by each figure of a measure, in points."""

    measure: Measure
    #: By figure, of each pair.
    values: tuple[tuple[float, ...], ...]
    #: By figure, the floors that `differences` takes.
    floors: tuple[tuple[float, float], ...]
    #: What a pair is: a federation, or a seed of which federation.
    unit: str


@dataclass(frozen=True)
class Contrast:
    """A method minus another by a measure, in percentage points, for each of its figures."""

    measure: Measure
    differences: tuple[Difference, ...]
    unit: str = "seed"

    @property
    def n(self) -> int:
        """Seeds that both have."""
        return self.differences[0].n

    @property
    def by_figure(self) -> list[tuple[Figure, Difference, int]]:
        """Each figure, its difference, and if that is better (1), worse (-1) or neither (0)."""
        pairs = zip(self.measure.figures, self.differences, strict=True)
        return [(figure, one, figure.better * one.sign) for figure, one in pairs]

    def __getitem__(self, title: str) -> tuple[Difference, int]:
        """The same of the figure of this title."""
        return next(
            (one, better) for figure, one, better in self.by_figure if figure.title == title
        )

    @property
    def judgement(self) -> tuple[str, str]:
        """What the method is, and the word before what it is that in comparison with.

        For example ``("fairer (STD)", "than")``.
        """
        if self.n < MIN_PAIRS:
            return TOO_FEW, "against"
        judged = [(figure.name, better) for figure, _, better in self.by_figure if figure.judged]
        better = ", ".join(name for name, found in judged if found > 0)
        worse = ", ".join(name for name, found in judged if found < 0)
        if better and worse:
            return f"mixed ({better} better; {worse} worse)", "beside"
        if better or worse:
            return f"{self.measure.words[not better]} ({better or worse})", "than"
        alike = [(f, one) for f, one, _ in self.by_figure if f.judged]
        if all(one.equivalent for _, one in alike):
            within = ", ".join(f"{figure.name} within {figure.margin:g}" for figure, _ in alike)
            return f"equivalent ({within})", "to"
        return UNDECIDED, "against"

    @property
    def seen(self) -> str:
        """The smallest differences that the pairs would have shown with 80 % power."""
        return ", ".join(
            f"{figure.name} {format_number(one.detectable, 1)}"
            for figure, one, _ in self.by_figure
            if figure.judged
        )


@dataclass(frozen=True)
class ContrastGroup:
    """The contrasts of several methods, by their names, with one other."""

    heading: str
    other: str
    contrasts: Mapping[str, Contrast]


def paired_differences(method: Method, other: Method, measure: Measure) -> Pairs | None:
    """The differences of pairs, or None where the two have no federation and seed in common.

    Runs that were not tested on every domain throughout do not count. `judge_family` says what
    they are worth.
    """

    def counts(run: Run) -> bool:
        return run.fully_tested() and all(np.isfinite(f.value(run)) for f in measure.figures)

    if not {method.name, other.name} <= {one.name for one in measure.of}:
        return None
    theirs = {run.replicate: run for run in other.runs if counts(run)}
    pairs = [(r, theirs[r.replicate]) for r in method.runs if counts(r) and r.replicate in theirs]
    if not pairs:
        return None
    values = (tuple(f.value(mine) - f.value(its) for mine, its in pairs) for f in measure.figures)
    floors = []
    for figure in measure.figures:
        worth, variance = np.mean(
            [np.add(figure.sampling(mine), figure.sampling(its)) for mine, its in pairs], axis=0
        )
        floors.append((worth / 2, math.sqrt(variance)))
    return Pairs(measure, tuple(values), tuple(floors), method.unit)


def judge_family(family: Mapping[str, Pairs]) -> dict[str, Contrast]:
    """Contrasts with one and the same method: as one family over all methods and figures."""
    if not family:
        return {}
    measure = next(iter(family.values())).measure
    found: dict[tuple[str, int], Difference] = {}
    for i, figure in enumerate(measure.figures):
        by_method = differences(
            {name: one.values[i] for name, one in family.items()},
            figure.margin,
            {name: one.floors[i] for name, one in family.items()},
        )
        found |= {(name, i): one for name, one in by_method.items()}
    few = {key: one for key, one in found.items() if one.n < MIN_PAIRS}  # they get no verdict
    found = judged_as_family(
        {key: one for key, one in found.items() if key not in few}
    ) | judged_as_family(few)
    figures = range(len(measure.figures))
    return {
        name: Contrast(measure, tuple(found[name, i] for i in figures), one.unit)
        for name, one in family.items()
    }


def against_baselines(comparison: Comparison, measure: Measure) -> dict[str, dict[str, Contrast]]:
    """Of every method, against FedAvg and Uniform with the same clients, where they are there."""
    found: dict[str, dict[str, Contrast]] = {method.name: {} for method in measure.of}
    for baseline in BASELINES:
        families: dict[str, dict[str, Pairs]] = {}
        for method in measure.of:
            if method.strategy == baseline:
                continue
            other = comparison.baseline(method, baseline)
            if other and (one := paired_differences(method, other, measure)):
                families.setdefault(other.name, {})[method.name] = one
        for family in families.values():
            for name, told in judge_family(family).items():
                found[name][TITLES[baseline]] = told
    return found


def by_strategy(comparison: Comparison, measure: Measure) -> list[ContrastGroup]:
    """For each strategy of a product, with every local training, against the baselines."""
    found: dict[tuple[str, str], dict[str, Contrast]] = {}
    against = against_baselines(comparison, measure)
    for grid in client_strategy_grids(comparison):
        for client, row in grid.items():
            for strategy, method in row.items():
                for name, one in against.get(method.name, {}).items():
                    found.setdefault((strategy, name), {})[client] = one
    return [ContrastGroup(*names, contrasts) for names, contrasts in found.items()]


#: A heading, the name of one method, and by name methods each with that to compare it with.
Compared = tuple[str, str, dict[str, tuple[Method, Method]]]
Against = Callable[[Comparison, Measure], list[ContrastGroup]]


def _blocks(against: Callable[[Comparison], Iterator[Compared]]) -> Against:
    """The contrasts of those pairs that can be compared."""

    @wraps(against)
    def blocks(comparison: Comparison, measure: Measure) -> list[ContrastGroup]:
        found = []
        for heading, other, pairs in against(comparison):
            contrasts = {name: paired_differences(*pair, measure) for name, pair in pairs.items()}
            there = judge_family({name: one for name, one in contrasts.items() if one})
            found += [ContrastGroup(heading, other, there)] if there else []
        return found

    return blocks


@_blocks
def against_plain(comparison: Comparison) -> Iterator[Compared]:
    """Every local training against plain local training, under the same strategy."""
    for grid in client_strategy_grids(comparison):
        plain = next((client for client in grid if client in PLAIN_CLIENTS), "")
        under = grid.get(plain, {})
        for client, row in grid.items():
            if client != plain:
                yield client, plain, {n: (m, under[n]) for n, m in row.items() if n in under}


@_blocks
def against_other_models(comparison: Comparison) -> Iterator[Compared]:
    """Every method against plain FedAvg of another model, all other settings being equal."""

    def rest(method: Method) -> object:
        return method.setting - method.settings("model."), method.runs[0].reach

    for base in comparison.methods:
        if base.strategy == "fedavg" and base.client in PLAIN_CLIENTS:
            model = base.config.get("model.name")
            others = [m for m in comparison.methods if m.config.get("model.name") != model]
            pairs = {m.name: (m, base) for m in others if rest(m) == rest(base)}
            yield f"FedAvg of {model}", base.name, pairs


@_blocks
def against_first_values(comparison: Comparison) -> Iterator[Compared]:
    """Every value of a swept argument against the lowest one, and those that are no number."""
    for sweep in sweeps(comparison):
        base, *methods = [*sweep.methods, *sweep.others.values()]
        yield sweep.key, base.name, {method.name: (method, base) for method in methods}


#: Comparisons beside that with the baselines: a title, and who is compared with whom.
FURTHER: tuple[tuple[str, Against], ...] = (
    ("Local training against plain local training", against_plain),
    ("Models against each other", against_other_models),
    ("Values of one argument against its lowest", against_first_values),
)


def seed_counts_text(contrasts: Iterable[Contrast]) -> str:
    """Their numbers of seeds: ``3``, or ``2 and 3``; empty without any."""
    return join_words(sorted({str(one.n) for one in contrasts}, key=int))


@dataclass(frozen=True)
class Verdict:
    """What can be said of one method: ``"<name>: <numbers>: <conclusion>."``."""

    name: str
    numbers: str
    conclusion: str

    def __str__(self) -> str:
        numbers = f"{self.numbers}: " if self.numbers else ""
        return f"{self.name}: {numbers}{self.conclusion}."


@dataclass(frozen=True)
class Section:
    """Verdicts of one kind; ``title`` is empty for the first, on fairness over domains."""

    title: str
    verdicts: Sequence[Verdict]


def verdicts(comparison: Comparison) -> list[Section]:
    """All that may be said of the methods, by every measure and in every comparison."""
    found = measures(comparison)
    fair = against_baselines(comparison, found[0])
    sections = [
        Section("", [verdict(comparison, one, fair[one.name]) for one in comparison.methods])
    ]
    for measure in found[1:]:
        compared = against_baselines(comparison, measure)
        said = [Verdict(name, *sentence(one)) for name, one in compared.items() if one]
        sections.append(Section(f"Against the baselines, {measure.name}", said))
    for title, blocks_of in (("Strategies by local training", by_strategy), *FURTHER):
        whole = blocks_of in (by_strategy, against_plain)  # too many for a sentence each
        for measure in found:
            blocks = blocks_of(comparison, measure)
            said = [v for block in blocks for v in (_on_all if whole else _on_each)(block)]
            sections.append(Section(f"{title}, {measure.name}", said))
    return [
        replace(section, verdicts=_summed_up(section.verdicts))
        for section in sections
        if section.verdicts
    ]


def _summed_up(said: Sequence[Verdict]) -> Sequence[Verdict]:
    """One sentence for all methods of which there are too few seeds to tell anything."""
    few = [verdict for verdict in said if verdict.conclusion.startswith(TOO_FEW)]
    if len(few) < 2:
        return said
    names = join_words([verdict.name for verdict in few])
    together = Verdict(names, "", f"{TOO_FEW}; the tables have the differences")
    return [together, *(verdict for verdict in said if verdict not in few)]


def verdict(comparison: Comparison, method: Method, against: Mapping[str, Contrast]) -> Verdict:
    """The sentence on one method's fairness, on the mean of the last five tested rounds."""
    if not (against or method.fully_tested()):
        return Verdict(method.name, "", "not compared, as not every domain was tested throughout")
    if not against:
        wanted = [TITLES[name] for name in BASELINES if name != method.strategy]
        conclusion = f"no {' or '.join(wanted)} run with the same settings, rounds and seeds"
        others = (comparison.baseline(method, name) for name in BASELINES)
        whole = all(other is None or other.fully_tested() for other in others)
        tested = "" if whole else ", tested on every domain throughout,"
        return Verdict(method.name, "", f"{conclusion}{tested} to compare with")
    worst = [f"{signed(one['MIN'][0])} points against {n}" for n, one in against.items()]
    spread = [signed(one["STD"][0]) for one in against.values()]
    lower = [f"{name}'s" for name, one in against.items() if one["AVG"][1] < 0]
    return Verdict(
        method.name,
        f"worst domain {', '.join(worst)}, STD {' and '.join(spread)} "
        f"({seeds_text(against.values())})",
        conclusion_text(against)
        + (f", with an average below {' and '.join(lower)}" if lower else ""),
    )


def _on_all(block: ContrastGroup) -> list[Verdict]:
    """One sentence for the block."""
    return [Verdict(f"{block.heading} against {block.other}", "", grouped(block.contrasts))]


def _on_each(block: ContrastGroup) -> list[Verdict]:
    """One sentence for each of its contrasts."""
    return [
        Verdict(f"{block.heading}, {name}", *sentence({block.other: one}))
        for name, one in block.contrasts.items()
    ]


def verdict_legend(comparison: Comparison) -> str:
    """What the words of the verdicts mean; empty where nothing was compared."""
    found = measures(comparison)
    by_baselines = any(against_baselines(comparison, found[0]).values())
    if not by_baselines and not any(a(comparison, found[0]) for _, a in FURTHER):
        return ""
    better = "" if len(found) == 1 else " Better or worse: by the figures in brackets."
    return (
        "Differences are paired: mean ± sample standard deviation (ddof 1). One counts when "
        "Student's t test of the pairs, with variances moderated over the methods, has p < 0.05 by "
        "Holm's correction over all methods and figures that are compared with the same method, "
        f"with at least {MIN_PAIRS} pairs. Fairer: the worst domain is higher or STD is lower by "
        "this rule, and neither is worse by it. Equivalent: shown to be within the margins in "
        "brackets, in points, by two one-sided tests. Undecided: neither; in brackets is the "
        "smallest difference that would have been found with 80 % power. Of several seeds on "
        "one federation all this is said of that federation alone."
        f"{better}"
    )


def sentence(contrasts: Mapping[str, Contrast]) -> tuple[str, str]:
    """The figures of one method in words, and what they are worth."""
    numbers = "; ".join(
        ", ".join(f"{figure.name} {signed(difference)}" for figure, difference, _ in one.by_figure)
        + f" points against {name}"
        for name, one in contrasts.items()
    )
    return f"{numbers} ({seeds_text(contrasts.values())})", conclusion_text(contrasts)


def conclusion_text(contrasts: Mapping[str, Contrast]) -> str:
    """What the contrasts of one method are worth: ``fairer (STD) than FedAvg, ...``."""
    parts = []
    for (what, word), names in _by_judgement(contrasts).items():
        if what == UNDECIDED:
            names = [f"{name} (seen from {contrasts[name].seen} on)" for name in names]
        parts.append(f"{what} {word} {' and '.join(names)}")
    return ", ".join(parts)


def grouped(contrasts: Mapping[str, Contrast]) -> str:
    """Who is what in comparison with one and the same: ``fairer (STD) with a, b; ...``."""
    return "; ".join(
        f"{what} with {', '.join(names)}" for (what, _), names in _by_judgement(contrasts).items()
    )


def seeds_text(contrasts: Iterable[Contrast]) -> str:
    """What is paired: ``10 federations``, or ``2 and 3 seeds of federation 0``."""
    found = list(contrasts)
    number, (kind, *of) = seed_counts_text(found), found[0].unit.split(" ", 1)
    return " ".join([number, f"{kind}{'' if number == '1' else 's'}", *of])


def signed(estimate: MeanStd) -> str:
    """A difference with its sign and spread.

    >>> signed(MeanStd(0.5, 0.25, 3)), signed(MeanStd(0.5, float("nan"), 1))
    ('+0.50 ± 0.25', '+0.50')
    """
    mean = format_number(estimate.mean, signed=True)
    return f"{mean} {format_std(estimate.std, estimate.n)}".strip()


def _by_judgement(contrasts: Mapping[str, Contrast]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, one in contrasts.items():
        found.setdefault(one.judgement, []).append(name)
    return found
