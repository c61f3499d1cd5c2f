"""Scores: numbers with a direction, and how they are shown."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Numbers = TypeVar("_Numbers", float, NDArray[np.float64])


@dataclass(frozen=True)
class Score:
    """A number with a direction: its names, its unit and range, and how it is shown.

    Histories store values in base units, and a fraction is shown in percent.

    >>> ACCURACY.shown(0.25), ACCURACY.largest, ACCURACY.phrase
    (25.0, 100.0, 'accuracy')
    >>> Score("mae", better=-1, unit="mm", high=float("inf")).shown(0.25)
    0.25
    """

    #: Name in histories.
    name: str
    #: 1 if higher values are better, -1 if lower values are, 0 if neither.
    better: int = 1
    #: Unit in which values are shown: "%" for fractions, "" for none.
    unit: str = "%"
    #: Range of the values.
    low: float = 0.0
    high: float = 1.0
    #: Differences within which methods count as equivalent, in the unit.
    margin: float = 1.0
    #: Number of decimals in tables.
    digits: int = 2
    #: Name in tables, by default ``name``.
    title: str = ""
    #: Name in sentences, by default ``name``.
    phrase: str = ""

    def __post_init__(self) -> None:
        for field in ("title", "phrase"):
            object.__setattr__(self, field, getattr(self, field) or self.name)

    def shown(self, value: _Numbers) -> _Numbers:
        """Return values, or differences of values, in the unit."""
        return 100 * value if self.unit == "%" else value

    @property
    def largest(self) -> float:
        """The largest possible difference, in the unit."""
        return self.shown(self.high - self.low)


ACCURACY = Score("accuracy")
BALANCED_ACCURACY = Score("balanced_accuracy", title="ACC", phrase="class-balanced accuracy")
AUC = Score("auc", title="AUC", phrase="AUC")
