"""New rows of a table, such as a new patient's, as features of a trained network."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fairflower.config.text import unknown
from fairflower.data.federation import Floats
from fairflower.data.files import logger
from fairflower.errors import DataError
from fairflower.tables.columns import OTHER
from fairflower.tables.encoding import Encoding, encoded, unknown_levels
from fairflower.tables.reading import MISSING
from fairflower.tables.schema import parse


def frame_of(row: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row, a mapping of columns to numbers or texts, as a table of text.

    None, NaN and what stands for a missing cell in files are missing.
    """
    cells = {}
    for name, value in row.items():
        empty = value is None or (isinstance(value, float) and math.isnan(value))
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        text = "" if empty else str(value).strip()
        if number and not empty:  # in a form that no decimal mark can change
            text = str(int(value)) if value == int(value) else f"{float(value):.17e}"
        cells[str(name)] = ["" if text in MISSING else text]
    return pd.DataFrame(cells, dtype=object)


def listed_rows(frame: pd.DataFrame, places: npt.NDArray[np.int64], most: int = 9) -> str:
    """Return rows as text for messages: lines of the file, or else rows from 1."""
    gaps = frame.attrs.get("gaps")
    numbers = [k + 1 if gaps is None else k + 2 + bisect_right(gaps, k) for k in places[:most]]
    word = ("row" if gaps is None else "line") + "s" * (len(places) > 1)
    return f"{word} {', '.join(map(str, numbers))}" + ", ..." * (len(places) > most)


def new_features(encoding: Encoding, frame: pd.DataFrame, where: str, decimal: str = "") -> Floats:
    """Return new rows as features, float32 [N, D], whatever the order of their columns is.

    Other columns are ignored. A cell may be missing where it was in training; it is replaced by the
    mean or the mode, and a warning names a column that all rows lack. A level that few or no
    training rows had is another one, of which a warning says the row. Raises ``DataError`` if a
    needed column or cell is missing.
    """
    frame = frame.copy()
    for column in encoding.columns:
        if column.name not in frame and not column.may_miss:
            words = unknown("column", column.name, [str(name) for name in frame][:50])
            raise DataError(f"{where}: {words} The model needs it, and no training row lacked it.")
        if column.name not in frame:
            text = "%s: the column %r, which the model uses, is not there: all its cells count as "
            logger.warning(text + "missing, and are replaced.", where, column.name)
        frame[column.name] = frame.get(column.name, "")
    raw = parse(where, frame, encoding.columns, decimal)
    for column in encoding.columns:
        lacking = np.flatnonzero(raw.missing(column.name))
        if len(lacking) and not column.may_miss:
            raise DataError(
                f"{where}: {listed_rows(frame, lacking)}: {column.name} is missing, and no "
                "training row lacked it. Add the value."
            )
    for name, rows in unknown_levels(encoding, raw).items():
        text = "%s: %s: the model does not know the level of %s: it counts as %s."
        logger.warning(text, where, name, listed_rows(frame, rows), OTHER)
    return encoded(encoding, raw)
