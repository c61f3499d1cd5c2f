"""Visits to doctors by self-rated health: the embedded benchmark of features, no files.

The RAND Health Insurance Experiment gave families in six places of the United States insurances
that bore between all and almost none of their costs, and noted for up to five years what they used
(1974-1982; J. Newhouse, *Free for All?*, Harvard University Press, 1993). An example is
a person in a year, and the class whether they saw doctors more often than the median of once.
The domains are how the person had rated their own health before:

=========  =======  =====  ====  ===================
domain     persons  train  test  more than one visit
=========  =======  =====  ====  ===================
excellent  3275     8807   2212  49 %
good       2088     5838   1471  50 %
fair       457      1242   318   54 %
poor       92       236    66    65 %
=========  =======  =====  ====  ===================

Who is in poor health is older (43 years in the mean, those in excellent health 22), is
oftener seen and is rare: weighted by samples, poor counts for 1.5 % of the model. No feature says
much: what is right in 60 % to 70 % of the cases is good here.

``randhie:groups=site:visits=1`` has the study's six places for domains, and for a class whether
a doctor was seen at all, which is so in 53 % to 76 % of a place's years: there what is right for
most places is wrong for two of them.

The features are the regressors of A. Cameron and P. Trivedi, *Microeconometrics* (Cambridge
University Press, 2005, chapter 20) but for health, which is the domain, and race, which is left
out: coinsurance, deductible plan, participation incentive, maximum expenditure, limitations,
chronic diseases, income, family size, education, age, and sex and child with their product.

The table is that of their book, as statsmodels ships it with the words "This is in the public
domain" (``statsmodels/datasets/randhie/src``); ``experiments/embed_randhie.py`` rounded and
packed it. Of each domain's persons, in their order, every fifth from the first is for testing, in
all of their years. Members of a family may be on both sides.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data.federation import Floats, Ints
from fairflower.data.vectors import FeatureSet

#: What a domain may be -> the domains, and their numbers in the table.
GROUPS = {
    "health": {"excellent": 0, "good": 1, "fair": 2, "poor": 3},
    "site": {f"site {number}": number for number in range(1, 7)},
}
#: Features that are columns of the table, in their order, under names that can be read.
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
    """See the module's text. Each domain is divided equally among its clients.

    ``mean`` and ``std`` are of the training examples of all domains, published here with the data:
    insurers that share no records would take such numbers from a survey. ``groups`` says what a
    domain is, and ``visits`` from how many visits on an example is of class 1: 2 is above the
    median.
    """

    feature_names = (*COLUMNS.values(), "female child")
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
        own = self._rows(domain, split)[rows]
        columns = [_table()[name][own] for name in (*COLUMNS, "fchild")]
        return np.stack(columns, axis=1).astype(np.float32)

    def _rows(self, domain: str, split: str) -> Ints:
        """Those of the table, int64 [N]."""
        rows: Ints = np.flatnonzero(_table()[self.groups] == GROUPS[self.groups][domain])
        _, person = np.unique(_table()["person"][rows], return_inverse=True)
        own: Ints = rows[(person % 5 == 0) == (split == "test")]
        return own

    def fingerprint(self) -> Any:
        """Nothing but the version decides what is embedded."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        return "RAND Health Insurance Experiment"


@cache
def _table() -> dict[str, npt.NDArray[np.float64]]:
    """The columns by name, [20190] each."""
    file = resources.files(__package__).joinpath("randhie.json")
    packed = json.loads(file.read_text(encoding="utf-8"))
    text = zlib.decompress(base64.b85decode(packed["values"])).decode()
    parsed = (np.array(column.split(","), np.float64) for column in text.split(";"))
    columns = dict(zip(packed["columns"], parsed, strict=True))
    columns["num"] = np.log(columns["num"])
    columns["fchild"] = columns["female"] * columns["child"]
    return columns
