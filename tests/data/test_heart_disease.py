"""The embedded heart disease table of four hospitals."""

from __future__ import annotations

import numpy as np

from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.data.tables import HeartDisease
from fairflower.testing import check_data

DATA = HeartDisease(DataConfig(name="heart-disease"))


def test_heart_disease_passes_check_data() -> None:
    check_data(HeartDisease)


def test_the_numbers_of_patients_match_flamby() -> None:
    """FLamby's README: 199 + 104, 172 + 89, 30 + 16 and 85 + 45 patients."""
    actual = [sum(len(DATA.labels(d, s)) for s in ("train", "test")) for d in DATA.domains]
    assert actual == [303, 261, 46, 130]


def test_the_first_patients_match_the_uci_files() -> None:
    """Test patients, copied from processed.cleveland.data and processed.hungarian.data."""
    (first,) = DATA.features("cleveland", "test", np.array([0]))
    assert first.tolist() == [63, 1, 0, 0, 0, 145, 233, 1, 0, 1, 150, 0, np.float32(2.3)]
    (first,) = DATA.features("hungary", "test", np.array([0]))
    assert first.tolist() == [28, 1, 1, 0, 0, 130, 132, 0, 0, 1, 185, 0, 0]


def test_mean_and_std_are_those_of_the_training_patients() -> None:
    x = [DATA.features(d, "train", np.arange(len(DATA.labels(d, "train")))) for d in DATA.domains]
    joined = np.concatenate(x).astype(float)
    np.testing.assert_allclose(joined.mean(axis=0), DATA.mean, rtol=1e-3)
    np.testing.assert_allclose(joined.std(axis=0), DATA.std, rtol=1e-3)


def test_one_client_per_domain_has_the_training_patients_of_a_hospital() -> None:
    federation = prepare(DataConfig(name="heart-disease", clients_per_domain=1))
    assert [client.num_examples for client in federation.clients] == [202, 174, 30, 86]
    assert federation.test_sizes == (101, 87, 16, 44)
    assert federation.shape == (13,)
