"""The embedded table of patients with lung cancer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.published.tables import Lung
from fairflower.testing import check_data

DATA = Lung(DataConfig(name="lung"))
Y = {d: [DATA.labels(d, split) for split in ("train", "test")] for d in DATA.domains}


def test_lung_passes_check_data() -> None:
    check_data(Lung)


def test_the_numbers_of_patients_and_deaths_are_those_of_the_source_and_documented() -> None:
    """R's survival: 228 patients, of whom 165 died."""
    found = {
        domain: [len(train) + len(test), len(train), len(test), sum(train[:, 1]) + sum(test[:, 1])]
        for domain, (train, test) in Y.items()
    }
    everybody = np.concatenate([y for of in Y.values() for y in of])
    assert everybody.shape == (228, 2)
    assert everybody[:, 1].sum() == 165
    assert np.median(everybody[:, 0]) == 255.5
    rows = (line.strip().rsplit(maxsplit=4) for line in (Lung.__doc__ or "").splitlines())
    table = {row[0].strip(): list(map(int, row[1:])) for row in rows if row and row[0].strip() in Y}
    assert table == found


def test_constants_are_those_of_the_training_patients() -> None:
    """Cuts, means and standard deviations; medians are what missing values become."""
    x = [DATA.features(d, "train", np.arange(len(y))) for d, (y, _) in Y.items()]
    joined = np.concatenate(x).astype(float)
    np.testing.assert_allclose(joined.mean(axis=0), DATA.mean, rtol=1e-3)
    np.testing.assert_allclose(joined.std(axis=0), DATA.std, rtol=1e-3)
    y = np.concatenate([train for train, _ in Y.values()])
    task: Any = prepare(DataConfig(name="lung", clients_per_domain=1)).learns
    tenths = np.quantile(y[y[:, 1] == 1, 0], np.arange(1, 11) / 10)
    np.testing.assert_allclose(task.cuts, tenths, atol=1)
    for name, value in DATA.typical.items():
        column = np.concatenate([DATA.column(name, d, "train") for d in DATA.domains])
        assert np.nanmedian(column) == value


def test_one_client_per_domain_has_the_training_patients_of_an_institution() -> None:
    federation = prepare(DataConfig(name="lung", clients_per_domain=1))
    assert [c.num_examples for c in federation.clients] == [18, 9, 9, 11, 10, 8, 8, 39]
    assert (federation.num_classes, federation.shape) == (10, (8,))
    assert all(not client.class_counts for client in federation.clients)


def test_the_embedding_script_makes_the_columns_of_the_embedded_table(tmp_path: Path) -> None:
    import embed_lung
    import pandas as pd

    rows = {name: [1.0, None] for name in embed_lung.COLUMNS.values()} | {"sex": [1, 2]}
    pd.DataFrame(rows).to_csv(tmp_path / "lung.csv")
    packed = json.loads(embed_lung.packed(tmp_path / "lung.csv"))
    assert list(packed) == list(json.loads(embed_lung.OUTPUT.read_text()))
    expected = dict.fromkeys(packed, "1,nan") | {"institution": "1,0", "male": "1,0"}
    assert packed == expected
