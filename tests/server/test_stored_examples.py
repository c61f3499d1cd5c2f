"""Stored test examples: those of the final model, chosen as documented, and only where allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from resuming import config as three_rounds
from resuming import resume, session, stopped
from runs import config, run
from safetensors.numpy import load_file
from sklearn.metrics import f1_score
from test_segmentation_runs import STROKES, TASK, values

from fairflower.data import FeatureSet, prepare
from fairflower.errors import RunFolderError
from fairflower.files import read_arrays, write_arrays
from fairflower.models import build, set_arrays
from fairflower.server.examples import EXAMPLES, PLACES, POINTS, SIDE, examples_of, read_examples
from fairflower.tasks import Task, task_of

TINY = {"num-server-rounds": 1, "train.lr": 0.01, "model.name": "mlp:hidden=4"}


class Steps(FeatureSet):
    """Two targets in the domains a and b, far and near 0, with more examples than are stored."""

    task = "regression"
    sizes: ClassVar = {"a": 30, "b": 2 * POINTS}

    def all_domains(self) -> list[str]:
        return list(self.sizes)

    def labels(self, domain: str, split: str) -> Any:
        x = np.arange(self.sizes[domain])[:, None] % 7
        return np.hstack([x + 40.0 * (domain == "a"), -x])

    def features(self, domain: str, split: str, rows: Any) -> Any:
        return (rows[:, None] % 7).astype(np.float32)

    def fingerprint(self) -> int:
        return 1

    def source(self, domain: str) -> str:
        return "made up"


class Broken(type(task_of("regression"))):  # type: ignore[misc]
    """A task whose drawing fails, which does not fail its run."""

    def points(self, y: Any, predictions: Any) -> Any:
        raise ValueError("no points")


STEPS = f"{__name__}:Steps"
WHOLE = {"data.test-examples": 0, "data.examples-per-client": 30, "data.name": STEPS}


def steps(tmp_path: Path, **changes: Any) -> Path:
    return run(config(tmp_path, **TINY | WHOLE | changes), nodes=2)


@pytest.mark.slow
def test_masks_are_those_of_the_final_model_in_the_worst_domain(tmp_path: Path) -> None:
    run_config = config(tmp_path, **STROKES)
    folder, federation = run(run_config), prepare(run_config.data)
    by_domain = values(folder, "domain", "dice")
    arrays, facts = read_arrays(folder / EXAMPLES)
    assert facts["domains"] == [min(by_domain, key=by_domain.__getitem__)]
    model = build("unet:width=4", 2, federation.shape, seed=0, task=TASK).eval()
    set_arrays(model, load_file(folder / "model.safetensors"), "the test")
    x, y = federation.test(facts["domains"][0])
    with torch.no_grad():
        guess = model((torch.from_numpy(x) / 255 - 0.5) / 0.5).argmax(1).numpy()
    dice = [f1_score(t.ravel(), g.ravel()) for t, g in zip(y, guess, strict=True)]
    order = np.argsort(dice, kind="stable")
    rows = [order[round(share * (len(order) - 1))] for share in PLACES.values()]
    np.testing.assert_array_equal(arrays["image"], x[rows])
    np.testing.assert_array_equal(arrays["true"], y[rows])
    np.testing.assert_array_equal(arrays["predicted"], guess[rows])
    assert facts["notes"] == [
        f"{n}: {100 * dice[k]:.1f} %" for n, k in zip(PLACES, rows, strict=True)
    ]
    assert (folder / EXAMPLES).stat().st_size < 20_000


def test_points_are_those_of_the_final_model_of_every_domain(tmp_path: Path) -> None:
    folder = steps(tmp_path)
    found = read_examples(folder, 1)
    assert found is not None
    arrays, facts = found
    weights = load_file(folder / "model.safetensors")
    federation = prepare(config(tmp_path, **WHOLE).data)
    model = build("mlp:hidden=4", 2, federation.shape, seed=0, task=task_of("regression"))
    set_arrays(model, weights, "the test")
    assert facts["domains"] == ["a", "b"]
    for d, n in enumerate(Steps.sizes.values()):
        x, y = federation.test("ab"[d])
        rows = np.linspace(0, n - 1, min(n, POINTS)).round().astype(int)
        there = arrays["domain"] == d
        np.testing.assert_array_equal(arrays["true"][there], y[rows])
        with torch.no_grad():
            guess = model((torch.from_numpy(x) - federation.mean[0]) / federation.std[0]).numpy()
        np.testing.assert_allclose(arrays["predicted"][there], guess[rows], rtol=1e-4, atol=1e-5)
    assert read_examples(folder, 2) is None  # examples of another round are not the last model's


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate.by": "clients"},
        {"evaluate.keep-examples": False},
        {"evaluate.test": False, "data.validation-fraction": 0.2},
        {"data.task": f"{__name__}:Broken"},
        {
            "strategy.name": "uniform",
            "privacy.noise-multiplier": 1.0,
            "privacy.clip": 1.0,
            "privacy.noise-seed": 0,
        },
    ],
)
def test_nothing_is_stored_where_it_may_not_or_cannot(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    assert not (steps(tmp_path, **changes) / EXAMPLES).exists()


def test_a_resumed_run_stores_the_examples_of_its_last_model(tmp_path: Path) -> None:
    names = {**TINY, "data.name": STEPS, "fraction-train": 1.0, "num-server-rounds": 3}
    whole = session(three_rounds(tmp_path / "whole", **names), nodes=2).run()
    cut = stopped(three_rounds(tmp_path / "cut", **names), 3, nodes=2)
    assert not (cut / EXAMPLES).exists()
    resume(cut, nodes=2)
    (arrays, facts), (expected, of_whole) = (read_arrays(f / EXAMPLES) for f in (cut, whole))
    assert facts == of_whole
    assert facts["round"] == 3
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name])
    resume(cut, nodes=2, **{"num-server-rounds": 4, "evaluate.keep-examples": False})
    assert not (cut / EXAMPLES).exists()


def test_large_images_are_thinned_and_bounded() -> None:
    class Scans:
        domains, learns = ("a", "b"), TASK

        def test(self, domain: str) -> Any:
            return type("Split", (), {"x": np.zeros((9, 3, 700, 600), np.uint8)})

    y = np.zeros((9, 700, 600), np.uint8)
    y[:, 300:] = 1
    arrays, facts = examples_of(Scans(), lambda d: (y, y), {"a": 0.5, "b": float("nan")}, 3)  # type: ignore[arg-type]
    assert facts["domains"] == ["a"]
    assert max(arrays["image"].shape[2:]) <= SIDE
    assert arrays["true"].shape == arrays["image"].shape[:1] + arrays["image"].shape[2:]
    assert sum(array.nbytes for array in arrays.values()) < 1.4e6


@pytest.mark.parametrize("broken", ["text", "shape", "facts"])
def test_damaged_files_are_named(broken: str, tmp_path: Path) -> None:
    file, masks = tmp_path / EXAMPLES, np.zeros((1, 4, 4), np.uint8)
    arrays = {"image": np.zeros((1, 1, 4, 5 if broken == "shape" else 4), np.uint8)}
    arrays |= {"true": masks, "predicted": masks}
    facts: dict[str, Any] = {"round": 1, "domains": ["a"], "notes": ["worst"]}
    write_arrays(file, arrays, facts | ({"round": "one"} if broken == "facts" else {}))
    if broken == "text":
        file.write_bytes(b"nothing")
    with pytest.raises(RunFolderError, match=EXAMPLES):
        read_examples(tmp_path, 1)


def test_the_mean_dice_of_an_example_ignores_unknown_pixels_and_absent_classes() -> None:
    rng = np.random.default_rng(0)
    for classes in (2, 3, 5):
        y, guess = rng.integers(0, classes, (2, 6, 7)).astype(np.uint8)
        y[0] = 255
        known = y != 255
        there = sorted({*y[known].tolist(), *guess[known].tolist()} - {0})
        expected = f1_score(y[known], guess[known], labels=there, average="macro")
        assert TASK.of_example(y, guess) == pytest.approx(expected)
    assert np.isnan(TASK.of_example(np.full((2, 2), 255), np.ones((2, 2))))
    assert Task().of_example(np.array([0, 1, 2, 3]), np.array([0, 1, 2, 0])) == 0.75
