"""The gain of taking part: methods against training alone and against pooled data.

A gain is a method's score minus that of a reference (``alone``, ``pooled``), with the sign that
makes positive gains better. Gains of domains are judged in a family of their own over all methods
and domains, as other differences are. Gains of clients are described, not judged, because the
smallest of many gains contains the chance of few test examples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from fairflower.numerics import Vector
from fairflower.numerics.metrics import MIN
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.registry import REFERENCES
from fairflower.report.cells import (
    Cell,
    Group,
    Row,
    Table,
    capitalized,
    format_interval,
    format_number,
    format_std,
    remark,
)
from fairflower.report.contrasts import (
    Contrast,
    ContrastGroup,
    Measure,
    Metric,
    Pairs,
    Verdict,
    judge_family,
    paired_differences,
    verdict_on,
)
from fairflower.report.methods import Comparison, Method
from fairflower.report.reading import Run
from fairflower.report.tables import difference_table, in_points
from fairflower.statistics import MIN_PAIRS, Difference, MeanStd, differences, redrawn

#: Reference -> what methods are compared with, in sentences.
WORDS = {"alone": "training alone", "pooled": "pooled data"}

#: Title of the verdicts.
QUESTION = "Is everyone better off than alone?"

_SIGN = "Positive: the method is better."


def gains(comparison: Comparison) -> list[ContrastGroup]:
    """Return each method's gains by domain, judged in a family for each reference."""
    groups = []
    for name in REFERENCES:
        families: dict[str, dict[str, Pairs]] = {}
        for method, other in _compared(comparison, name):
            measure = _by_domain(comparison, personal=_personal(method, other))
            if pairs := paired_differences(method, other, measure):
                families.setdefault(other.name, {})[method.name] = pairs
        groups += [ContrastGroup(name, o, judge_family(found)) for o, found in families.items()]
    return groups


def gain_tables(comparison: Comparison, groups: Sequence[ContrastGroup]) -> Iterator[Table]:
    """Yield tables of gains by domain and over clients, and where models trained alone serve."""
    for group in groups:
        measure = next(iter(group.contrasts.values())).measure
        rows = {name: [contrast] for name, contrast in group.contrasts.items()}
        title = f"Difference from {WORDS[group.heading]}, {comparison.span()}"
        title = "Gain of taking part: d" + title[1:] if group.heading == "alone" else title
        table = difference_table(title, measure, [""], [("", rows)])
        yield replace(table, caption=f"{_SIGN} {table.caption}")
    rows_of_clients = [
        Row(method.name, remark(method), _cells_of_clients(comparison, method, other))
        for method, other in _compared(comparison, "alone")
    ]
    if rows_of_clients:
        yield Table(
            "Gain of taking part over clients",
            f"The client's score minus that of its model trained alone{in_points(comparison.score)}"
            f", on the same test examples. {_SIGN} Mean over {comparison.replicates}, [95 % "
            "interval] of each number for itself. The smallest gain and the clients that lose (gain"
            f" below 0) also count chance. {_chance(comparison)}",
            ["average gain", "smallest gain", "clients that lose", "of clients"],
            [Group("", rows_of_clients)],
        )
    yield from map(partial(_elsewhere_table, comparison), cross_tested(comparison))


def gain_verdicts(groups: Sequence[ContrastGroup]) -> dict[str, Sequence[Verdict]]:
    """Return a sentence on each method: which domains gain by taking part, and which lose."""
    found = [
        verdict_on(name, {WORDS["alone"]: contrast}, added=_answer(contrast))
        for group in groups
        if group.heading == "alone"
        for name, contrast in group.contrasts.items()
    ]
    return {QUESTION: found} if found else {}


def cross_tested(comparison: Comparison) -> list[Method]:
    """Return the methods whose clients' own models were tested on all domains."""
    return [m for m in comparison.methods if all(_has_elsewhere(run) for run in m.runs)]


def elsewhere(run: Run) -> Vector:
    """Return scores [D, D] in the last round: of models trained alone at a domain, on each domain.

    They are means over the domain's tested clients.
    """
    found = run.cross_tests
    where = [[client.domain == domain for client in run.clients] for domain in run.domains]
    return np.array([np.nanmean(found[there], axis=0) for there in where])


# --- pairs ----------------------------------------------------------------------------


def _compared(comparison: Comparison, name: str) -> Iterator[tuple[Method, Method]]:
    """Yield each method with the comparable reference, whatever its way to train."""
    others = [method for method in comparison.methods if method.reference == name]
    for method in comparison.methods:
        other = next((other for other in others if method.comparable_with(other)), None)
        if other and method.reference not in ("alone", name):
            yield method, other


def _personal(method: Method, other: Method) -> bool:
    """Return whether clients tested personal models of both; the reference's are its own models."""
    return all(run.personal.rounds.size for run in (*method.runs, *other.runs))


def _by_domain(comparison: Comparison, personal: bool) -> Measure:
    """Return the measure of each domain's score, with a sign that makes higher values better."""
    score = comparison.score

    def value(run: Run, d: int) -> float:
        return score.better * float((run.personal if personal else run).final()[d])

    def slope(accuracy: Vector, d: int) -> Vector:
        return np.eye(len(accuracy))[d]

    metrics = [
        Metric(
            *(domain, 1, score.unit, score.low, score.high),
            margin=MIN.margin * (score.margin or 1.0),
            digits=score.digits,
            of=partial(value, d=d),
            gradient=partial(slope, d=d) if score == ACCURACY else None,
            scale=None if score.margin else partial(value, d=d),
        )
        for d, domain in enumerate(comparison.domains)
    ]
    words = "better off", "worse off"
    return Measure(f"{score.phrase} by domain", metrics, comparison.methods, words)


def _answer(contrast: Contrast) -> str:
    """Return the end of a verdict: whether all domains gain, and which would do better alone."""
    signs = {one.metric.name: one.sign for one in contrast.by_metric}
    if contrast.n < MIN_PAIRS:
        return ""
    if losing := [name for name, sign in signs.items() if sign < 0]:
        return f"; {', '.join(losing)} would do better alone"
    if all(sign > 0 for sign in signs.values()):
        return "; every domain gains"
    return "; no domain is shown to lose"


# --- clients --------------------------------------------------------------------------


def client_gains(method: Run, alone: Run, personal: bool = False) -> Vector:
    """Return each client's gain [K] in the score's unit; NaN if its own model was not tested.

    These are scores of the client on its own test examples, if all clients tested both models.
    Otherwise, both are scores on the test examples of the client's domain.
    """
    if personal:
        scores = method.personal_by_client.final(), alone.personal_by_client.final()
    elif method.all_clients_tested and alone.all_clients_tested:
        scores = method.by_client.final(), alone.by_client.final()
    else:
        places = [method.domains.index(client.domain) for client in method.clients]
        scores = method.final()[places], alone.own_models.final()
    score, same = method.primary, np.isclose(*scores, rtol=1e-6)  # summaries round
    return np.where(same, 0.0, score.better * score.shown(scores[0] - scores[1]))


def _cells_of_clients(comparison: Comparison, method: Method, alone: Method) -> list[Cell]:
    """Return the average and smallest gain of clients, and how many lose, with intervals."""
    others = {run.replicate: run for run in alone.runs}
    pairs = [(run, others[run.replicate]) for run in method.runs if run.replicate in others]
    personal = _personal(method, alone)
    found = [gains[np.isfinite(gains)] for gains in (client_gains(*p, personal) for p in pairs)]
    found = [gains for gains in found if gains.size]
    if not found:
        return [Cell("\N{EN DASH}")] * 4
    score = comparison.score
    clients = Score("clients", 0, "", high=math.inf, digits=1)
    rows: list[tuple[Score, Callable[[Vector], float]]] = [
        (score, lambda gains: float(gains.mean())),
        (score, lambda gains: float(gains.min())),
        (clients, lambda gains: float((gains < 0).sum())),
    ]
    cells = [_described(of, [value(gains) for gains in found], method) for of, value in rows]
    sizes = sorted({len(gains) for gains in found})
    return [*cells, Cell("\N{EN DASH}".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))))]


def _described(score: Score, values: Sequence[float], method: Method) -> Cell:
    one: Difference = redrawn(differences({"": values})[""], method.overlap)
    signed = score.name != "clients"
    text = format_number(one.mean, score.digits, signed=signed)
    if math.isnan(one.low):
        return Cell(text)
    return Cell(text, format_interval(one.low, one.high, score.largest, score.digits))


def _chance(comparison: Comparison) -> str:
    """Say how much the fewest test examples of a client say about its gain; empty if unknown."""
    run = comparison.methods[0].runs[0]
    parts = {
        domain: size // (1 if _has_own(comparison) else max(1, len(of)))
        for domain, size in zip(run.domains, run.sizes, strict=False)
        for of in [[c for c in run.clients if c.domain == domain]]
    }
    if not parts or not all(parts.values()):
        return ""
    domain = min(parts, key=parts.__getitem__)
    text = f"A client of {domain} has {parts[domain]} test examples"
    if not comparison.classes:
        return f"{text}."
    alone = next(m for m in comparison.methods if m.reference == "alone")
    p = alone.over_seeds(lambda run: float(run.final()[run.domains.index(domain)])).mean
    error = 100 * math.sqrt(2 * p * (1 - p) / parts[domain])
    return f"{text}, so its gain in one round has a standard error of up to {error:.1f} points."


def _has_own(comparison: Comparison) -> bool:
    """Return whether models trained alone were tested on all test examples of a domain."""
    return any(run.own_models.rounds.size for run in comparison.kept_runs)


def _has_elsewhere(run: Run) -> bool:
    return bool(len(run.domains) > 1 and run.own_models.rounds.size and run.cross_tests.size)


def _elsewhere_table(comparison: Comparison, method: Method) -> Table:
    """Return the table of models trained alone by domain, tested on each domain."""
    score = comparison.score
    values = score.shown(np.array([elsewhere(run) for run in method.runs]))
    size = len(comparison.domains)
    cells = [[Cell("")] * size for _ in range(size)]
    for d, e in product(range(size), repeat=2):
        one = MeanStd.of(values[:, d, e].tolist())
        text, spread = format_number(one.mean, score.digits), format_std(one.std, one.n)
        cells[d][e] = Cell(text, spread, "best" if d == e else "")
    return Table(
        f"Trained at, tested on: {method.name}, last round ({method.runs[0].last_round})",
        f"{capitalized(score.stated)}, of the models that each client trained alone: mean over the "
        f"clients of the domain in the row, on all {comparison.examples} examples of the domain in "
        f"the column. Bold: trained at the domain itself. ±: standard deviation over "
        f"{comparison.replicates} (ddof 1).",
        list(comparison.domains),
        [Group("", [Row(d, "", c) for d, c in zip(comparison.domains, cells, strict=True)])],
        heading="trained at",
    )
