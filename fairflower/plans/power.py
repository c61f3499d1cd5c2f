"""Statistical power: which differences a comparison can detect, given earlier runs."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fairflower.config.run import execution_keys
from fairflower.errors import ConfigError, quoted
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.plans.plan import Plan
from fairflower.report import Run
from fairflower.report.contrasts import fairness, paired_differences
from fairflower.report.methods import group_runs
from fairflower.statistics import LEVEL, detectable, needed, needed_for_equivalence

#: Difference in percentage points for which the required number of federations is computed. Of a
#: score that is no fraction, it is the margin of equivalence in the worst domain.
EFFECT = 2.0


class Spread(NamedTuple):
    """Spread of a metric's paired differences from Uniform, in the score's unit."""

    metric: str
    sd: float  # square root of the mean of the methods' variances
    margin: float  # largest difference that counts as equivalent
    methods: int
    unit: str  # what a pair shares: a federation, or a seed of a single federation
    score: Score = ACCURACY  # the primary score
    effect: float = EFFECT  # in the score's unit


class Power(NamedTuple):
    """What a design detects for a metric with 80 % power; differences in the score's unit."""

    spread: Spread
    detectable: float  # smallest detectable difference
    for_difference: int  # number of federations needed to detect a difference of `EFFECT`
    for_equivalence: int  # number of federations needed to show equivalence within the margin


def comparisons_of(plan: Plan) -> int:
    """Return how many methods are compared with uniform weights for the same client."""
    candidates = [config for config in plan.runs if not config.reference]
    methods = {(config.client.label, config.strategy.label) for config in candidates}
    return max(Counter(client for client, _ in methods).values()) - 1


def spreads(runs: Sequence[Run]) -> list[Spread]:
    """Return the spread of paired differences from Uniform: worst domain, STD and average.

    Raises ``ConfigError`` if no method shares two federations or seeds with uniform weights, or
    runs have different primary scores.
    """
    #: Unit of pairs -> name of a metric -> variances, and the margins of equivalence.
    by_unit: dict[str, dict[str, list[tuple[float, float]]]] = {}
    comparisons = group_runs(runs)
    if len(scores := {comparison.score.stated for comparison in comparisons}) > 1:
        raise ConfigError(
            f"The earlier runs have different primary scores ({' | '.join(sorted(scores))}). "
            "Choose runs with the same score with --pilot."
        )
    for comparison in comparisons:
        group = fairness(comparison)
        for method in comparison.methods:
            uniform = comparison.baseline(method, "uniform")
            pairs = paired_differences(method, uniform, group) if uniform else None
            if pairs is None or len(pairs.values[0]) < 2:
                continue
            variances = by_unit.setdefault(method.unit, {})
            rows = zip(group.metrics, pairs.values, pairs.margins, strict=True)
            for metric, values, margin in rows:
                variance = float(np.var(values, ddof=1))
                variances.setdefault(metric.name, []).append((variance, margin))
    if not by_unit:
        raise ConfigError(
            "The spread cannot be estimated from the earlier runs, because no method shares two "
            "federations or seeds with uniform weights. Choose other runs with --pilot."
        )
    # Seeds of one federation lack what varies between federations.
    unit = "federation" if "federation" in by_unit else min(by_unit)
    score, found = comparisons[0].score, []
    for name, pairs_of in by_unit[unit].items():
        square, margin = np.mean(pairs_of, axis=0).tolist()
        found.append(Spread(name, math.sqrt(square), margin, len(pairs_of), unit, score))
    effect = EFFECT if score.unit == "%" else found[0].margin  # that in the worst domain
    return [spread._replace(effect=effect) for spread in found]


def other_settings(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Describe the settings of data, model and rounds in which earlier runs differ from a plan.

    ``data.seed`` and execution settings do not count.
    """
    planned = [config.to_flat() for config in plan.runs]
    differing = []
    for key in [key for key in planned[0] if key not in {"data.seed", *execution_keys()}]:
        if key == "num-server-rounds" or key.startswith(("data.", "model.")):
            wanted = dict.fromkeys(quoted(flat[key]) for flat in planned)
            given = dict.fromkeys(quoted(run.config[key]) for run in runs if key in run.config)
            if others := [value for value in given if value not in wanted]:
                differing.append(f"{key} is {', '.join(others)} instead of {', '.join(wanted)}")
    return differing


def level_of(methods: int, metrics: int = 3) -> float:
    """Return the significance level of each test: 0.05 divided by the number of tests."""
    return LEVEL / max(1, methods * metrics)


def detectable_in_sd(methods: int, federations: int, metrics: int = 3) -> float:
    """Return the smallest detectable difference, in standard deviations of paired differences.

    It is NaN for a single federation. Methods are compared with uniform weights, with a Bonferroni
    correction over methods and metrics. Tests are paired two-sided t tests.

    >>> round(detectable_in_sd(5, 10), 2)
    1.58
    """
    if federations < 2:
        return math.nan
    return detectable(1 / math.sqrt(federations), federations - 1, level_of(methods, metrics))


def design_power(known_spreads: Sequence[Spread], methods: int, federations: int) -> list[Power]:
    """Return, for each metric, what the federations detect and how many would be needed."""
    level = level_of(methods, len(known_spreads))
    in_sd = detectable_in_sd(methods, federations, len(known_spreads))
    return [
        Power(
            *(spread, in_sd * spread.sd),
            needed(spread.sd, spread.effect, level),
            needed_for_equivalence(spread.sd, spread.margin, level),
        )
        for spread in known_spreads
    ]
