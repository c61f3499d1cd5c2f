"""Reading files of tables as text, and of numbers as people write them.

Nothing is guessed silently: the log says which delimiter, encoding and decimal mark a file has.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fairflower.config.text import counted
from fairflower.data import files
from fairflower.errors import DataError, require
from fairflower.tables.columns import Format, refused

#: Extensions of tables.
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")

#: What stands for a missing cell, besides the marks in a schema.
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "#N/A", "?", ".", "-")

_DELIMITERS = ",;\t|"

#: Bytes that Python needs for a cell, besides its characters.
CELL_BYTES = 64

#: Decimal mark -> numbers with it, in which the other mark may separate thousands.
_NUMBERS = {
    mark[-1]: re.compile(
        rf"(?=.*\d)[+-]?(?:[1-9]\d{{0,2}}(?:{other}\d{{3}})+|\d+)?(?:{mark}\d*)?(?:[eE][+-]?\d+)?"
    )
    for mark, other in ((r"\.", ","), (",", r"\."))
}
#: Number with a unit behind it.
_WITH_UNIT = re.compile(r"[+-]?[\d.,]*\d[\d.,]*\s*([^\d\s.,+-][^\d]*)")


def read_table(path: Path, given: Format) -> pd.DataFrame:
    """Return the cells of a file as text, without spaces around them; missing ones are empty.

    Raises ``DataError`` if the file is no table with a header and rows as long as it.
    """
    if path.suffix.lower() == ".parquet":
        require("sim", "A Parquet file", "pyarrow")
        with files.explained(f"{path} cannot be read"), files.open_regular(path, None) as file:
            files.check_memory(f"{path}: reading it takes", 8 * path.stat().st_size, "Divide it.")
            frame = pd.read_parquet(file, engine="pyarrow")
        header = [str(name).strip() for name in frame.columns]
        cells = [frame.iloc[:, k].astype(object) for k in range(len(header))]
        columns = [c.where(c.notna(), "").astype(str).tolist() for c in cells]
        about, gaps = "Parquet", None
    else:
        header, columns, about, gaps = _of_text(path, given)
    twice = [name for name, count in Counter(filter(None, header)).items() if count > 1]
    if twice:
        raise DataError(
            f"{path}: found several columns named {twice[0]!r}. Rename all but one.",
            public="a table: found several columns of a name",
        )
    if not columns or not columns[0]:
        raise refused(path, "found a header without rows. Add rows, or remove the file.")
    if unnamed := header.count(""):
        files.logger.warning("%s: %d columns without a name are ignored.", path, unnamed)
    named = {name: column for name, column in zip(header, columns, strict=True) if name}
    cells_of = {
        name: ["" if (text := sys.intern(cell.strip())) in MISSING else text for cell in cells]
        for name, cells in named.items()
    }
    frame = pd.DataFrame(cells_of, dtype=object)
    frame.attrs |= {"gaps": gaps, "read": f"{about}, {counted(len(header), 'column')}"}
    return frame


def _of_text(path: Path, given: Format) -> tuple[list[str], list[list[str]], str, list[int]]:
    """Return the header and columns of delimited text, how it is written, and `_checked`'s gaps."""
    with files.explained(f"{path} cannot be read as a table"), files.open_regular(path) as file:
        data = file.read()
        cells = sum(data.count(mark.encode()) for mark in _DELIMITERS + "\n")
        needed = 4 * len(data) + CELL_BYTES * cells
        files.check_memory(f"{path}: reading it takes", needed, "Divide it, or drop columns.")
        text, encoding = _decoded(path, data, given.encoding)
        if not text.strip():
            raise refused(path, "it is empty. Add a header and rows, or remove the file.")
        with files.long_fields():
            delimiter = given.delimiter or _delimiter(path, text)
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            header, kept, gaps = _checked(path, rows)
    marks = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "bar"}
    about = f"{marks.get(delimiter, repr(delimiter))} between values, {encoding}"
    return header, [list(column) for column in zip(*kept, strict=True)], about, gaps


def _checked(path: Path, rows: Any) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the header, the rows of a file without empty lines, and its gaps.

    These are, for each line that is empty or continues a row, the next row's number, from 0.
    """
    kept: list[list[str]] = []
    gaps: list[int] = []
    problem, header = "", []
    try:
        header = [name.strip() for name in next(rows)]
        line = rows.line_num  # before the row
        for row in rows:
            line, before = rows.line_num, line
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if len(row) != len(header):
                problem = f"has {len(row)} values, and the header {len(header)}. Quote values that "
                problem += "contain the delimiter, or correct the line."
            elif cells == header:
                problem = "repeats the header. Remove it."
            if problem:
                break
            gaps += [len(kept)] * (before - len(kept) - len(gaps) - 1)
            kept.append(cells)
    except csv.Error as error:
        problem = f"cannot be read: {error}. Is a quote not closed?"
    if problem:
        raise refused(path, f"line {rows.line_num} {problem}")
    return header, kept, gaps


def _decoded(path: Path, data: bytes, given: str) -> tuple[str, str]:
    """Return the text of a file, and the name of its encoding."""
    guesses = ["utf-8-sig", "cp1252"]
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        guesses = ["utf-16"]
    for encoding in [given] if given else guesses:
        try:
            text = data.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
        if "\0" in text:
            break
        if encoding == "cp1252":
            files.logger.warning("%s is not UTF-8: it is read as Windows-1252.", path)
        return text, encoding.removesuffix("-sig")
    tried = " or ".join([given] if given else guesses)
    raise refused(path, f"it is no text in {tried}. Set encoding in the schema.")


def _delimiter(path: Path, text: str) -> str:
    """Return the delimiter that divides the first lines into the most columns of equal number."""
    first = "\n".join(text.split("\n", 60)[:50])
    columns = {}
    for mark in _DELIMITERS:
        widths = [len(row) for row in csv.reader(io.StringIO(first), delimiter=mark) if row]
        usual, count = Counter(widths).most_common(1)[0]
        columns[mark] = (count * (usual > 1), usual)
    best = max(columns, key=lambda mark: columns[mark])
    if columns[best][0] == 0:
        text = "found a single column. Set delimiter in the schema, or add the target."
        raise refused(path, text)
    return best


def is_number(cells: pd.Series, decimal: str) -> npt.NDArray[np.bool_]:
    """Return which cells are numbers with a decimal mark, bool [N]."""
    return np.isfinite(numbers_of(cells, decimal))


def numbers_of(cells: pd.Series, decimal: str) -> npt.NDArray[np.float64]:
    """Return cells as numbers, float64 [N], NaN for those that are none."""
    texts: Any = cells.to_numpy(object)
    x = np.full(len(cells), np.nan)
    if decimal == ".":  # most numbers, at once
        x = np.array(pd.to_numeric(cells, errors="coerce"), np.float64)
        x[np.isinf(x)] = np.nan
    for place in np.flatnonzero(np.isnan(x) & (texts != "")):
        cell = texts[place]
        if _NUMBERS[decimal].fullmatch(cell):
            plain = cell.replace("," if decimal == "." else ".", "").replace(decimal, ".")
            x[place] = float(plain)
    return x


def mark_of(cells: pd.Series) -> str:
    """Return the decimal mark with which all cells are numbers, "." if both do; "" if none."""
    return next((mark for mark in ".," if is_number(cells, mark).all()), "")


def decimal_marks(where: object, frame: pd.DataFrame, given: str) -> dict[str, str]:
    """Return the decimal mark of each column that holds numbers only, "." or ",".

    A column in which the mark may be of decimals or of thousands has the mark of the others.
    Raises ``DataError`` if no other column says which.
    """
    marks: dict[str, str] = {}
    unclear: list[str] = []
    for name in map(str, frame):
        known = pd.Series([cell for cell in frame[name].unique() if cell], dtype=object)
        fits = [mark for mark in ".," if len(known) and is_number(known, mark).all()]
        if len(fits) == 2 and known.str.contains("[.,]").any():
            unclear.append(name)
        elif fits:
            marks[name] = given if given in fits else fits[0]
    signs = {mark for name, mark in marks.items() if frame[name].str.contains("[.,]").any()}
    if commas := [name for name, mark in marks.items() if mark == ","]:
        files.logger.info("%s: decimal commas in %s.", where, ", ".join(commas[:9]))
    for name in unclear:
        comma = frame[name].str.contains(",").any()
        if not given and len(signs) != 1 and comma:
            problem = "a comma may be of decimals or of thousands. Set decimal in the schema."
            raise refused(f"{where}: {name}", problem)
        marks[name] = given or (next(iter(signs)) if len(signs) == 1 else ".")
        if comma or marks[name] == ",":
            text = "%s: %s: as in other columns, %r is of decimals, and the other of thousands."
            files.logger.warning(text, where, name, marks[name])
    return marks


def without_unit(cells: pd.Series) -> tuple[pd.Series, str]:
    """Return numbers without the unit that is behind each of them, and the unit; "" if none."""
    known = cells[cells != ""]
    match = _WITH_UNIT.fullmatch(known.iloc[0]) if len(known) else None
    unit = match[1].strip() if match else ""
    if not unit or not known.str.endswith(unit).all():
        return cells, ""
    bare = cells.str.removesuffix(unit).str.strip()
    return (bare, unit) if mark_of(bare[bare != ""]) else (cells, "")
