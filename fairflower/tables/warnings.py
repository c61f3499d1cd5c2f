"""What is suspicious in tables: columns that give the target away, and rows at two domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
        name, parts = column.name, []
        for raw in raws.values():
            named = raw.levels.get(name)
            parts.append(raw.texts(name) if named else raw.column(name).astype(object))
        if _gives_away(np.concatenate(parts), y):
            found.append(
                f"The column {name!r} gives the target away: it follows from the column. Drop it "
                "(data.drop), unless it will be known when the target is not."
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


def shared_rows(frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return a sentence if rows of two domains are equal in all columns."""
    seen: Counter[int] = Counter()
    for frame in frames.values():  # rows that others of their domain equal are no sign of a person
        seen.update(pd.util.hash_pandas_object(frame, index=False).drop_duplicates(keep=False))
    if twice := sum(count > 1 for count in seen.values()):
        return [
            f"{counted(twice, 'row', 'is', 'are')} at two or more domains, equal in all columns. "
            "If they are of the same people, remove them from all but one."
        ]
    return []


def single_class(targets: Mapping[str, Sums]) -> list[str]:
    """Return a sentence for each domain whose training rows have one class."""
    return [
        f"All training rows at {domain} have the same class."
        for domain, sums in targets.items()
        if any(len(own.counts) == 1 for own in sums.values())
    ]
