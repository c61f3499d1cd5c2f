"""Simulate how often a table of differences makes false claims, and how often it detects an effect.

    python benchmarks/error_rates.py [--tables 4000] [--write experiments/error-rates.md]
    python benchmarks/error_rates.py --over-benchmarks [...]

Draws tables of paired differences with known effects, and counts the verdicts of
`fairflower.statistics`. The accuracy of a method on its worst domain, in points, is the sum of its
effect, of an interaction of method and federation (SD 0.9 per difference) and of a run's noise
(SD 2.0). Both SDs were measured on Digits with 8 federations and 3 seeds each. All methods are
compared with the same reference. With unequal spreads, the noise's SD is multiplied by exp(0.3 z)
for each method; a volatile method has four times the SD.

In tables of mixed truths, half of the methods are truly like the reference and half truly better by
the margin of equivalence, which is given in standard errors of a mean difference.

With --over-benchmarks, a replicate is a benchmark, and the verdicts are those over benchmarks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from common import log_progress, machine_facts, markdown
from numpy.typing import NDArray

from experiments.leaderboard.benchmarks import mixed_model, over_benchmarks
from fairflower.statistics import Difference, differences, holm, judged_as_family

#: Standard deviations in points: of the interaction of method and federation, and of a run's noise.
FEDERATION, RUN = 0.9 / np.sqrt(2), 2.0
#: Largest difference in points at which two methods count as equivalent.
MARGIN = 2.0
METHODS, REPLICATES = (2, 3, 10, 39), (5, 10, 24)

Judge = Callable[[Mapping[int, Difference]], float]


def table(
    rng: np.random.Generator,
    methods: int,
    replicates: int,
    *,
    effect: float = 0.0,
    unequal: bool = False,
    volatile: bool = False,
    one_federation: bool = False,
) -> NDArray[np.float64]:
    """Draw differences from the reference, [methods, replicates], with true mean ``effect``.

    With ``one_federation``, all replicates are seeds on a single federation, so that they share the
    interaction of method and federation. Otherwise each replicate is another federation.
    """
    scale = np.exp(0.3 * unequal * rng.normal(size=(methods + 1, 1)))
    if volatile:
        scale[-1] = 4.0
    interaction = rng.normal(size=(methods + 1, 1 if one_federation else replicates))
    runs = FEDERATION * interaction + RUN * scale * rng.normal(size=(methods + 1, replicates))
    return effect + runs[1:] - runs[0]


def share(judge: Judge, tables: int, seed: int, methods: int, replicates: int, **design) -> float:
    """Return the mean of ``judge`` over simulated tables, in percent."""
    rng = np.random.default_rng([seed, methods, replicates])
    return mean_judgment(
        judge,
        lambda values: judged_as_family(differences(values, MARGIN)),
        (table(rng, methods, replicates, **design) for _ in range(tables)),
    )


def mean_judgment(
    judge: Judge,
    analysis: Callable[[dict[int, NDArray[np.float64]]], Mapping[int, Difference]],
    drawn: Iterable[NDArray[np.float64]],
) -> float:
    """Return the mean of ``judge`` over drawn tables of differences, in percent."""
    return 100 * float(np.mean([judge(analysis(dict(enumerate(values)))) for values in drawn]))


def any_claim(judged: Mapping[int, Difference]) -> float:
    """Return 1 if the table calls any method better or worse, else 0."""
    return float(any(difference.sign for difference in judged.values()))


def any_equivalent(judged: Mapping[int, Difference]) -> float:
    """Return 1 if the table calls any method equivalent, else 0."""
    return float(any(difference.equivalent for difference in judged.values()))


def called_better(judged: Mapping[int, Difference]) -> float:
    """Return the fraction of methods that the table calls better."""
    return sum(difference.sign > 0 for difference in judged.values()) / len(judged)


def called_equivalent(judged: Mapping[int, Difference]) -> float:
    """Return the fraction of methods that the table calls equivalent."""
    return sum(difference.equivalent for difference in judged.values()) / len(judged)


def any_false(judged: Mapping[int, Difference]) -> float:
    """Return 1 if any verdict of a table of mixed truths is false, else 0.

    Methods with even numbers are truly alike, and those with odd numbers better by the margin.
    """
    return float(
        any(
            one.sign < 0 or one.equivalent if number % 2 else one.sign
            for number, one in judged.items()
        )
    )


#: Title, judge, fraction of the requested tables to draw, and options of `table`.
COLUMNS: tuple[tuple[str, Judge, float, dict[str, float | bool]], ...] = (
    ("false claim", any_claim, 1.0, {}),
    ("same, unequal spreads", any_claim, 1.0, {"unequal": True}),
    ("same, one volatile", any_claim, 0.25, {"volatile": True}),
    ("false equivalence", any_equivalent, 1.0, {"effect": MARGIN}),
    ("seeds on one federation", any_claim, 0.25, {"one_federation": True}),
    ("2 points found", called_better, 0.25, {"effect": 2.0}),
    ("4 points found", called_better, 0.25, {"effect": 4.0}),
    ("0 points equivalent", called_equivalent, 0.25, {}),
)


def rows(tables: int, seed: int) -> list[list[str]]:
    """Return a row for each number of methods and replicates, with a percentage per column."""
    result = []
    for methods, replicates in product(METHODS, REPLICATES):
        log_progress(f"{methods} methods, {replicates} replicates")
        cells = [
            f"{share(judge, max(1, int(part * tables)), seed, methods, replicates, **design):.1f}"
            for _, judge, part, design in COLUMNS
        ]
        result.append([str(methods), str(replicates), *cells])
    return result


#: Numbers of methods in tables of mixed truths, replicates, and margins in standard errors.
MIXED, MIXED_REPLICATES, MARGINS = (2, 4, 10), 24, (3.0, 3.3, 3.6)


def each_alone(alone: Mapping[int, Difference]) -> dict[int, Difference]:
    """Judge differences and equivalences as two families, each by Holm's method."""
    p, same = (holm({k: getattr(d, name) for k, d in alone.items()}) for name in ("p", "p_same"))
    return {key: replace(one, p=p[key], p_same=same[key]) for key, one in alone.items()}


def judged_by(values, *, judge, margin: float) -> Mapping[int, Difference]:
    """Return the differences of a table, judged by ``judge``."""
    return judge(differences(values, margin))


def rows_of_mixed_truths(tables: int, seed: int) -> list[list[str]]:
    """Return a row for each number of methods and margin: false verdicts in percent."""
    error = np.sqrt(2 * (FEDERATION**2 + RUN**2) / MIXED_REPLICATES)
    result = []
    for methods, wide in product(MIXED, MARGINS):
        log_progress(f"mixed truths, {methods} methods, margin {wide}")
        effects = wide * error * (np.arange(methods)[:, None] % 2)
        cells = []
        for judge in (judged_as_family, each_alone):
            analysis = partial(judged_by, judge=judge, margin=wide * error)
            rng = np.random.default_rng([seed, methods, MIXED_REPLICATES])
            drawn = (effects + table(rng, methods, MIXED_REPLICATES) for _ in range(tables))
            cells.append(f"{mean_judgment(any_false, analysis, drawn):.1f}")
        result.append([str(methods), f"{wide:.1f}", *cells])
    return result


#: Number of methods on a leaderboard, its numbers of independent data sets, and the standard
#: deviation of a method's gain over these, in points: the median on its first four.
CONFIRMED, DATA_SETS, BETWEEN = 12, (5, 6), 0.85

ANALYSES = {"Student, closed test": over_benchmarks, "mixed model, Dunnett": mixed_model}

#: Title, judge and true gain in points.
OVER_BENCHMARKS: tuple[tuple[str, Judge, float], ...] = (
    ("false claim", any_claim, 0.0),
    ("false equivalence", any_equivalent, MARGIN),
    ("2 points found", called_better, 2.0),
    ("4 points found", called_better, 4.0),
    ("0 points equivalent", called_equivalent, 0.0),
)


def rows_over_benchmarks(tables: int, seed: int) -> list[list[str]]:
    """Return a row for each number of data sets, kind of variances and analysis."""
    result = []
    for data_sets, volatile, (name, analysis) in product(
        DATA_SETS, (False, True), ANALYSES.items()
    ):
        log_progress(f"{data_sets} data sets, volatile: {volatile}, {name}")
        cells = []
        for _, judge, gain in OVER_BENCHMARKS:
            rng = np.random.default_rng([seed, data_sets, volatile])
            spread = np.full((CONFIRMED + 1, 1), BETWEEN / np.sqrt(2))
            spread[-1] *= 4.0 if volatile else 1.0
            means = (spread * rng.normal(size=(CONFIRMED + 1, data_sets)) for _ in range(tables))
            drawn = (gain + values[1:] - values[0] for values in means)
            cells.append(f"{mean_judgment(judge, partial(analysis, margin=MARGIN), drawn):.1f}")
        result.append([str(data_sets), "one volatile" if volatile else "equal", name, *cells])
    return result


def main() -> None:
    """Print the table, and write its part of the document if --write is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=4000, help="simulated tables per error rate")
    parser.add_argument("--seed", type=int, default=2026, help="seed of the draws")
    parser.add_argument("--write", type=Path, help="Markdown file to write")
    parser.add_argument("--over-benchmarks", action="store_true", help="the second table")
    args = parser.parse_args()
    mixed = ""
    if args.over_benchmarks:
        header = ["data sets", "variances", "analysis", *(title for title, *_ in OVER_BENCHMARKS)]
        text = markdown(header, rows_over_benchmarks(args.tables, args.seed))
    else:
        header = ["methods", "replicates", *(title for title, *_ in COLUMNS)]
        text = markdown(header, rows(args.tables, args.seed))
        header = ["methods", "margin", "any false verdict", "any, if two families"]
        mixed = markdown(header, rows_of_mixed_truths(args.tables, args.seed))
    print(text, mixed, sep="\n\n")
    if args.write:
        error = 100 * (0.05 * 0.95 / args.tables) ** 0.5
        facts = {
            "table": text,
            "mixed": mixed,
            "error": error,
            "machine": machine_facts(),
            **vars(args),
        }
        first, heading, second = args.write.read_text("utf-8").partition(HEADING)
        if args.over_benchmarks:
            heading, second = HEADING, PART_OVER_BENCHMARKS.format(**facts)
        else:
            first = DOCUMENT.format(**facts)
        args.write.write_text(first + heading + second, encoding="utf-8")


DOCUMENT = """# Error rates and power of the verdicts

In short: at most 6 % of tables with one baseline have a false "better" or "worse".

    python benchmarks/error_rates.py --tables {tables} --seed {seed} --write {write}

In percent. {machine}.

{table}

- **False claim**: share of tables in which any method is called better or worse than the
  reference, where all are truly alike over federations. Each replicate is a federation. Wanted:
  at most 6. Standard error of a rate of 5 % over {tables} tables: {error:.1f}. The column
  "one volatile" and those after "false equivalence" have a quarter of the tables, and twice the
  error.
- **Unequal spreads**: the same, with a run's standard deviation multiplied by exp(0.3 z) per
  method.
- **One volatile**: the same, with four times the standard deviation for one method.
- **False equivalence**: share of tables in which any method is called equivalent within 2 points,
  where all truly differ by 2.
- **Seeds on one federation**: share of tables with a claim where replicates are seeds on one and
  the same federation and methods are truly alike over federations. What is claimed may hold of
  that federation; a report of such runs says for which federation it speaks.
- **Found, equivalent**: share of the methods that are called better where all are truly better by
  2 or 4 points, and that are called equivalent where all are truly alike.

Pairs' standard deviation: 2.97 points (a run 2.0, a method on a federation 0.64, each of the
method and of the reference).

## Mixed truths

{mixed}

Share of tables with any false verdict, in percent, where half of the methods are truly alike and
half truly better by the margin of equivalence (in standard errors of a mean difference; 2 points
are 3.3), with 24 replicates, over {tables} tables. The last column is for comparison: Holm's method
over the differences and, separately, over the equivalences, as verdicts were made before
2026-11-29. Both kinds of tests are now one family, in which of the null hypotheses "no difference"
and "a difference of at least the margin" of a method at most one is true.
"""

HEADING = "\n## Over benchmarks\n"

PART_OVER_BENCHMARKS = """
    python benchmarks/error_rates.py --over-benchmarks --tables {tables} --seed {seed} \\
      --write {write}

In percent, 12 methods. {machine}.

{table}

A replicate is an independent data set, and a gain's standard deviation over data sets is 0.85
points (one volatile: 2.5 for one method). Standard error of a rate of 5 % over {tables} tables:
{error:.1f}. The leaderboard's conclusions over benchmarks are those of Student's tests, because
one volatile method makes the mixed model claim too much.
"""


if __name__ == "__main__":
    main()
