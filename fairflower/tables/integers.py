"""Sums of sites' tables as integers, of which masks leave only the sum over all sites.

The schema names ranges and levels, so all sites have the same integers in the same order: of each
column the known and the missing cells, then rows by level, or sum(u) and sum(u^2) in units of
2^-`POINT`, for numbers as shares u of the column's range.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from fairflower.errors import DataError
from fairflower.tables.columns import Column, refused
from fairflower.tables.encoding import ColumnSums, Encoding, Sums
from fairflower.tables.sites import SiteTable

#: Binary places of a site's sums of shares.
POINT = 40

#: Bits of every integer; sums of 2^31 rows are below.
BITS = 72


def number_of(columns: Sequence[Column]) -> int:
    """Return how many integers the sums of columns are."""
    return sum(2 + (len(column.levels) or 2) for column in columns)


def integers_of_table(table: SiteTable) -> list[int]:
    """Return the sums of a site's table as integers; see `integers_of`."""
    columns = Encoding.from_json(table.masked().declared).columns
    return integers_of(columns, {**table.sums, **table.targets})


def integers_of(columns: Sequence[Column], sums: Sums) -> list[int]:
    """Return a site's sums of the columns as integers from 0 to 2^`BITS` - 1.

    Raises ``DataError`` if numbers are so far from the declared range that they do not fit.
    """
    found = []
    for column in columns:
        own = sums[column.name]
        parts = [own.counts.get(level, 0) for level in column.levels]
        if not parts:
            low, size = _range(column)
            u = (Fraction(own.mean) - low) / size
            second = Fraction(own.m2) / size**2 + own.known * u**2
            parts = [round(part * 2**POINT) for part in (own.known * u, second)]
            if not 0 <= min(parts) <= max(parts) < 2**BITS:
                text = "the numbers of a column are outside of the schema's range."
                raise refused(column.name, f"{text} Correct low and high.")
        found += [own.known, own.missing, *parts]
    return found


def sums_of(columns: Sequence[Column], totals: Sequence[int]) -> dict[str, ColumnSums]:
    """Return the sums over all sites, from the totals of their `integers_of`.

    Raises ``DataError`` if the numbers contradict each other.
    """
    numbers, sums = iter(totals), {}
    for column in columns:
        known, missing = next(numbers), next(numbers)
        parts = [next(numbers) for _ in column.levels or "12"]
        if column.levels:
            counts = {level: n for level, n in zip(column.levels, parts, strict=True) if n}
            own = ColumnSums(column, known, missing, counts=counts)
            wrong = sum(parts) > known
        else:
            low, size = _range(column)
            first, second = (Fraction(part, 2**POINT) for part in parts)
            rest = second - first**2 / max(known, 1)
            mean = float(low + size * first / known) if known else 0.0
            own = ColumnSums(column, known, missing, mean, float(max(rest, Fraction(0)) * size**2))
            wrong = rest < -Fraction(max(known, 1), 2**30)
        if wrong:
            raise DataError(f"The sites' sums of the column {column.name!r} contradict each other.")
        sums[column.name] = own
    return sums


def _range(column: Column) -> tuple[Fraction, Fraction]:
    low, high = Fraction(column.low or 0), Fraction(column.high or 0)
    return low, high - low
