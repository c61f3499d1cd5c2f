"""Columns of tables: what is declared and learnt of them, and rows as numbers.

Nothing here reads a file, so that a server, which only merges sums, needs no pandas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Finite, Name, Range
from fairflower.errors import DataError

Kind = Literal["number", "category", "date", "target", "ignored", ""]

#: Fewest training rows that share a level which is named; rarer levels are joined as `OTHER`.
RARE = 5
OTHER = "other"


@dataclass(frozen=True)
class Column:
    """A column: what a schema declares and, in an `Encoding`, what was learnt of training rows."""

    name: Name
    kind: Kind = ""
    unit: str = ""
    #: Ends of the range, to which numbers are clipped.
    low: Finite | None = None
    high: Finite | None = None
    #: Names of the levels; empty in a schema means those of at least `RARE` training rows.
    levels: tuple[Name, ...] = ()
    #: What other sites write instead of the levels, in their order, such as 0 and 1.
    codes: tuple[Name, ...] = ()
    #: Day from which days are counted, as 2000-01-31, and the format of dates if it is another.
    since: str = ""
    format: str = ""
    #: More marks of missing cells, such as 999.
    missing: tuple[str, ...] = ()
    # Learnt of training rows:
    mean: Finite = 0.0
    std: Annotated[float, Range(above=0)] = 1.0
    #: Level that replaces missing cells; "" means `OTHER`.
    mode: str = ""
    #: Whether training rows have other levels, and whether they have missing cells.
    other: bool = False
    may_miss: bool = False

    @property
    def is_used(self) -> bool:
        """Whether the column can be a feature: it has values, and days if these are dates."""
        return self.kind not in ("", "ignored") and (self.kind != "date" or bool(self.since))

    @property
    def features(self) -> list[str]:
        """Names of the features that encode the column."""
        names = [f"{self.name}: {level}" for level in self.levels]
        names += [f"{self.name}: {OTHER}"] * self.other
        names = names if self.kind == "category" else [self.name]
        return names + [f"{self.name}: missing"] * self.may_miss


def column_of(entry: Mapping[str, Any]) -> Column:
    """Return the column of an entry in JSON or TOML; its fields are not checked yet."""
    texts = {k: tuple(map(str, v)) for k, v in entry.items() if isinstance(v, list)}
    values: dict[str, Any] = {**entry, **texts}
    return Column(**values)


class Format(NamedTuple):
    """How a file writes its table; empty fields are detected."""

    delimiter: str = ""
    encoding: str = ""
    decimal: str = ""


@dataclass(frozen=True)
class Schema:
    """Declared columns by name, in the order of the file, and how files write their tables."""

    columns: Mapping[str, Column] = field(default_factory=dict)
    format: Format = field(default_factory=Format)
    #: Whether means, variances and levels are learnt; if not, ranges and levels say all.
    sums: bool = True

    @property
    def targets(self) -> list[str]:
        """Names of the targets."""
        return [name for name, column in self.columns.items() if column.kind == "target"]


@dataclass(frozen=True)
class Raw:
    """Cells of a table's rows by column: numbers, float64 [N], or names of levels, object [N].

    Missing cells are NaN or "". The columns have the units and the formats of dates that the rows
    have.
    """

    columns: tuple[Column, ...]
    cells: Mapping[str, npt.NDArray[Any]]

    def rows(self, chosen: npt.NDArray[np.int64]) -> Raw:
        """Return these rows."""
        return Raw(self.columns, {name: x[chosen] for name, x in self.cells.items()})

    def missing(self, name: str) -> npt.NDArray[np.bool_]:
        """Return which cells of a column are missing, [N]."""
        x = self.cells[name]
        return np.asarray(x == "" if x.dtype == object else np.isnan(x), np.bool_)


def common_kind(name: str, kinds: Mapping[str, Kind]) -> Kind:
    """Return the kind of a column at all domains, given that of each.

    Raises ``DataError`` if they differ.
    """
    held = set(kinds.values()) - {""}
    if held <= {"ignored", "number"} and "number" in held:
        return "number"
    if "ignored" in held and "category" in held:
        held = {"ignored"}
    if len(held) > 1:
        raise DataError(
            f"The column {name!r} has different kinds: {listed_kinds(kinds)}. Use the same coding "
            "at all, or declare its kind in a schema (fairflower data schema).",
            public="a column has different kinds at the domains",
        )
    return held.pop() if held else "ignored"


def listed_kinds(kinds: Mapping[str, Kind]) -> str:
    """Return kinds by domain as text, for messages."""
    return ", ".join(f"{kind} at {domain}" for domain, kind in kinds.items() if kind)


def without_day(name: str) -> DataError:
    """Return the error for a column of dates without the day since which days are counted."""
    return DataError(
        f"The column {name!r} has dates. Drop it (data.drop), or say in a schema since which day "
        "days are counted (fairflower data schema).",
        public="a column has dates",
    )


def refused(where: object, problem: str) -> DataError:
    """Return the error for a problem in a file, domain or column, of which a site tells no name."""
    return DataError(f"{where}: {problem}", public=f"a table: {problem}")
