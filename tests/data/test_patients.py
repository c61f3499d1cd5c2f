"""Examples of one patient stay together: in one split, and at one client of a domain."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflower.config import DataConfig
from fairflower.data import DataError, DataSet, prepare
from fairflower.data.cache import make_data_set
from fairflower.data.files import every_fifth
from fairflower.data.partition import deal, equal_sizes
from fairflower.data.rows import SPLITS, divided_rows, draw_anew
from fairflower.errors import ConfigError

#: Layouts that the property test draws: many, because each takes a millisecond.
LAYOUTS = 1_000


class Visits(DataSet):
    """Examples with a class and a patient; domain -> split -> pairs (class, patient)."""

    def __init__(self, config: DataConfig, layout: dict[str, dict[str, list[Any]]]) -> None:
        self.layout = layout
        super().__init__(config)

    def all_domains(self) -> list[str]:
        return list(self.layout)

    def labels(self, domain: str, split: str) -> Any:
        return np.array([label for label, _ in self.layout[domain][split]], np.int64)

    def units(self, domain: str, split: str) -> list[str]:
        return [patient for _, patient in self.layout[domain][split]]

    def fingerprint(self) -> Any:
        return 0

    def source(self, domain: str) -> str:
        return "here"


#: Settings of which two are drawn for each layout, with the values that are drawn.
CHOICES: dict[str, list[Any]] = {
    "redraw": ["rows"],
    "test_examples": [1, 7],
    "fraction": [0.1, 0.25],
    "examples_per_client": [4, 9],
    "dirichlet_alpha": [0.5, 10.0],
    "corrupted_clients": [1, 2],
    "imbalance_factor": [2, 5],
    "validation_fraction": [0.1, 0.5],
    "validation_examples": [5],
}


def drawn(rng: np.random.Generator) -> tuple[dict[str, Any], DataConfig]:
    """Draw one or two domains of patients with up to 9 examples of three classes, and settings."""

    def examples(prefix: str) -> list[Any]:
        patients = np.repeat(np.arange(n := rng.integers(3, 20)), rng.integers(1, 10, n))
        pairs = zip(rng.integers(0, 3, len(patients)), rng.permutation(patients), strict=True)
        return [(int(label), f"{prefix}{patient}") for label, patient in pairs]

    layout = {d: {s: examples(s) for s in ("train", "test")} for d in "xy"[: rng.integers(1, 3)]}
    keys = rng.choice(list(CHOICES), 2, replace=False)
    chosen = {key: CHOICES[key][rng.integers(len(CHOICES[key]))] for key in keys}
    chosen |= {"clients_per_domain": int(rng.integers(1, 5)), "seed": int(rng.integers(9))}
    return layout, DataConfig("npz", patient="patient", **chosen)


def check_division(layout: dict[str, Any], config: DataConfig) -> bool:
    """Check a division by brute force; return False if it was refused with a reason."""
    data_set = Visits(config, layout)
    try:
        if config.redraw:
            draw_anew(data_set)
        _, groups, rows = divided_rows(data_set)
    except DataError:
        return False
    for domain in layout:
        places: dict[tuple[str, bool], set[Any]] = {}  # patient -> its split and client
        seen = set()
        for (split, by_group), group in product(rows.items(), groups):
            # Clean and corrupted clients are tested on versions of the same examples.
            version = split == "test" and group.corrupted
            for client, own in enumerate(by_group[group.name] if group.domain == domain else []):
                assert len(own)
                for row in own.tolist():
                    patient = data_set.units(domain, SPLITS[split])[row]
                    places.setdefault((patient, version), set()).add((split, group.name, client))
                    assert (split, row, version) not in seen
                    seen.add((split, row, version))
        assert {len(of_patient) for of_patient in places.values()} == {1}
        tested = [
            {p for (p, _), of in places.items() for s, *_ in of if (s == "test") == side}
            for side in (False, True)
        ]
        assert not tested[0] & tested[1]
    return True


@settings(max_examples=LAYOUTS)
@given(st.integers(0, 2**32))
def test_no_patient_is_on_two_sides(seed: int) -> None:
    check_division(*drawn(np.random.default_rng(seed)))


@pytest.mark.nightly
@settings(max_examples=10_000)
@given(st.integers(0, 2**32))
def test_no_patient_is_on_two_sides_of_ten_thousand_layouts(seed: int) -> None:
    check_division(*drawn(np.random.default_rng(seed)))


def test_a_third_of_the_layouts_are_divided() -> None:
    made = [check_division(*drawn(np.random.default_rng(seed))) for seed in range(200)]
    assert sum(made) > 67


@pytest.mark.parametrize("key", [k for k in CHOICES if k not in ("redraw", "imbalance_factor")])
def test_patients_with_one_example_each_are_divided_as_examples_are(key: str) -> None:
    layout = {"x": {s: [(k % 2, f"{s}{90 - k}") for k in range(48)] for s in ("train", "test")}}
    fraction = {"fraction": 0.2} if key == "validation_examples" else {}
    config = DataConfig("npz", clients_per_domain=4, **{key: CHOICES[key][-1]}, **fraction)
    plain, whole = (
        divided_rows(Visits(replace(config, patient=patient), layout))[2] for patient in ("", "p")
    )
    for split, by_group in plain.items():
        for name, clients in by_group.items():
            for own, same in zip(clients, whole[split][name], strict=True):
                np.testing.assert_array_equal(own, same)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 6), st.integers(0, 9))
def test_clients_get_nearly_equal_numbers_of_examples(
    sizes: list[int], clients: int, seed: int
) -> None:
    """Counts differ by at most the largest patient, which is as near as any order guarantees."""
    weights = np.array(sizes)
    order = np.random.default_rng(seed).permutation(len(sizes))
    dealt = deal(order, equal_sizes(int(weights.sum()), clients), weights)
    assert sorted(np.concatenate(dealt)) == sorted(order)
    counts = [int(weights[own].sum()) for own in dealt]
    if len(sizes) >= clients:
        assert min(counts) > 0
        assert max(counts) - min(counts) <= max(sizes)


def test_every_fifth_patient_is_a_test_patient() -> None:
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 40, 200)
    classes = rng.integers(0, 3, 200)
    test = every_fifth(classes, patients)
    first = dict(zip(patients[::-1], classes[::-1], strict=True))  # the first class
    for kind in range(3):
        ordered = [p for p in dict.fromkeys(patients.tolist()) if first[p] == kind]
        for place, patient in enumerate(ordered):
            assert (test[patients == patient] == (place % 5 == 0)).all()
    alone = every_fifth(classes)
    for kind in range(3):
        assert alone[classes == kind].nonzero()[0].tolist() == [
            *range(0, (classes == kind).sum(), 5)
        ]


# --- files ----------------------------------------------------------------------------------------


def arrays(folder: Path, patients: Any, tests: Any) -> DataConfig:
    """Write an npz file whose images say their patient, and return its config."""
    values = {"train": np.array(patients), "test": np.array(tests)}
    content = {f"patient_{s}": p for s, p in values.items()}
    content |= {f"y_{s}": np.arange(len(p)) % 2 for s, p in values.items()}
    content |= {f"x_{s}": np.full((4, 4, len(p)), p, np.uint8).T for s, p in values.items()}
    np.savez(folder / "clinic.npz", **content)
    return DataConfig("npz", dir=str(folder), patient="patient", clients_per_domain=2)


def held(config: DataConfig) -> list[set[int]]:
    """The patients of each client, in training and in tests."""
    federation = prepare(config)
    parts = [federation.splits(k, "train", "test") for k in range(len(federation.clients))]
    return [set(part.x[:, 0, 0, 0].tolist()) for client in parts for part in client]


def test_patients_in_arrays_are_whole(tmp_path: Path) -> None:
    sides = held(arrays(tmp_path, np.repeat(np.arange(8), 5), np.repeat(np.arange(20, 25), 3)))
    assert sum(map(len, sides)) == len(set().union(*sides)) == 13
    assert {len(side) for side in sides[::2]} == {4}  # of equal sizes
    config = arrays(tmp_path, np.arange(20) // 4, np.arange(8) // 2)
    config = replace(config, redraw="rows", clients_per_domain=1)
    sides = held(config)
    assert sum(map(len, sides)) == len(set().union(*sides)) == 5


def test_patients_on_both_sides_are_counted_and_not_named(tmp_path: Path) -> None:
    config = arrays(tmp_path, np.arange(20) // 2 + 70, np.array([77, 78, 99]))
    found = (
        "2 of 11 patients have training and test examples. Correct the split, or set data.redraw"
    )
    with pytest.raises(DataError, match=f"data.patient = 'patient': 'clinic': {found}") as caught:
        prepare(config)
    assert "77" not in str(caught.value)
    assert (
        caught.value.public == f"data.patient = 'patient': {found} = rows to draw whole patients."
    )


def test_texts_are_divided_by_patient(tmp_path: Path) -> None:
    rows = [f"word {n},{'ab'[n % 2]},p{n // 4}" for n in range(60)]
    path = tmp_path / "clinic.csv"
    path.write_text("\n".join(["text,label,patient", *rows]), encoding="utf-8")
    config = DataConfig("texts", dir=str(tmp_path), patient="patient")
    data_set = make_data_set(config)
    train, test = (set(data_set.units("clinic", s)) for s in ("train", "test"))
    assert test == {"p0", "p5", "p10"}
    assert not train & test
    with pytest.raises(DataError, match=r"clinic\.csv.*missing: ward"):
        prepare(replace(config, patient="ward"))
    path.write_text("\n".join(["text,label,patient", *rows, "word,a,"]), encoding="utf-8")
    with pytest.raises(DataError, match=r"line 62 has no patient \(data\.patient\)"):
        prepare(config)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("npz", {"redraw": "ward"}, "'patient', data.redraw = 'ward'"),
        (
            "npz",
            {"clients_per_domain": 4},
            r"3 training patients .*: 3 for 4 clients|too few training patients",
        ),
        (
            "npz",
            {"clients_per_domain": 3},
            r"too few test patients \(data.patient\): 2 for 3 clients",
        ),
        ("uci-digits", {}, "data.patient = 'patient': uci-digits has no such column. Remove"),
        ("heart-disease", {}, "data.patient = 'patient': heart-disease has no such column"),
        (
            "npz",
            {"validation_fraction": 0.9},
            "training patients of 1 classes; one patient of",
        ),
    ],
)
def test_what_cannot_be_divided_by_patient_is_named(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = arrays(tmp_path, np.arange(12) // 4, np.array([8, 8, 9, 9]))
    with pytest.raises((DataError, ConfigError), match=message):
        prepare(replace(config, name=name, **settings))


def test_years_of_one_person_are_at_one_client() -> None:
    config = DataConfig("randhie", patient="person", domains="poor", clients_per_domain=3)
    people = make_data_set(config).units("poor", "train")
    _, groups, rows = divided_rows(make_data_set(config))
    clients = rows["train"][groups[0].name]
    of = [{people[row] for row in own} for own in clients]
    assert sum(map(len, of)) == len(set().union(*of)) == len(set(people))
    assert max(map(len, clients)) - min(map(len, clients)) <= 1
