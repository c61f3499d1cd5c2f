"""Scores: numbers with a direction, how they are shown, and the means that they come from."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
    #: Differences within which methods count as equivalent, in the unit: for STD and the average;
    #: the worst domain has twice as much. 0 means 1 point for a fraction, and otherwise 1 % of the
    #: average of the method that is compared with.
    margin: float = 0.0
    #: Number of decimals in tables.
    digits: int = 2
    #: Name in tables, by default ``name``.
    title: str = ""
    #: Name in sentences, by default ``name``.
    phrase: str = ""

    def __post_init__(self) -> None:
        for field in ("title", "phrase"):
            object.__setattr__(self, field, getattr(self, field) or self.name)
        if self.unit == "%":
            object.__setattr__(self, "margin", self.margin or 1.0)

    def shown(self, value: _Numbers) -> _Numbers:
        """Return values, or differences of values, in the unit."""
        return 100 * value if self.unit == "%" else value

    @property
    def largest(self) -> float:
        """The largest possible difference, in the unit."""
        return self.shown(self.high - self.low)

    @property
    def points(self) -> str:
        """The unit of differences in sentences: ``points`` for fractions; "" for no unit."""
        return "points" if self.unit == "%" else self.unit

    @property
    def like_accuracy(self) -> bool:
        """Whether values are fractions, and higher is better."""
        return self.unit == "%" and self.better > 0

    @property
    def stated(self) -> str:
        """The name in tables, the unit and, unless it is a fraction's, the direction.

        >>> ACCURACY.stated, Score("rmse", -1, "days", title="RMSE").stated
        ('accuracy in %', 'RMSE, days; lower is better')
        """
        if self.like_accuracy:
            return f"{self.title} in %"
        better = {1: "; higher is better", -1: "; lower is better", 0: ""}[self.better]
        return f"{self.title}{self.unit and f', {self.unit}'}{better}"

    @property
    def axis(self) -> str:
        """The label of an axis: as `stated`, but with a comma before "%"."""
        return self.stated.replace(" in %", ", %")

    def legible(self, means: Iterable[float]) -> "Score":
        """Return the score with enough decimals for three digits of every mean, unless fractions.

        >>> Score("rmse", -1, "").legible([0.04567, 3.0]).digits, ACCURACY.legible([0.001]).digits
        (4, 2)
        """
        least = min((abs(mean) for mean in means if mean and math.isfinite(mean)), default=1.0)
        places = 0 if self.unit == "%" else 2 - math.floor(math.log10(least))
        return replace(self, digits=max(self.digits, min(places, 12)))

    def text(self, value: float, digits: int = 4) -> str:
        """Return a value on a screen: a fraction with one decimal, else significant digits.

        >>> ACCURACY.text(0.25), Score("rmse", -1, "days").text(12.34567)
        ('25.0', '12.35')
        """
        shown = self.shown(value)
        return f"{shown:.1f}" if self.unit == "%" else f"{shown:.{digits}g}"


ACCURACY = Score("accuracy")
BALANCED_ACCURACY = Score("balanced_accuracy", title="ACC", phrase="class-balanced accuracy")
AUC = Score("auc", title="AUC", phrase="AUC")
MACRO_F1 = Score("macro_f1", title="F1", phrase="macro F1")
F1 = replace(MACRO_F1, name="f1", phrase="F1")
DICE = Score("dice", title="Dice", phrase="Dice score")
IOU = Score("iou", title="IoU", phrase="intersection over union")
RMSE = Score("rmse", -1, "", high=math.inf, title="RMSE", phrase="root mean squared error")
MAE = Score("mae", -1, "", high=math.inf, title="MAE", phrase="mean absolute error")
R2 = Score("r2", 1, "", low=-math.inf, title="R2", phrase="coefficient of determination")
NLL = Score("nll", -1, "nats", high=math.inf, digits=3, title="NLL", phrase="loss per token")
PERPLEXITY = Score("perplexity", -1, "", low=1, high=math.inf)
TOKEN_ACCURACY = Score("token_accuracy", title="accuracy", phrase="accuracy per token")
HARRELL = Score("concordance")
UNO = Score("uno_concordance", title="Uno's concordance", phrase="Uno's concordance")
BRIER = Score(
    *("integrated_brier", -1, "", 0, math.inf, 0, 3), title="IBS", phrase="integrated Brier score"
)


def by_label(scores: Mapping[str, NDArray[Any]], first: int = 0) -> dict[str, float]:
    """Return each score's mean over the labels that define it, and ``<name>_<k>`` of every label.

    ``scores`` are arrays [K], of labels from number ``first``; NaN is undefined.

    >>> by_label({"f1": np.array([0.5, np.nan])})
    {'f1': 0.5, 'f1_0': 0.5, 'f1_1': nan}
    """
    known = {name: values[~np.isnan(values)] for name, values in scores.items()}
    means = {name: float(np.mean(of)) if len(of) else math.nan for name, of in known.items()}
    return means | {
        f"{name}_{k}": float(value)
        for name, values in scores.items()
        for k, value in enumerate(values, first)
    }


def as_numbers(means: Mapping[str, Any]) -> dict[str, float]:
    """Return means as single numbers: an array [K] becomes ``name/0`` to ``name/<K - 1>``.

    >>> as_numbers({"loss": 0.5, "error": [1.0, 2.0]})
    {'loss': 0.5, 'error/0': 1.0, 'error/1': 2.0}
    """
    return {
        f"{name}/{k}" if np.ndim(values) else name: float(value)
        for name, values in means.items()
        for k, value in enumerate(np.atleast_1d(values))
    }


def from_numbers(numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the means that `as_numbers` received, whatever the order of their numbers."""
    means: dict[str, Any] = {}
    for key, value in numbers.items():
        name, several, k = key.partition("/")
        if several:
            means.setdefault(name, {})[int(k)] = value
        else:
            means[name] = value
    arrays = {n: [of[k] for k in sorted(of)] for n, of in means.items() if isinstance(of, dict)}
    return means | arrays
