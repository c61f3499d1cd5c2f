"""What the columns of a table mean: kinds, units, ranges and levels, in a file that people edit."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from fairflower.arguments import conform
from fairflower.config.text import counted, read_tables, toml_value, unknown
from fairflower.data.files import logger
from fairflower.data.folders import MAX_GROUPS
from fairflower.errors import DataError
from fairflower.tables.columns import (
    RARE,
    Column,
    Format,
    Kind,
    Raw,
    Schema,
    column_of,
    common_kind,
    refused,
)
from fairflower.tables.reading import (
    decimal_marks,
    is_number,
    mark_of,
    numbers_of,
    without_unit,
)

#: Name of the schema's file in the folder of the tables.
FILE = "schema.toml"

#: Rows from which on a column of different values counts as an identifier.
_MANY = 20

_CORRECT = "Correct them, or set kind, or missing for marks of missing cells, in a schema."

_DATES = {
    "%Y-%m-%d": r"\d{4}-\d{2}-\d{2}(?:[ T].*)?",
    "%d.%m.%Y": r"\d{1,2}\.\d{1,2}\.\d{4}",
    "%d/%m/%Y": r"\d{1,2}/\d{1,2}/\d{4}",
    "%m/%d/%Y": r"\d{1,2}/\d{1,2}/\d{4}",
}


#: Fields of a column that a schema may set.
_DECLARED = [f.name for f in fields(Column)][1:10]


def read_schema(path: Path) -> Schema:
    """Read a schema; raise ``DataError`` or ``ConfigError``, with its path, if it is invalid."""
    tables = read_tables(path)
    try:
        known = ("columns", "sums", *Format._fields)
        for key in tables.keys() - {*known}:
            raise ValueError(unknown("key", key, known))
        conform(tables, dict[str, str | bool | dict[str, dict]])  # type: ignore[type-arg]
        columns = {}
        for name, entry in tables.get("columns", {}).items():
            for key in entry.keys() - {*_DECLARED}:
                raise ValueError(f"columns.{name}: {unknown('key', key, _DECLARED)}")
            columns[name] = column_of({"name": name, **entry})
            conform(columns[name], Column, f"columns.{name}")
            _check(columns[name])
        written = Format(*(str(tables.get(key, "")) for key in Format._fields))
        if written.decimal not in ("", ".", ","):
            raise ValueError(f"decimal = {written.decimal!r}: expected . or ,")
        return Schema(columns, written, tables.get("sums", True) is True)
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: {error}", public="the schema of a table is invalid") from error


def _check(column: Column) -> None:
    """Raise ``ValueError`` if a declared column lacks something or contradicts itself."""
    where = f"columns.{column.name}"
    if not column.kind:
        raise ValueError(f"{where}: kind is missing; expected {', '.join(get_args(Kind)[:-1])}")
    if column.kind == "date":
        if not column.since:
            raise ValueError(f"{where}: since is missing: the day from which days are counted")
        pd.Timestamp(column.since)
    if column.low is not None and column.high is not None and not column.low < column.high:
        raise ValueError(f"{where}: low = {column.low} is not below high = {column.high}")
    if len(set(column.levels)) < len(column.levels):
        raise ValueError(f"{where}: levels names a level twice")
    if column.codes and len({*column.levels, *column.codes}) < 2 * len(column.levels):
        raise ValueError(f"{where}: codes has to name another text for each of the levels")
    if re.search("[:=]", column.unit):
        raise ValueError(f"{where}: unit = {column.unit!r} has a colon or an equals sign")


def parse(where: object, frame: pd.DataFrame, columns: Iterable[Column], decimal: str) -> Raw:
    """Return the cells of columns; raise ``DataError`` for cells of another kind."""
    columns = list(columns)
    values: dict[str, npt.NDArray[Any]] = {}
    cells = {c.name: without_marks(frame[c.name], c) for c in columns}
    bare = {c.name: without_unit(cells[c.name]) for c in columns if c.kind == "number"}
    marks = decimal_marks(where, pd.DataFrame({n: b for n, (b, _) in bare.items()}), decimal)
    for k, column in enumerate(columns):
        name, known = column.name, cells[column.name]
        if column.kind == "category":
            values[name] = whole_numbers(known).to_numpy(object)
            continue
        if column.kind == "date":
            x, written = _days(where, known, column)
            columns[k] = replace(column, format=written)
        else:
            x = numbers_of(bare[name][0], marks.get(name, decimal or "."))
            columns[k] = replace(column, unit=bare[name][1] or column.unit)
        if wrong := int((np.isnan(x) & (known != "").to_numpy()).sum()):
            text = f"{wrong} of {len(known)} cells are no {column.kind}s. {_CORRECT}"
            raise refused(f"{where}: {name}", text)
        values[name] = _clipped(where, x, column)
    return Raw(tuple(columns), values)


def whole_numbers(cells: pd.Series) -> pd.Series:
    """Return names without decimals of whole numbers: 1.0, 1,0 and 1 are the same name."""
    return cells.str.replace(r"^(-?\d+)[.,]0{1,2}$", r"\1", regex=True)


def without_marks(cells: pd.Series, column: Column) -> pd.Series:
    """Return cells with levels instead of codes, empty where marks say that they are missing."""
    if column.codes:
        levels = dict(zip(column.codes, column.levels, strict=True))
        cells = whole_numbers(cells).map(lambda cell: levels.get(cell, cell))
    return cells.where(~cells.isin(column.missing), "") if column.missing else cells


def _clipped(where: object, x: npt.NDArray[np.float64], column: Column) -> npt.NDArray[np.float64]:
    low = -math.inf if column.low is None else column.low
    high = math.inf if column.high is None else column.high
    if column.kind == "number" and (outside := int(((x < low) | (x > high)).sum())):
        known = int(np.isfinite(x).sum())
        if outside > max(known / 2, RARE):
            text = f"{outside} of {known} numbers are outside of the schema's range."
            remedy = f"Correct them, or the range; the unit is {column.unit or 'not said'}."
            full = f"{where}: {column.name}: {text} {remedy}"
            raise DataError(full, public=f"a table: {text}")
        text = "%s: %s: %s outside of the schema's range, and clipped to it."
        logger.warning(text, where, column.name, counted(outside, "number", "is", "are"))
        return np.clip(x, low, high)
    return x


def _days(where: object, cells: pd.Series, column: Column) -> tuple[npt.NDArray[np.float64], str]:
    """Return days since the column's day, NaN where there is no date, and the dates' format."""
    known = cells[cells != ""]
    formats = [*filter(None, [column.format]), *_formats(known)]
    dates = {
        f: pd.to_datetime(cells, format=f, errors="coerce", exact=f != "%Y-%m-%d") for f in formats
    }
    fits = {f: d for f, d in dates.items() if d[cells != ""].notna().all()}
    if column.format in fits:
        fits = {column.format: fits[column.format]}
    written = next(iter(fits or dates), "")
    if not written:
        return np.full(len(cells), np.nan), ""
    if any(not other.equals(dates[written]) for other in fits.values()):
        text = "days and months may be exchanged. Set format in the schema, as %d/%m/%Y."
        raise refused(f"{where}: {column.name}", text)
    days = (dates[written] - pd.Timestamp(column.since)) / pd.Timedelta(days=1)
    return np.asarray(days, np.float64), written


def _formats(known: pd.Series) -> list[str]:
    return [f for f, pattern in _DATES.items() if known.str.fullmatch(pattern).all()]


def kind_of(where: str, cells: pd.Series) -> Kind:
    """Return the kind of a column by its training rows; "" if all cells are missing.

    Different texts in most rows, or more than 100, are ignored, as names and other identifiers are,
    and so are numbers of rows. Raises ``DataError`` if most cells are numbers, but not all.
    """
    known = cells[cells != ""]
    bare, _ = without_unit(known)
    if known.empty:
        return ""
    if mark := mark_of(bare):
        x = numbers_of(bare, mark)
        counting = (np.diff(x) > 0).all() and (x % 1 == 0).all() and np.ptp(x) < 2 * len(x)
        return "ignored" if len(x) >= _MANY and counting else "number"  # numbers of rows
    if _formats(known):
        return "date"
    counts = known.value_counts()
    text = counts[
        ~(is_number(counts.index.to_series(), ".") | is_number(counts.index.to_series(), ","))
    ]
    if text.sum() <= len(known) / 2 and (text.min() < RARE or len(counts) > _MANY):
        found = f"{text.sum()} of {len(known)} cells are no numbers, and the others are."
        if text.sum() == 1 and known.iloc[0] in text:
            found += " Is the first row a second header?"
        raise refused(where, f"{found} {_CORRECT}")
    if len(counts) > MAX_GROUPS or (len(known) >= _MANY and len(counts) >= len(known) / 2):
        return "ignored"
    return "category"


def proposed(frames: Mapping[str, pd.DataFrame], targets: Collection[str]) -> str:
    """Return the text of a schema for tables by domain, which people complete."""
    lines = [
        "# What the columns mean. Correct it, fill in units, and use the same file at all sites.",
        "# kind: number, category, date (with since), target or ignored.",
        "# low and high are those of these rows, rounded: widen them to what is possible.",
        f"# levels: those of at least {RARE} rows; other ones are joined.",
    ]
    names = list(dict.fromkeys(str(name) for frame in frames.values() for name in frame))
    for name in names:
        held = {d: frame[name] for d, frame in frames.items() if name in frame}
        lines += ["", f"[columns.{toml_value(name)}]"]
        if absent := frames.keys() - held.keys():
            lines.append(f"# Not at {', '.join(sorted(absent))}.")
        try:
            kinds = {d: kind_of(f"{d}: {name}", cells) for d, cells in held.items()}
            kind = common_kind(name, kinds)
        except DataError as error:
            lines += [f"# {' '.join(str(error).split())}"]
            kind = "category"
        kind = "ignored" if absent else kind
        chosen = "target" if name in targets else kind
        lines += [f"kind = {toml_value(chosen)}", *_details(kind, [*held.values()], chosen)]
    return "\n".join(lines) + "\n"


def _details(kind: Kind, cells: Sequence[pd.Series], chosen: str) -> list[str]:
    """Return the lines of a proposed column after its kind; ``cells`` are those of each domain."""
    if kind == "date":
        return ['since = ""  # for example "2000-01-01"']
    if kind == "category":
        held = pd.concat(cells)
        counts = held[held != ""].value_counts()
        levels = sorted(map(str, counts[counts >= RARE].index))
        lines = [f"levels = [{', '.join(map(toml_value, levels))}]"]
        sets = [{*own} & {*levels} for own in cells]
        if codes := [b for a, b in combinations(sets, 2) if a and b and not a & b]:
            lines += [
                "# Domains have no level in common. Are they codings of the same? Then keep one as",
                "# levels, and the other as codes: the first code means the first level.",
                f"# codes = [{', '.join(map(toml_value, sorted(codes[0])))}]",
            ]
        return lines
    if kind != "number":
        return []
    bare, units = zip(*map(without_unit, cells), strict=True)
    x = np.concatenate([numbers_of(own, mark_of(own[own != ""]) or ",") for own in bare])
    unit = next(filter(None, units), "")
    size = 10.0 ** math.floor(math.log10(max(np.nanmax(np.abs(x)), 1e-9)) - 1)
    low, high = math.floor(np.nanmin(x) / size) * size, math.ceil(np.nanmax(x) / size) * size
    ends = [] if chosen == "target" or low == high else [f"low = {low:.6g}", f"high = {high:.6g}"]
    return [f"unit = {toml_value(unit)}", *ends]
