"""The embedded heart disease table of four hospitals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.data.federation import Floats
from fairflower.published.tables import HeartDisease
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


@pytest.mark.parametrize("target", ["severity", "labels"])
def test_other_targets_pass_check_data(target: str) -> None:
    check_data(HeartDisease, target=target)


def test_severity_has_five_grades_of_which_the_first_is_no_disease() -> None:
    """Hungary's file has no grades."""
    graded = HeartDisease(DataConfig(), target="severity")
    assert graded.domains == ("cleveland", "switzerland", "long beach")
    for domain in graded.domains:
        grades = graded.labels(domain, "test")
        assert set(grades) == {0, 1, 2, 3, 4} or len(grades) == 16
        np.testing.assert_array_equal(grades > 0, DATA.labels(domain, "test"))
    federation = prepare(DataConfig(name="heart-disease:target=severity", clients_per_domain=1))
    y = np.concatenate([federation.train(k).y for k in range(3)]).astype(float)
    task: Any = federation.learns
    assert (task.center, task.scale) == pytest.approx((y.mean(), y.std()), rel=1e-3)
    assert task.primary.unit == "grades"
    assert (federation.num_classes, federation.shape) == (1, (13,))


def test_three_labels_are_those_of_the_features_and_unknown_where_the_source_lacks_them() -> None:
    federation = prepare(DataConfig(name="heart-disease:target=labels", clients_per_domain=1))
    assert (federation.num_classes, federation.shape) == (3, (11,))
    labels = HeartDisease(DataConfig(), target="labels")
    assert not {"exercise angina", "fasting sugar"} & set(labels.feature_names)
    both = {d: [labels.labels(d, s) for s in ("train", "test")] for d in labels.domains}
    y = {domain: np.concatenate(parts) for domain, parts in both.items()}
    assert [len(of) for of in y.values()] == [303, 269, 116, 137]
    unknown = np.array([np.isnan(of).sum(axis=0) for of in y.values()])
    assert unknown.tolist() == [[0, 0, 0], [0, 0, 8], [0, 0, 70], [0, 0, 7]]
    for domain in labels.domains:
        x = np.concatenate([all_features(DATA, domain, split) for split in ("train", "test")])
        known = y[domain][~np.isnan(y[domain]).any(axis=1)]
        place = [DATA.feature_names.index(name) for name in ("exercise angina", "fasting sugar")]
        np.testing.assert_array_equal(known[:, 1:].sum(axis=0), x[:, place].sum(axis=0))
    names = [DATA.feature_names.index(name) for name in labels.feature_names]
    assert labels.mean == tuple(np.take(DATA.mean, names))


def all_features(data: HeartDisease, domain: str, split: str) -> Floats:
    return data.features(domain, split, np.arange(len(data.labels(domain, split))))
