"""What is suspicious in tables: columns that give the target away, and rows at two domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from fairflower.config.text import counted
from fairflower.tables.columns import RARE, Raw
from fairflower.tables.encoding import Encoding, Sums


def leaks(encoding: Encoding, raws: Mapping[str, Raw], targets: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each column that determines the target of training rows.

    That is a column whose values correspond one to one to classes, a number that is larger in one
    class than in the other, or one that is a linear function of a target. ``targets`` are those of
    the domains: names of classes [N], or numbers [N] or [N, D].
    """
    y = np.concatenate([np.asarray(values) for values in targets.values()])
    found = []
    for column in encoding.columns:
        x = np.concatenate([raw.cells[column.name].astype(object) for raw in raws.values()])
        if _gives_away(x, y):
            found.append(
                f"The column {column.name!r} gives the target away: it follows from the column. "
                "Drop it (data.drop), unless it will be known when the target is not."
            )
    return found


def _gives_away(x: Any, y: Any) -> bool:
    known = np.array([value != "" and value == value for value in x], bool)
    if known.sum() < 2 * RARE:
        return False
    x, y = x[known], y[known]
    if y.dtype.kind == "O":
        pairs = Counter(zip(x.tolist(), y.tolist(), strict=True))
        if 1 < len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}):
            return True
        of = [x[y == name] for name in set(y)] if isinstance(x[0], float) else []
        return len(of) == 2 and bool(of[0].max() < of[1].min() or of[1].max() < of[0].min())
    if not all(isinstance(value, float) for value in x):
        return False
    x, y = x.astype(np.float64), y.reshape(len(y), -1)
    for target in y.T:
        both = ~np.isnan(target)
        a, b = x[both], target[both]
        enough = len(a) >= 2 * RARE and a.std() > 0 and b.std() > 0
        if enough and abs(np.corrcoef(a, b)[0, 1]) > 1 - 1e-9:
            return True
    return False


def compared(raw: Raw, names: Iterable[str], targets: Any = ()) -> pd.DataFrame:
    """Return the rows without a missing cell, as numbers, levels and targets [N] or [N, D]."""
    cells: dict[Any, Any] = {name: raw.cells[name] for name in names}
    if len(targets):
        cells |= enumerate(np.asarray(targets).reshape(len(targets), -1).T)
    frame = pd.DataFrame(cells)
    return frame[~((frame == "") | frame.isna()).any(axis=1)]


def distinct(frame: pd.DataFrame) -> set[Any]:
    """Return digests of the rows that equal no other row of their domain."""
    rows = pd.util.hash_pandas_object(frame, index=False)
    return set(rows.drop_duplicates(keep=False))


def shared_rows(frames: Mapping[str, pd.DataFrame], least: int) -> list[str]:
    """Return a sentence if more rows of two domains are equal than chance explains.

    ``frames`` have the `compared` rows. Counts below ``least`` are not told. Chance explains a
    count that Poisson's law with the mean `by_chance` exceeds with a probability above 0.001.
    """
    from scipy.stats import poisson

    rows, pairs = {domain: distinct(frame) for domain, frame in frames.items()}, []
    for a, b in combinations(frames, 2):
        count = len(rows[a] & rows[b])
        if count and poisson.sf(count - 1, by_chance(frames[a], frames[b])) < 0.001:
            pairs.append(f"{count if count >= least else f'fewer than {least}'} at {a} and {b}")
    if not pairs:
        return []
    listed = ", ".join(pairs[:9]) + ", ..." * (len(pairs) > 9)
    columns = frames[next(iter(frames))].shape[1]
    return [
        f"Rows without missing cells are equal in all {counted(columns, 'column')}: {listed}. "
        "Chance would give fewer. If they are of the same people, remove them from all but one."
    ]


def by_chance(a: pd.DataFrame, b: pd.DataFrame) -> float:
    """Return how many pairs of rows would be equal if the columns were independent.

    The share of pairs that are equal in a column is that within domains, with one more equal pair.
    """
    expected = float(len(a) * len(b))
    for name in a:
        counts = [frame[name].value_counts().to_numpy() for frame in (a, b)]
        equal = sum(int((n * (n - 1)).sum()) for n in counts)
        expected *= (2 + equal) / (2 + sum(len(f) * (len(f) - 1) for f in (a, b)))
    return expected


def single_class(targets: Mapping[str, Sums]) -> list[str]:
    """Return a sentence for each domain whose training rows have one class."""
    return [
        f"All training rows at {domain} have the same class."
        for domain, sums in targets.items()
        if any(len(own.counts) == 1 for own in sums.values())
    ]
