"""How often a table of differences claims what is not there, and finds what is.

    python benchmarks/error_rates.py [--tables 4000] [--write experiments/error-rates.md]

Draws tables of paired differences with known effects and counts what `fairflower.statistics` says
of them. A method's worst domain, in points, is the sum of its effect, what suits it of a federation
(SD 0.9 per difference), and the rest of a run (SD 2.0): measured on Digits with 8 federations and 3
seeds each. All methods are compared with one and the same other. With unequal spreads the rest's SD
is multiplied by exp(0.3 z) per method; a volatile method has four times this SD.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import numpy as np
from common import machine_facts, markdown, say
from numpy.typing import NDArray

from fairflower.statistics.differences import Difference, differences, judged_as_family

#: Standard deviations in points: of a method on a federation, and of a run there.
FEDERATION, RUN = 0.9 / np.sqrt(2), 2.0
#: Within which two methods count as equivalent.
MARGIN = 2.0
METHODS, REPLICATES = (2, 10, 39), (5, 10, 24)

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
    """Differences from the reference, [methods, replicates], each truly ``effect``.

    With ``one_federation`` all replicates are seeds on it, so that what suits a method there is in
    every pair; else each replicate is a federation of its own.
    """
    scale = np.exp(0.3 * unequal * rng.normal(size=(methods + 1, 1)))
    if volatile:
        scale[-1] = 4.0
    suits = rng.normal(size=(methods + 1, 1 if one_federation else replicates))
    runs = FEDERATION * suits + RUN * scale * rng.normal(size=(methods + 1, replicates))
    return effect + runs[1:] - runs[0]


def share(judge: Judge, tables: int, seed: int, methods: int, replicates: int, **design) -> float:
    """The mean of what ``judge`` says of so many tables, in percent."""
    rng = np.random.default_rng([seed, methods, replicates])
    counted = 0.0
    for _ in range(tables):
        values = table(rng, methods, replicates, **design)
        counted += judge(judged_as_family(differences(dict(enumerate(values)), MARGIN)))
    return 100 * counted / tables


def any_told(judged: Mapping[int, Difference]) -> float:
    """1 if the table calls any method better or worse."""
    return float(any(one.sign for one in judged.values()))


def any_same(judged: Mapping[int, Difference]) -> float:
    """1 if the table calls any method equivalent."""
    return float(any(one.equivalent for one in judged.values()))


def told_better(judged: Mapping[int, Difference]) -> float:
    """Share of the methods that the table calls better."""
    return sum(one.sign > 0 for one in judged.values()) / len(judged)


def told_same(judged: Mapping[int, Difference]) -> float:
    """Share of the methods that the table calls equivalent."""
    return sum(one.equivalent for one in judged.values()) / len(judged)


#: Title, what is counted, its share of the tables asked for, and the design.
COLUMNS: tuple[tuple[str, Judge, float, dict[str, float | bool]], ...] = (
    ("false claim", any_told, 1.0, {}),
    ("same, unequal spreads", any_told, 1.0, {"unequal": True}),
    ("same, one volatile", any_told, 0.25, {"volatile": True}),
    ("false equivalence", any_same, 1.0, {"effect": MARGIN}),
    ("seeds on one federation", any_told, 0.25, {"one_federation": True}),
    ("2 points found", told_better, 0.25, {"effect": 2.0}),
    ("4 points found", told_better, 0.25, {"effect": 4.0}),
    ("0 points equivalent", told_same, 0.25, {}),
)


def rows(tables: int, seed: int) -> list[list[str]]:
    """A row for each number of methods and replicates, a percentage for each of `COLUMNS`."""
    found = []
    for methods, replicates in product(METHODS, REPLICATES):
        say(f"{methods} methods, {replicates} replicates")
        cells = [
            f"{share(judge, max(1, int(part * tables)), seed, methods, replicates, **design):.1f}"
            for _, judge, part, design in COLUMNS
        ]
        found.append([str(methods), str(replicates), *cells])
    return found


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=4000, help="tables drawn for an error rate")
    parser.add_argument("--seed", type=int, default=2026, help="seed of the draws")
    parser.add_argument("--write", type=Path, help="Markdown file to write it to")
    args = parser.parse_args()
    header = ["methods", "replicates", *(title for title, *_ in COLUMNS)]
    text = markdown(header, rows(args.tables, args.seed))
    print(text)
    if args.write:
        error = 100 * (0.05 * 0.95 / args.tables) ** 0.5
        facts = {"table": text, "error": error, "machine": machine_facts(), **vars(args)}
        args.write.write_text(DOCUMENT.format(**facts), encoding="utf-8")


DOCUMENT = """# Error rates and power of the verdicts

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
"""


if __name__ == "__main__":
    main()
