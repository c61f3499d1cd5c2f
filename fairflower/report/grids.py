"""Grids of clients and strategies, and sweeps of an argument, among the methods of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fairflower.config import ClientConfig, StrategyConfig
from fairflower.config.text import is_argument, key_to_argument
from fairflower.numerics import Vector
from fairflower.report.methods import Comparison, Method

#: Minimum number of values in a sweep.
_FEWEST = 3


class Sweep(NamedTuple):
    """Methods that differ in a run config key, in ascending order of its value.

    ``others`` maps values that are not numbers to methods, as in ``num_clusters=auto``.
    """

    key: str
    values: Vector
    methods: tuple[Method, ...]
    others: Mapping[str, Method]


def client_strategy_grids(comparison: Comparison) -> list[dict[str, dict[str, Method]]]:
    """Return grids of comparable methods by client and strategy, with the largest grid first.

    A grid has at least two clients and two strategies.
    """
    sets: dict[Any, list[Method]] = {}
    for method in comparison.methods:
        sets.setdefault(method.comparable, []).append(method)
    grids = []
    for members in sorted(sets.values(), key=len, reverse=True):
        grid: dict[str, dict[str, Method]] = {}
        for method in members:
            row = grid.setdefault(method.client, {})
            # Methods that were tuned differently may share their cell.
            row[method.name if method.aggregation in row else method.aggregation] = method
        strategies = {strategy for row in grid.values() for strategy in row}
        if len(grid) > 1 and len(strategies) > 1:
            grids.append(grid)
    return grids


def largest_grid(comparison: Comparison) -> dict[str, dict[str, Method]]:
    """Return the largest of `client_strategy_grids`; empty without a grid."""
    return next(iter(client_strategy_grids(comparison)), {})


def sweeps(comparison: Comparison) -> list[Sweep]:
    """Return a sweep for each argument with at least three values and all other settings equal.

    Methods that were not tested on every domain are left out.
    """
    keys = {key for method in comparison.methods for key, _ in method.identity if is_argument(key)}
    by_argument = []
    for key in sorted(keys):
        groups: dict[Any, dict[Any, Method]] = {}
        for method in comparison.methods:
            value = _value(method, key)
            rest = frozenset(item for item in method.identity if item[0] != key)
            if value is not None and method.fully_tested():
                groups.setdefault((rest, method.comparable), {}).setdefault(value, method)
        for members in groups.values():
            values = sorted(value for value in members if isinstance(value, float))
            if len(values) >= _FEWEST:
                others = {value: m for value, m in members.items() if isinstance(value, str)}
                methods = tuple(members[value] for value in values)
                by_argument.append(Sweep(key, np.array(values), methods, others))
    return by_argument


def _value(method: Method, key: str) -> float | str | None:
    """Return a method's value for an argument (set or default), as a number if possible.

    The result is None if the method does not have the argument.
    """
    table, _, leaf = key.partition(".")
    value: Any = dict(method.identity).get(key)
    for kind in (ClientConfig, StrategyConfig):
        if value is None and table == kind.TABLE:
            value = kind.of(method.config).defaults().get(key_to_argument(leaf))
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value if isinstance(value, str) else None
    return number if math.isfinite(number) else None
