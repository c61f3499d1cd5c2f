"""Fairness between groups of people, from six counts for each group.

A binary model predicts labels of people who belong to G groups, for example men and women. Each
client counts its people, and the sums of the counts over clients give the **global** metric
exactly. The same functions give a client's **local** metric from its counts. Both matter, because a
model can be fair on the pooled data and unfair on every client.

A metric is undefined (NaN) if a rate of a group is 0/0. For example, equal opportunity is undefined
if nobody in a group has a positive label. (fairlearn sets these rates to 0.)

Examples
--------
>>> from fairflower.numerics.group_fairness import METRICS, counts_by_group
>>> labels, predicted = [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0]
>>> counts = counts_by_group(labels, predicted, groups=5 * [0] + 7 * [1], num_groups=2)
>>> counts.tolist()
[[5, 3, 3, 2, 2, 1], [7, 2, 2, 1, 5, 1]]
>>> METRICS[0].name
'demographic_parity_difference'
>>> round(METRICS[0](counts), 4)
0.3143
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairflower.numerics import Vector
from fairflower.numerics.scores import Score

Counts = NDArray[Any]  # [G, 6]

#: Counts of a group: people; prediction 1; label 1; both 1; label 0; prediction 1 with label 0.
COUNTS = ("people", "selected", "positive", "true_positive", "negative", "false_positive")

#: Rate of a group -> its counts in numerator and denominator, and what is said of a group for which
#: the latter is 0.
RATES = {
    "selection": (1, 0, "nobody is"),  # P(Y' = 1)
    "true_positive": (3, 2, "no label {positive} among"),  # P(Y' = 1 | Y = 1)
    "false_positive": (5, 4, "every label is {positive} among"),  # P(Y' = 1 | Y = 0)
}

#: Record in a client's reply to a test. Its list ``counts`` has six numbers for each group.
GROUP_COUNTS = "group-counts"


def counts_by_group(
    labels: ArrayLike, predicted: ArrayLike, groups: ArrayLike, num_groups: int
) -> NDArray[np.int64]:
    """Return the `COUNTS` of every group, shape (G, 6); 0 for a group without people.

    ``labels`` and ``predicted``, shape (N,), are 0 or 1, and ``groups``, shape (N,), each person's
    group in ``0 .. num_groups - 1``. Raises ``ValueError`` if shapes differ, labels or predictions
    are not 0 or 1, or a group is out of range.
    """
    y, p, g = (np.asarray(values) for values in (labels, predicted, groups))
    if y.ndim != 1 or not y.shape == p.shape == g.shape:
        raise ValueError(
            f"labels of shape {y.shape}, predicted of shape {p.shape}, groups of shape {g.shape}: "
            "expected equal shapes (N,)."
        )
    for name, values, allowed in (
        ("labels", y, np.isin(y, (0, 1))),
        ("predicted", p, np.isin(p, (0, 1))),
        ("groups", g, np.isin(g, np.arange(num_groups))),
    ):
        if not allowed.all():
            i = int((~allowed).argmax())
            most = num_groups - 1 if name == "groups" else 1
            raise ValueError(f"{name}[{i}] = {values[i]}: expected an integer from 0 to {most}.")
    y, p, g = y.astype(bool), p.astype(bool), g.astype(np.int64)
    columns = (np.ones_like(y), p, y, p & y, ~y, p & ~y)
    return np.stack([np.bincount(g[c], minlength=num_groups) for c in columns], axis=1)


def group_rates(counts: ArrayLike) -> dict[str, Vector]:
    """Return the `RATES` of G groups, each (G,), from their counts, (G, 6); NaN if undefined."""
    table = check_counts(counts)
    with np.errstate(invalid="ignore"):
        return {name: table[:, top] / table[:, bottom] for name, (top, bottom, _) in RATES.items()}


@dataclass(frozen=True, kw_only=True)
class GroupMetric(Score):
    """A group fairness metric, as used by the history, terminal output, tables and verdicts.

    Its name is that of fairlearn. Higher values of a ratio are fairer, and lower values of a
    difference.

    >>> [metric.name for metric in METRICS if metric.better > 0]  # doctest: +ELLIPSIS
    ['demographic_parity_ratio', 'equal_opportunity_ratio', 'equalized_odds_ratio']
    """

    #: Those of the `RATES` that are compared between groups.
    rates: tuple[str, ...]

    def __call__(self, counts: ArrayLike) -> float:
        """Return the largest difference or smallest ratio of two groups' rates.

        ``counts`` has shape (G, 6). The value is from 0 to 1, or NaN if it is undefined. A ratio
        without any selected people is 1.
        """
        rates = group_rates(counts)
        compared = [(_range if self.better < 0 else _ratio)(rates[name]) for name in self.rates]
        return float(np.max(compared) if self.better < 0 else np.min(compared))

    def signed(self, counts: ArrayLike) -> float:
        """Return a difference with its sign, for two groups: first minus second.

        It is NaN if it is undefined. Equalized odds and differences between more than two groups
        have no sign.

        >>> counts = [[10, 2, 5, 1, 5, 1], [10, 8, 5, 5, 5, 3]]
        >>> round(DIFFERENCES[0].signed(counts), 2)
        -0.6
        """
        rates = [group_rates(counts)[name] for name in self.rates]
        if len(rates) == 1 and len(rates[0]) == 2:
            return float(rates[0][0] - rates[0][1])
        return self(counts)

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of several values; NaN if all of them are undefined."""
        defined = [value for value in values if not math.isnan(value)]
        if not defined:
            return math.nan
        return min(defined) if self.better > 0 else max(defined)


_COMPARED = {
    "demographic parity": ("parity", ("selection",)),
    "equal opportunity": ("opportunity", ("true_positive",)),
    "equalized odds": ("odds", ("true_positive", "false_positive")),
}

DIFFERENCES, RATIOS = (
    tuple(
        GroupMetric(
            f"{name.replace(' ', '_')}_{kind}",
            better,
            title=f"{short} {title}",
            phrase=f"{name} {kind}",
            rates=rates,
        )
        for name, (short, rates) in _COMPARED.items()
    )
    for kind, title, better in (("difference", "diff.", -1), ("ratio", "ratio", 1))
)
METRICS = (*DIFFERENCES, *RATIOS)


def undefined(counts: ArrayLike, groups: Sequence[str], positive: str) -> dict[str, str]:
    """Return the reasons why metrics are undefined, with the names of the metrics.

    ``positive`` is the name of the positive label.

    >>> counts = [[2, 1, 1, 1, 1, 0], [3, 1, 0, 0, 3, 1]]
    >>> undefined(counts, ["men", "women"], "ill")
    {'no label ill among women': 'equal opportunity, equalized odds'}
    """
    table, metrics = check_counts(counts), dict[str, list[str]]()
    for metric, (_, rates) in _COMPARED.items():
        for rate in ("selection", *rates):
            _, bottom, words = RATES[rate]
            lacking = [name for name, row in zip(groups, table, strict=True) if not row[bottom]]
            if lacking:
                reason = f"{words.format(positive=positive)} {', '.join(lacking)}"
                metrics.setdefault(reason, []).append(metric)
                break
    return {reason: ", ".join(names) for reason, names in metrics.items()}


def accuracy(counts: ArrayLike) -> float:
    """Return the fraction of all people whose prediction is correct, 0 to 1."""
    n, _, _, true, negative, false = check_counts(counts).sum(axis=0)
    return float((true + negative - false) / n)


def check_counts(counts: ArrayLike) -> Vector:
    """Return counts as floats; raise ``ValueError`` for a wrong shape or contradictions."""
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != len(COUNTS) or len(table) == 0:
        raise ValueError(f"counts of shape {table.shape}: expected (G, 6) with at least 1 group.")
    if not (np.isfinite(table).all() and (table >= 0).all() and (table % 1 == 0).all()):
        raise ValueError("counts: expected whole numbers >= 0.")
    n, selected, positive, true, negative, false = table.T
    sums = (positive + negative == n) & (true + false == selected)
    if not (sums & (true <= positive) & (false <= negative)).all():
        raise ValueError(
            f"counts: the numbers contradict each other. Expected the order {', '.join(COUNTS)}."
        )
    return table


def _range(rates: Vector) -> float:
    """Return the largest rate minus the smallest; NaN for a single group."""
    return float(rates.max() - rates.min()) if len(rates) > 1 else math.nan


def _ratio(rates: Vector) -> float:
    if len(rates) < 2 or np.isnan(rates).any():
        return math.nan
    return float(rates.min() / rates.max()) if rates.max() > 0 else 1.0
