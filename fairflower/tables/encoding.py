"""How rows of a table become features, learnt from sums over training rows.

Each place (a domain, or a site) computes `summed`, the sums are `merged`, and every place encodes
its rows by the result, with `encoded`. All three are functions of their arguments alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import combinations
from typing import Any

import numpy as np

from fairflower.arguments import Count, Finite, Name, conform
from fairflower.config.methods import TaskSpec
from fairflower.data.federation import Floats
from fairflower.errors import DataError
from fairflower.tables.columns import (
    RARE,
    Column,
    Raw,
    Schema,
    column_of,
    common_kind,
    listed_kinds,
    without_day,
)

#: A place's mean or typical size that is this many times another's is reported.
UNLIKE = 10.0

#: Fewest known cells of a place whose mean is compared with those of others.
_COMPARED = 5


@dataclass(frozen=True)
class ColumnSums:
    """Sums of a column over training rows.

    ``mean`` and ``m2``, the sum of squared differences from it, are those of numbers. ``counts``
    are those of a category's levels, without rare ones.
    """

    column: Column
    known: Count = 0
    missing: Count = 0
    mean: Finite = 0.0
    m2: Finite = 0.0
    counts: dict[Name, Count] = field(default_factory=dict)


#: Sums by column.
Sums = Mapping[str, ColumnSums]


@dataclass(frozen=True)
class Encoding:
    """How rows become features: columns in the order of their names, with what was learnt."""

    columns: tuple[Column, ...]
    #: Whether means and levels were learnt, and not declared.
    learnt: bool = True

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        return [name for column in self.columns for name in column.features]

    def to_json(self) -> str:
        """Return the encoding as text, which `from_json` reads."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read an encoding; raise ``ValueError`` if it is invalid."""
        try:
            content: dict[str, Any] = json.loads(text)
            made = cls(tuple(map(column_of, content["columns"])), content["learnt"])
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"the encoding cannot be read ({error!r})") from error
        conform(made, Encoding, "encoding")
        return made


def summed(raw: Raw) -> dict[str, ColumnSums]:
    """Return the sums of a place's training rows."""
    sums = {}
    for column in raw.columns:
        name, missing = column.name, raw.missing(column.name)
        known = raw.cells[name][~missing]
        sizes = len(known), int(missing.sum())
        if column.kind == "category":
            counts = dict(sorted(Counter(known.tolist()).items()))
            sums[name] = ColumnSums(column, *sizes, counts=counts)
        else:
            mean = float(known.mean()) if len(known) else 0.0
            m2 = float(np.square(known - mean).sum())
            sums[name] = ColumnSums(column, *sizes, mean=mean, m2=m2)
    return sums


def joined(a: ColumnSums, b: ColumnSums) -> ColumnSums:
    """Return the sums of both (T. Chan, G. Golub and R. LeVeque, 1979, equation 2.1)."""
    known = a.known + b.known
    apart, share = b.mean - a.mean, b.known / known if known else 0.0
    return replace(
        a,
        column=a.column if a.column.kind else b.column,
        known=known,
        missing=a.missing + b.missing,
        mean=a.mean + apart * share,
        m2=a.m2 + b.m2 + apart**2 * a.known * share,
        counts=dict(Counter(a.counts) + Counter(b.counts)),
    )


def merged(places: Mapping[str, Sums]) -> Encoding:
    """Return the encoding by the sums of all places, the same whatever their order is.

    Columns that a place lacks, or that nobody has values of, are left out. Levels of fewer than
    `RARE` rows of all places together are joined, unless they are declared. Raises ``DataError`` if
    a column has different kinds.
    """
    columns = []
    for name in sorted(set.intersection(*(set(sums) for sums in places.values()))):
        own = {place: sums[name] for place, sums in places.items()}
        kind = common_kind(name, {place: each.column.kind for place, each in own.items()})
        if kind == "date" and not all(each.column.since for each in own.values()):
            raise without_day(name)
        if kind == "ignored" or not any(each.known for each in own.values()):
            continue
        formats = {each.column.format for each in own.values() if each.known}
        alike = {replace(each.column, kind="", unit="", format="") for each in own.values()}
        if len(alike) > 1:
            raise DataError(
                f"The schemas of {_list([*own])} declare the column {name!r} differently. Use the "
                "same schema at all."
            )
        in_order = sorted(own.values(), key=lambda s: (s.known, s.mean, s.m2, sorted(s.counts)))
        whole = reduce(joined, in_order)
        std = math.sqrt(whole.m2 / whole.known)
        levels = whole.column.levels or tuple(
            sorted(level for level, count in whole.counts.items() if count >= RARE)
        )
        named = {level: whole.counts.get(level, 0) for level in levels}
        learnt: dict[str, Any] = {
            "mean": whole.mean,
            "std": std if std > 1e-12 * abs(whole.mean) else 1.0,
            "may_miss": whole.missing > 0,
        }
        if kind == "category":
            mode = max(levels, key=lambda level: (named[level], level), default="")
            other = sum(named.values()) < whole.known
            learnt = {"levels": levels, "mode": mode, "other": other, "may_miss": whole.missing > 0}
        written = formats.pop() if len(formats) == 1 else ""
        columns.append(replace(whole.column, kind=kind, format=written, **learnt))
    return Encoding(tuple(columns))


def declared(schema: Schema, names: Sequence[str]) -> Encoding:
    """Return the encoding by a schema alone, which needs no sums.

    A number has the mean and the deviation of even values in its range. Raises ``DataError`` if a
    column has no range or no levels.
    """
    columns = []
    for column in check_declared(schema.columns.get(name, Column(name)) for name in sorted(names)):
        low, high = column.low, column.high
        known: dict[str, Any] = {"other": True, "mode": next(iter(column.levels), "")}
        if low is not None and high is not None:
            known = {"mean": (low + high) / 2, "std": (high - low) / math.sqrt(12)}
        columns.append(replace(column, may_miss=True, **known))
    return Encoding(tuple(columns), learnt=False)


def check_declared(columns: Iterable[Column]) -> list[Column]:
    """Return columns; raise ``DataError`` unless all have a range or levels, as their kind is."""
    found = list(columns)
    for column in found:
        number = column.kind in ("number", "target") and None not in (column.low, column.high)
        if not (number or (column.kind == "category" and column.levels)):
            raise DataError(
                f"{column.name!r} has neither low and high nor levels in the schema, which it "
                "needs with sums = false or secure aggregation. Declare them, or ignore the "
                "column.",
                public=f"with masks or sums = false, the schema must declare a range or levels of "
                f"{column.name!r}",
            )
    return found


def encoded(encoding: Encoding, raw: Raw) -> Floats:
    """Return rows as features, float32 [N, D] (`Encoding.features`).

    Numbers are standardized. A missing number becomes the mean, and a missing level the mode. A
    level that is not in the encoding is another one.
    """
    parts: list[Any] = [np.empty((max(map(len, raw.cells.values())), 0), np.float32)]
    for column in encoding.columns:
        x, missing = raw.cells[column.name], raw.missing(column.name)
        if column.kind == "category":
            places = {level: k for k, level in enumerate(column.levels)}
            levels = np.where(missing, column.mode, x)
            number = np.array([places.get(level, -1) for level in levels], np.int64)
            parts.append(number[:, None] == [*range(len(column.levels)), *[-1] * column.other])
        else:
            parts.append(np.where(missing, 0.0, (x - column.mean) / column.std)[:, None])
        parts += [missing[:, None]] * column.may_miss
    return np.concatenate(parts, axis=1, dtype=np.float32, casting="unsafe")


def unknown_levels(encoding: Encoding, raw: Raw) -> dict[str, Any]:
    """Return the rows, int64 [N], with a level that the encoding does not name, by column."""
    found = {}
    for column in encoding.columns:
        if column.kind == "category":
            known = {"", *column.levels}
            others = [level not in known for level in raw.cells[column.name]]
            found[column.name] = np.flatnonzero(others)
    return {name: rows for name, rows in found.items() if len(rows)}


def differences(places: Mapping[str, Sums]) -> list[str]:
    """Return sentences on columns that places lack, or seem to measure or code differently."""
    said = []
    for name in sorted(set().union(*places.values())):
        own = {place: sums[name] for place, sums in places.items() if name in sums}
        if lacking := [place for place in places if place not in own]:
            said.append(
                f"The column {name!r} is ignored, because "
                f"{_list(lacking)} {'lack' if lacking[1:] else 'lacks'} it."
            )
            continue
        kinds = {place: each.column.kind for place, each in own.items() if each.column.kind}
        if len(set(kinds.values())) > 1:
            said.append(f"The column {name!r} has different kinds: {listed_kinds(kinds)}.")
        units = {each.column.unit: place for place, each in own.items() if each.known}
        if len(units) > 1:
            listed = ", ".join(f"{unit or 'none'} at {place}" for unit, place in units.items())
            said.append(f"The column {name!r} has different units: {listed}.")
        known = {place: each for place, each in own.items() if each.known >= _COMPARED}
        said += _unlike(name, known)
        levels = {place: each.counts.keys() for place, each in known.items() if each.counts}
        if apart := [
            f"{a} and {b}" for a, b in combinations(levels, 2) if not levels[a] & levels[b]
        ]:
            listed = f"at {_list(apart)}: is it coded differently?"
            said.append(f"The column {name!r} has no level in common {listed}")
    return said


def undeclared(places: Mapping[str, Sums], refuse: bool = True) -> list[str]:
    """Return sentences on columns with levels that the schema, which has some, does not declare.

    Raises ``DataError`` if most rows of a place have such levels, unless ``refuse`` is false.
    """
    said, most = [], []
    for place, sums in places.items():
        for name, own in sums.items():
            count = own.known - sum(own.counts.get(level, 0) for level in own.column.levels)
            if own.column.kind != "category" or not own.column.levels or not count:
                continue
            said.append(
                f"{count} of {own.known} training rows at {place} have an undeclared level of "
                f"{name!r}: join codings with codes in the schema, or declare the level."
            )
            most += [said[-1]] * (count > own.known / 2)
    if most and refuse:
        fault = "most rows have an undeclared level of a column"
        public = f"the table does not follow the schema: {fault}"
        raise DataError(" ".join(most), public=public)
    return said


def check_coding(classes: Mapping[str, Sequence[str]]) -> None:
    """Raise ``DataError`` if two places have other names for the two classes of the target."""
    for (a, first), (b, second) in combinations(classes.items(), 2):
        if len(first) == len(second) == 2 and not {*first} & {*second}:
            raise DataError(
                f"The target has the classes {_list(first)} at {a}, and {_list(second)} at {b}. "
                "Use the same words at all, or declare one coding as levels and the other as codes "
                f"in the schema of all: levels = {[*first]}, codes = {[*second]}, in this order."
            )


def _unlike(name: str, known: Mapping[str, ColumnSums]) -> list[str]:
    """Return a sentence if the means of a column are as different as those of other units."""
    numbers = {p: s for p, s in known.items() if s.column.kind in ("number", "")}
    means = {place: abs(each.mean) for place, each in numbers.items()}
    stds = {place: math.sqrt(each.m2 / each.known) for place, each in numbers.items()}
    sizes = {place: math.hypot(means[place], stds[place]) for place in numbers}
    for values in (sizes, means):
        if len(values) < 2:
            continue
        low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        clear = values is sizes or means[high] - means[low] > max(stds.values())
        if values[high] >= UNLIKE * values[low] and values[high] > 0 and clear:
            low_mean, high_mean = numbers[low].mean, numbers[high].mean
            return [
                f"The column {name!r} has a mean of {low_mean:.3g} at {low} and of {high_mean:.3g} "
                f"at {high}: are the units the same?"
            ]
    return []


def _list(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def scaled_task(task: str, targets: Mapping[str, Sums]) -> str:
    """Return the task with center, scale and unit of the target of a regression, unless set.

    ``targets`` are the sums of targets at each place. Raises ``DataError`` if there are none.
    """
    spec = TaskSpec.read(task)
    if spec.name != "regression" or any(len(sums) > 1 for sums in targets.values()):
        return task
    if not any(targets.values()):
        if "scale" in spec.args:
            return task
        raise DataError(
            "The mean of the target is unknown under secure aggregation. Declare its low and high "
            "in the schema, or set data.task = 'regression:center=NUMBER:scale=NUMBER'."
        )
    (whole,) = merged(targets).columns
    learnt = {"center": f"{whole.mean:.6g}", "scale": f"{whole.std:.6g}", "unit": whole.unit}
    if spec.args.get("loss") == "poisson":
        learnt = {"scale": f"{whole.mean:.6g}", "unit": whole.unit}
    named = [f"{key}={value}" for key, value in learnt.items() if value and key not in spec.args]
    return ":".join([task, *named])
