"""Divisions of a user's own data: one client per site, and other draws of the test examples."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from experiments.leaderboard.ledger import key_of
from fairflower.config import DataConfig, RunConfig
from fairflower.config.run import default_values
from fairflower.data import DataError, Federation, prepare
from fairflower.data.cache import shared_examples
from fairflower.plans.execution import setup_summary
from fairflower.plans.plan import Plan
from fairflower.server.registration import ClientRegistry
from fairflower.server.setup import RunSetup


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Three hospitals of 60 images of 15 patients; the first pixels are an image's number."""
    folder = tmp_path / "npz"
    folder.mkdir()
    for k in range(3):
        x = np.zeros((60, 4, 4), np.uint8)
        x[:, 0, 0], x[:, 0, 1] = np.arange(60), k
        y, patient = np.arange(60) % 3, np.arange(60) // 4
        np.savez(
            folder / f"hospital{k}.npz",
            **{"x_train": x[:48], "y_train": y[:48], "x_test": x[48:], "y_test": y[48:]},
            **{"patient_train": patient[:48], "patient_test": patient[48:]},
        )
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for k in range(3):
        for label in "ab":
            place = tmp_path / "photos" / f"site{k}" / label
            place.mkdir(parents=True)
            for number in range(30):
                Image.fromarray(np.full((4, 4), number, np.uint8)).save(place / f"{number:02}.png")
    return tmp_path / "photos"


def federations(folder: Path, name: str = "npz", count: int = 3, **data: Any) -> list[Federation]:
    flat = {"data.name": name, "data.dir": str(folder), "data.image-size": 4}
    flat |= {f"data.{key}": value for key, value in data.items()}
    return [prepare(RunConfig.from_flat({**flat, "data.seed": s}).data) for s in range(count)]


def images_of(federation: Federation, client: int, split: str) -> set[int]:
    """Numbers of a client's images of a split."""
    (part,) = federation.splits(client, split)
    return set(part.x[:, 0, 0, 0].tolist())


def test_a_site_is_a_client_unless_the_config_says_otherwise(hospitals: Path) -> None:
    def clients(**flat: Any) -> int:
        return RunConfig.from_flat(flat).data.clients_per_domain

    for name in ("npz", "images", "texts"):
        assert clients(**{"data.name": name}) == 1
    assert clients(**{"data.name": "tiny_data_sets:Table"}) == 1
    assert clients() == clients(**{"data.name": "heart-disease"}) == 5
    assert clients(**{"data.name": "npz", "data.clients-per-domain": 5}) == 5
    assert DataConfig(name="npz").clients_per_domain == 1
    sent = default_values() | {"data.name": "npz"}  # `flwr run` sends every key
    assert RunConfig.from_flat(sent) == RunConfig.from_flat({"data.name": "npz"})
    # Runs store the number, so those of earlier versions compare with new ones.
    assert RunConfig().to_flat()["data.clients-per-domain"] == 5
    assert key_of(RunConfig()) == key_of(RunConfig.from_flat({"data.clients-per-domain": 5}))
    (federation,) = federations(hospitals, count=1)
    assert [client.num_examples for client in federation.clients] == [48, 48, 48]


def test_unused_training_examples_are_counted_and_explained(photos: Path) -> None:
    flat = {"data.name": "images", "data.dir": str(photos), "data.image-size": 4}
    flat |= {"data.clients-per-domain": 5}
    config = RunConfig.from_flat(flat)
    text = setup_summary(Plan([config]), prepare(config.data))
    reason = "what is left of 5 clients of equal size per domain"
    assert f"135 for training, 36 for tests, 9 training examples unused ({reason})" in text
    assert federations(photos, "images", 1)[0].redraw["unused"] == 0
    held_out = federations(photos, "images", 1, **{"validation-fraction": 0.25})[0]
    assert held_out.redraw["unused"] == 0


@pytest.mark.parametrize(("redraw", "uncovered"), [("patient", False), ("", True)])
def test_the_plan_says_of_redrawn_tests_what_the_report_says(
    hospitals: Path, redraw: str, uncovered: bool
) -> None:
    flat = {"data.name": "npz", "data.dir": str(hospitals), "data.image-size": 4}
    flat |= {"data.redraw": redraw, "data.clients-per-domain": 1 if redraw else 2}
    drawn = [RunConfig.from_flat({**flat, "seed": s, "data.seed": s}) for s in (0, 1)]
    text = setup_summary(Plan(drawn), prepare(drawn[0].data))
    assert "federations 0 and 1 share" in text
    assert ("Intervals do not cover what other examples would change" in text) == uncovered


def test_divisions_are_compared_by_their_examples_in_any_order(hospitals: Path) -> None:
    same = federations(hospitals)
    assert len({federation.fingerprint for federation in same}) == 3  # in another order
    assert len({federation.division for federation in same}) == 1
    assert same[0].redraw == {"train": 1.0, "test": 1.0, "unused": 0}
    divided = federations(hospitals, **{"clients-per-domain": 2})
    assert len({federation.division for federation in divided}) == 3


@pytest.mark.parametrize("by", ["rows", "patient"])
def test_redrawn_test_examples_differ_and_are_not_trained_on(hospitals: Path, by: str) -> None:
    drawn = federations(hospitals, redraw=by)
    assert len({federation.division for federation in drawn}) == 3
    for federation in drawn:
        assert federation.test_sizes == (12, 12, 12)
        for client in range(3):
            train, test = (images_of(federation, client, split) for split in ("train", "test"))
            assert train | test == set(range(60))
            assert not train & test
            if by == "patient":
                assert not {n // 4 for n in train} & {n // 4 for n in test}
            else:
                assert sorted(n % 3 for n in test) == [0] * 4 + [1] * 4 + [2] * 4
            labels = federation.client_test(client)
            assert [n % 3 for n in labels.x[:, 0, 0, 0]] == labels.y.tolist()
    assert len({frozenset(images_of(federation, 0, "test")) for federation in drawn}) == 3


def test_the_expected_overlap_is_that_of_many_draws(hospitals: Path) -> None:
    (federation,) = federations(hospitals, count=1, redraw="rows")
    shares = {"train": 0.8, "test": 0.2, "tests per training example": 0.25}
    assert federation.redraw == shares | {"unused": 0}
    flat = {"data.name": "npz", "data.dir": str(hospitals), "data.redraw": "rows"}
    first, *others = (RunConfig.from_flat({**flat, "data.seed": s}).data for s in range(30))
    shares = [shared_examples(first, other) for other in others]
    for split, share in (("train", 0.8), ("test", 0.2)):
        assert np.mean([each[split] for each in shares]) == pytest.approx(share, abs=0.03)


def redraw_of(folder: Path, name: str, **flat: Any) -> set[str]:
    settings = {"data.name": name, "data.dir": str(folder), **flat}
    return {run.data.redraw for run in Plan.grid(settings, [], [0, 1], federations=True).runs}


def test_several_federations_redraw_what_the_files_do_not_fix(
    hospitals: Path, photos: Path, tmp_path: Path
) -> None:
    assert redraw_of(photos, "images") == {"rows"}
    assert redraw_of(photos, "images", **{"data.redraw": ""}) == {""}
    assert redraw_of(hospitals, "npz") == {""}
    assert redraw_of(hospitals, "uci-digits") == {""}
    texts = tmp_path / "texts"
    texts.mkdir()
    rows = [f"word {n},{'ab'[n % 2]},p{n // 5}" for n in range(20)]
    (texts / "here.csv").write_text("\n".join(["text,label,patient", *rows]), encoding="utf-8")
    assert redraw_of(texts, "texts") == {"rows"}
    by_patient = federations(texts, "texts", redraw="patient", **{"image-size": 0})
    assert len({federation.division for federation in by_patient}) > 1
    rows = [f"{row},{'test' if n > 15 else 'train'}" for n, row in enumerate(rows)]
    (texts / "here.csv").write_text("\n".join(["text,label,patient,split", *rows]), "utf-8")
    assert redraw_of(texts, "texts") == {""}
    single = Plan.grid({"data.name": "images", "data.dir": str(photos)}, [], [0], federations=True)
    assert {run.data.redraw for run in single.runs} == {""}


@pytest.mark.parametrize(
    ("name", "redraw", "message"),
    [
        ("npz", "ward", "ward_train"),
        ("npz", "x", "data.redraw = 'x': .*has no values with this name"),
        ("images", "patient", "has no such column. Set it to rows"),
        ("uci-digits", "rows", "published test examples"),
    ],
)
def test_what_cannot_be_redrawn_is_named(
    hospitals: Path, photos: Path, name: str, redraw: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        federations(photos if name == "images" else hospitals, name, redraw=redraw)


@pytest.mark.parametrize(
    ("split", "site", "ratio"), [("test", True, 12 / 48), ("validation", False, 12 / 36)]
)
def test_sites_and_runs_judged_by_validation_record_their_own_overlap(
    hospitals: Path, split: str, site: bool, ratio: float
) -> None:
    flat: dict[str, Any] = {"data.name": "npz", "data.dir": str(hospitals), "data.redraw": "rows"}
    if split == "validation":
        flat |= {"evaluate.test": False, "data.validation-fraction": 0.25}
    config = RunConfig.from_flat(flat)
    federation = prepare(config.data)
    if site:  # the server knows their sizes
        federation = dataclasses.replace(federation, division="", redraw={})
    nothing: Any = None
    setup = RunSetup(config, ClientRegistry({}, federation), nothing, nothing, None)
    assert setup.redraw()["tests per training example"] == pytest.approx(ratio)
