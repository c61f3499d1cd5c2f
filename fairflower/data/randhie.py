"""RAND Health Insurance Experiment: doctor visits by self-rated health, from an embedded table.

From 1974 to 1982, the experiment gave families at six sites in the United States different health
insurance plans, from almost full coverage to almost none, and recorded their use of care for up to
five years (J. Newhouse, *Free for All?*, Harvard University Press, 1993). An example is one year of
one person. The class is whether the person had more doctor visits that year than the median of 1.
The domain is the person's rating of their own health before the experiment:

=========  =======  =====  ====  ===================
domain     people   train  test  more than one visit
=========  =======  =====  ====  ===================
excellent  3275     8807   2212  49 %
good       2088     5838   1471  50 %
fair       457      1242   318   54 %
poor       92       236    66    65 %
=========  =======  =====  ====  ===================

People in poor health are older (mean age 43, versus 22 in excellent health) and see doctors more
often. They are also rare: with sample weighting, the domain poor has 1.5 % of the weight. The
features predict little, so an accuracy of 60 % to 70 % is good.

In ``randhie:groups=site:visits=1``, the domains are the six sites of the study, and the class is
whether the person saw a doctor at all. This holds for 53 % to 76 % of the examples, depending on
the site. Predictions that are best for most sites are wrong for two others.

The features are the regressors of A. Cameron and P. Trivedi, *Microeconometrics* (Cambridge
University Press, 2005, chapter 20), except health (the domain) and race. They are coinsurance,
deductible plan, participation incentive, maximum expenditure, limitations, chronic diseases,
income, family size, education, age, sex, child, and the product of the last two.

``data.groups`` may be ``sex`` or ``health``. If the domains are health ratings, each domain has a
single group of ``health``.

The table comes from their book. statsmodels ships it with the words "This is in the public domain"
(``statsmodels/datasets/randhie/src``), and ``experiments/embed_randhie.py`` rounded and embedded
it. In each domain, all years of every fifth person, starting with the first, are test examples.
Members of the same family may be in different splits.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data.federation import Floats, Ints
from fairflower.data.vectors import FeatureSet

#: Grouping -> domain -> its number in the table.
GROUPS = {
    "health": {"excellent": 0, "good": 1, "fair": 2, "poor": 3},
    "site": {f"site {number}": number for number in range(1, 7)},
}
#: Column of the table -> name of the feature, in the order of the features.
COLUMNS = {
    "logc": "log coinsurance",
    "idp": "deductible plan",
    "lpi": "log incentive",
    "fmde": "log maximum expenditure",
    "physlm": "limitation",
    "disea": "chronic diseases",
    "linc": "log income",
    "num": "log family size",
    "educdec": "education in years",
    "xage": "age",
    "female": "female",
    "child": "child",
}


class RandHIE(FeatureSet):
    """Doctor visits by self-rated health or by site; see the module's documentation for the data.

    Each domain is divided equally among its clients. ``mean`` and ``std`` are constants, computed
    once over the training examples of all health ratings; insurers that share no records could take
    them from a survey. If the domains are sites, whose split is another, they include some test
    examples, and differ from those of the training examples by up to 3.5 %. ``groups`` selects the
    domains. Examples with at least ``visits`` visits have
    class 1 (the default 2 is above the median).
    """

    feature_names = (*COLUMNS.values(), "female child")
    attributes: ClassVar = {"sex": ("male", "female"), "health": tuple(GROUPS["health"])}
    mean = (
        *(2.389, 0.2587, 4.707, 4.042, 0.1177, 11.17, 8.698),
        *(1.248, 11.97, 25.67, 0.5162, 0.4018, 0.1918),
    )
    std = (
        *(2.042, 0.4379, 2.699, 3.471, 0.3151, 6.713, 1.259),
        *(0.5381, 2.8, 16.78, 0.4997, 0.4903, 0.3937),
    )

    def __init__(
        self,
        config: DataConfig,
        *,
        groups: Literal["health", "site"] = "health",
        visits: Annotated[int, Range(1)] = 2,
    ) -> None:
        self.groups, self.visits = groups, visits
        self.classes = (f"fewer than {visits} visits", f"{visits} visits or more")
        super().__init__(config)

    def all_domains(self) -> Sequence[str]:
        return tuple(GROUPS[self.groups])

    def labels(self, domain: str, split: str) -> Ints:
        seen = _table()["mdvis"][self._rows(domain, split)]
        return (seen >= self.visits).astype(np.int64)

    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        chosen = self._rows(domain, split)[rows]
        columns = [_table()[name][chosen] for name in (*COLUMNS, "fchild")]
        return np.stack(columns, axis=1).astype(np.float32)

    def group_of(self, domain: str, split: str) -> Ints:
        column = {"sex": "female", "health": "health"}[self.config.groups]
        return _table()[column][self._rows(domain, split)].astype(np.int64)

    def _rows(self, domain: str, split: str) -> Ints:
        """Return a split's rows of the table, int64 [N]."""
        rows: Ints = np.flatnonzero(_table()[self.groups] == GROUPS[self.groups][domain])
        _, person = np.unique(_table()["person"][rows], return_inverse=True)
        chosen: Ints = rows[(person % 5 == 0) == (split == "test")]
        return chosen

    def fingerprint(self) -> Any:
        """Return the version of the embedded table."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        return "RAND Health Insurance Experiment"


@cache
def _table() -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns of the table by name, each of shape [20190]."""
    file = resources.files(__package__).joinpath("randhie.json")
    packed = json.loads(file.read_text(encoding="utf-8"))
    text = zlib.decompress(base64.b85decode(packed["values"])).decode()
    parsed = (np.array(column.split(","), np.float64) for column in text.split(";"))
    columns = dict(zip(packed["columns"], parsed, strict=True))
    columns["num"] = np.log(columns["num"])
    columns["fchild"] = columns["female"] * columns["child"]
    return columns
