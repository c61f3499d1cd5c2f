"""The gain of taking part: methods against training alone, and against pooled data.

A gain is a method's score minus that of a reference, with the sign that makes positive gains
better. Gains of domains are judged in a family of their own, over all methods and domains. Of the
clients' gains only the average is judged: the smallest of many gains contains chance.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fairflower.config.run import PROTECTION
from fairflower.config.text import join_words
from fairflower.numerics import Vector
from fairflower.numerics.metrics import MIN
from fairflower.numerics.scores import ACCURACY
from fairflower.report.cells import Group, Row, Table, capitalized, judged_cell
from fairflower.report.contrasts import (
    UNDECIDED,
    Contrast,
    ContrastGroup,
    Measure,
    Metric,
    Pairs,
    Verdict,
    judge_family,
    paired_differences,
    verdict_on,
    with_few_summed_up,
)
from fairflower.report.methods import Comparison, Method
from fairflower.report.reading import Run
from fairflower.report.tables import difference_table
from fairflower.statistics import MeanStd

#: Reference -> what methods are compared with, in sentences.
WORDS = {"alone": "training alone", "pooled": "pooled data"}

#: Title of the verdicts.
QUESTION = "Is everyone better off than alone?"

BY_DOMAIN, OVER_CLIENTS = "by domain", "over clients"


def gains(comparison: Comparison) -> list[ContrastGroup]:
    """Return each method's gains over references, whatever its local training, in families."""
    groups = []
    for name, paired in (("alone", _by_domain), ("alone", _over_clients), ("pooled", _by_domain)):
        families: dict[str, dict[str, Pairs]] = {}
        for method, other in _compared(comparison, name):
            if pairs := paired(comparison, method, other, _personal(method, other)):
                families.setdefault(other.name, {})[method.name] = pairs
        groups += [ContrastGroup(name, o, judge_family(found)) for o, found in families.items()]
    return groups


def gain_tables(comparison: Comparison, groups: Sequence[ContrastGroup]) -> Iterator[Table]:
    """Yield tables of gains by domain and over clients, and where models trained alone serve."""
    for group in groups:
        measure = _measure(group)
        rows = {name: [contrast] for name, contrast in group.contrasts.items()}
        title = f"Difference from {WORDS[group.heading]}, {measure.name}, {comparison.span()}"
        table = difference_table(title, measure, [""], [("", rows)])
        added = _on_clients(comparison) if measure.name == OVER_CLIENTS else ""
        pairs = _compared(comparison, group.heading)
        if kept := [m.name for m, other in pairs if m.name in rows and _personal(m, other)]:
            added += f" Personal models: {join_words(kept)}."
        yield replace(table, caption=f"Positive: the method is better. {table.caption}{added}")
    yield from map(partial(_elsewhere_table, comparison), cross_tested(comparison))


def gain_verdicts(groups: Sequence[ContrastGroup]) -> dict[str, Sequence[Verdict]]:
    """Return a sentence on each method: which domains are better off, worse, or neither."""
    found = [
        verdict_on(name, {WORDS["alone"]: contrast}, added=_neither(contrast))
        for group in groups
        if (group.heading, _measure(group).name) == ("alone", BY_DOMAIN)
        for name, contrast in group.contrasts.items()
    ]
    return {QUESTION: with_few_summed_up(found)} if found else {}


def _neither(contrast: Contrast) -> str:
    """Name the domains that are neither better nor worse off, if others are."""
    found = [(one.verdict, one.metric.name) for one in contrast.by_metric]
    named = ((word, [n for v, n in found if v == word]) for word in ("equivalent", UNDECIDED))
    some = any(word in ("better", "worse") for word, _ in found)
    return "".join(f", {word} ({', '.join(names)})" for word, names in named if names and some)


def _measure(group: ContrastGroup) -> Measure:
    return next(iter(group.contrasts.values())).measure


def _compared(comparison: Comparison, name: str) -> Iterator[tuple[Method, Method]]:
    """Yield each method with the comparable reference, whatever its training and protection.

    Of methods whose global model lacks a part, personal models have to be tested.
    """
    others = [method for method in comparison.methods if method.reference == name]
    for method in comparison.methods:
        whole = not method.runs[0].info.get("local_arrays")
        for other in [o for o in others if method.comparable_with(o, PROTECTION)][:1]:
            if method.reference not in ("alone", name) and (whole or _personal(method, other)):
                yield method, other


def _personal(method: Method, other: Method) -> bool:
    """Return whether the clients' personal models are compared: if both methods have them."""
    return all(run.personal.rounds.size for run in (*method.runs, *other.runs))


def _by_domain(
    comparison: Comparison, method: Method, other: Method, personal: bool
) -> Pairs | None:
    """Return the gains in each domain, of the clients' personal models if both were tested."""
    score = comparison.score

    def value(run: Run, d: int) -> float:
        return score.better * float((run.personal if personal else run).final()[d])

    metrics = [
        Metric(
            *(domain, 1, score.unit, score.low, score.high),
            margin=MIN.margin * (score.margin or 1.0),
            declared=1.0,
            digits=score.digits,
            of=partial(value, d=d),
            gradient=(lambda of, d=d: np.eye(len(of))[d]) if score == ACCURACY else None,  # type: ignore[misc]
            scale=None if score.margin else partial(value, d=d),
        )
        for d, domain in enumerate(comparison.domains)
    ]
    words = "better off", "worse off"
    return paired_differences(method, other, Measure(BY_DOMAIN, metrics, comparison.methods, words))


# --- clients --------------------------------------------------------------------------


def client_gains(run: Run, alone: Run, personal: bool = False) -> Vector:
    """Return each client's gain [K] in the score's unit; NaN if its own model was not tested.

    Both scores are on the client's own test examples if all clients tested both models; otherwise,
    on all those of its domain.
    """
    if personal:
        scores = run.personal_by_client.final(), alone.personal_by_client.final()
    elif run.all_clients_tested and alone.all_clients_tested:
        scores = run.by_client.final(), alone.by_client.final()
    else:
        places = [run.domains.index(client.domain) for client in run.clients]
        scores = run.final()[places], alone.own_models.final()
    gain = run.primary.better * run.primary.shown(scores[0] - scores[1])
    return np.where(np.isclose(*scores, rtol=1e-6), 0.0, gain)  # summaries round


def _over_clients(
    comparison: Comparison, method: Method, other: Method, personal: bool
) -> Pairs | None:
    """Return the clients' average and smallest gain, and the number of clients that lose."""
    theirs = {run.replicate: run for run in other.runs}
    pairs = [(run, theirs[run.replicate]) for run in method.runs if run.replicate in theirs]
    found = [gain[np.isfinite(gain)] for gain in (client_gains(*p, personal) for p in pairs)]
    found = [gain for gain in found if gain.size]
    score, unused = comparison.score, partial(float, math.nan)
    reach = (score.high - score.low) / 2  # so that no interval is wider than the score's range
    unit = score.unit, -reach, reach
    most = 2 * max(len(run.clients) for run in method.runs)  # intervals may end beyond the number
    metrics = [
        Metric("average gain", 1, *unit, digits=score.digits, of=unused),
        Metric("smallest gain", 0, *unit, digits=score.digits, of=unused),
        Metric("clients that lose", 0, "", high=most, digits=1, of=unused),
    ]
    values = zip(*((g.mean(), g.min(), float((g < 0).sum())) for g in found), strict=True)
    measure = Measure(OVER_CLIENTS, metrics, comparison.methods)
    columns = tuple(tuple(map(float, column)) for column in values)
    return Pairs(measure, method, columns, (0.0,) * 3, (math.nan,) * 3) if found else None


def _on_clients(comparison: Comparison) -> str:
    """Say how many clients there are, and how much the fewest test examples say of a gain."""
    run = next(method for method in comparison.methods if method.reference == "alone").runs[0]
    apart = run.all_clients_tested  # then each was tested on its own examples
    tested = 0 if apart else np.isfinite(run.own_models.final()).sum()
    text = f" Of {tested or len(run.clients)} clients. The smallest gain and the clients that lose "
    text += "(gain below 0) also count chance"
    beside = Counter(client.domain for client in run.clients if apart)
    sizes = [n // max(1, beside[d]) for d, n in zip(run.domains, run.sizes, strict=False)]
    if not sizes or not all(sizes):
        return f"{text}."
    d = int(np.argmin(sizes))
    text += f": a client of {run.domains[d]} has only {sizes[d]} test examples"
    if not comparison.classes:
        return f"{text}."
    error = 100 * math.sqrt(0.5 / sizes[d])  # of the difference of two accuracies of one half
    return f"{text}, which alone give a gain a standard error of up to {error:.1f} points."


# --- models on other domains ----------------------------------------------------------


def cross_tested(comparison: Comparison) -> list[Method]:
    """Return the methods whose clients' own models were tested on several domains."""
    several = len(comparison.domains) > 1
    return comparison.having(lambda run: several and run.cross_tests.size)


def elsewhere(method: Method) -> tuple[Vector, list[int], list[int]]:
    """Return scores [R, D, D] of R runs, and the rows and columns with one off the diagonal.

    A score, or NaN, is the mean over a domain's clients (row) on each domain (column).
    """
    found = []
    for run in method.runs:
        where = [[client.domain == domain for client in run.clients] for domain in run.domains]
        tests = np.ma.masked_invalid(run.cross_tests)
        found.append([tests[there].mean(axis=0).filled(math.nan) for there in where])
    values = np.array(found)
    off = np.isfinite(values).any(0) & ~np.eye(len(values[0]), dtype=bool)
    return values, np.flatnonzero(off.any(1)).tolist(), np.flatnonzero(off.any(0)).tolist()


def _elsewhere_table(comparison: Comparison, method: Method) -> Table:
    """Return the table of models trained alone by domain, tested on each domain."""
    score, names, rows = comparison.score, comparison.domains, []
    values, there, columns = elsewhere(method)
    for d in there:
        cells = []
        for column in columns:
            estimate = MeanStd.of(score.shown(values[:, d, column]).tolist())
            cell = judged_cell(estimate, 0, score.digits)
            cells.append(replace(cell, tone="best") if column == d else cell)
        rows.append(Row(names[d], "", cells))
    kept, untested = ([n for d, n in enumerate(names) if d not in of] for of in (there, columns))
    absent = f" No row: {join_words(kept)} (no model was shared)." if kept else ""
    absent += f" No column: {join_words(untested)} (no other model was tested)." if untested else ""
    spread = f" ±: standard deviation over {comparison.replicates} (ddof 1)." * (len(values) > 1)
    return Table(
        f"Trained at, tested on: {method.name}, last round ({method.runs[0].last_round})",
        f"{capitalized(score.stated)}, of the models that clients trained alone: mean over the "
        f"clients of the domain in the row, on all {comparison.examples} examples of the domain in "
        f"the column. Bold: trained at this domain.{spread}{absent}",
        [names[d] for d in columns],
        [Group("", rows)],
        heading="trained at",
    )
