"""Loss landscapes: directions, surfaces by brute force, runs and the command."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import LANDSCAPE, call
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from runs import config, history, run
from sgd_clients import NumPySoftmaxRegression, linear, random_images
from torch import nn

from experiments import landscape as script
from experiments.landscape import (
    Landscape,
    Surface,
    draw,
    filter_normalized,
    landscape,
    levels_of,
    surfaces,
)
from fairflower.clients import Images
from fairflower.errors import ConfigError, RunFolderError
from fairflower.report import read_run

# --- directions --------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 4)
    )


def test_a_direction_has_the_models_filter_norms_and_is_zero_for_biases() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[2] = 0.0  # type: ignore[index]
    direction = dict(zip(dict(model.named_parameters()), filter_normalized(model, 0), strict=True))
    for name, w in model.named_parameters():
        d = direction[name].numpy()
        assert d.shape == w.shape
        if w.dim() == 1:
            assert not d.any()
            continue
        for filter_of_w, filter_of_d in zip(w.detach().numpy(), d, strict=True):
            length = np.sqrt(np.sum(filter_of_w.astype(float) ** 2))
            assert np.sqrt(np.sum(filter_of_d.astype(float) ** 2)) == pytest.approx(
                length, rel=1e-5
            )
    assert {name for name, d in direction.items() if d.any()} == {"0.weight", "4.weight"}


def test_directions_depend_on_the_seed() -> None:
    model = net()
    first, again, other = (filter_normalized(model, seed)[0].flatten() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    cosine = torch.cosine_similarity(first, other, dim=0)
    assert abs(cosine) < 0.5  # of 108 random numbers: five standard deviations


def test_frozen_parameters_have_no_direction() -> None:
    model = net()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    assert [d.shape for d in filter_normalized(model, 0)][-2:] == [(4, 144), (4,)]
    assert len(filter_normalized(model, 0)) == len(list(model.parameters())) - 1


# --- surfaces of a linear model, by brute force -------------------------------------------

STEPS = np.linspace(-2, 2, 5)


def images(n: int, seed: int) -> Images:
    return Images(random_images(n, seed), (0.5,) * 3, (0.5,) * 3)


def explored(directions: list[list[torch.Tensor]], **options: Any) -> np.ndarray:
    return surfaces(linear(), directions, STEPS, [images(20, 0), images(11, 1)], **options)


def test_a_surface_matches_the_loss_at_every_point_by_brute_force() -> None:
    model = linear()
    directions = [filter_normalized(model, seed) for seed in (0, 1)]
    actual = explored(directions, batch_size=7)
    assert actual.shape == (2, 5, 5)
    w, d, e = (
        np.c_[weight.detach().numpy(), bias.detach().numpy()].astype(float)
        for weight, bias in (list(model.parameters()), *directions)
    )
    for losses, data in zip(actual, (random_images(20, 0), random_images(11, 1)), strict=True):
        regression = NumPySoftmaxRegression(data)
        expected = [[regression.loss(w + x * d + y * e) for x in STEPS] for y in STEPS]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        # The loss of a linear model is convex, along every line.
        for line in (losses, losses.T, [losses.diagonal()]):
            assert np.all(np.diff(line, 2) > -1e-6)


def test_swapping_or_negating_directions_transposes_or_flips_the_surface() -> None:
    d, e = (filter_normalized(linear(), seed) for seed in (0, 1))
    actual = explored([d, e])
    assert np.array_equal(explored([e, d])[:, 2], actual[:, :, 2])  # one axis, exactly
    np.testing.assert_allclose(explored([e, d]), actual.transpose(0, 2, 1), rtol=1e-5)
    assert np.array_equal(explored([[-p for p in d], e]), actual[:, :, ::-1])
    still = [torch.zeros_like(p) for p in d]
    flat = explored([still, still])
    assert np.array_equal(flat, np.broadcast_to(flat[:, :1, :1], flat.shape))


def test_the_number_of_cores_changes_neither_the_surface_nor_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    directions = [filter_normalized(model, seed) for seed in (0, 1)]
    results = []
    for cores in (1, 3):
        monkeypatch.setattr(script, "cpus", lambda cores=cores: cores)
        results.append(surfaces(model, directions, STEPS, [images(20, 0)], batch_size=8))
    assert np.array_equal(*results)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_progress_is_reported_for_every_point() -> None:
    calls: list[int] = []
    explored(
        [filter_normalized(linear(), seed) for seed in (0, 1)], advance=lambda: calls.append(1)
    )
    assert len(calls) == 25


def test_an_error_at_a_point_is_raised() -> None:
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(5, 4))
    directions = [filter_normalized(wrong, seed) for seed in (0, 1)]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        surfaces(wrong, directions, STEPS, [images(20, 0)])


# --- runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["sgd", "harmofl"])
def test_the_center_is_the_loss_that_the_run_measured(tmp_path: Path, client: str) -> None:
    run_config = config(tmp_path, **{"client.name": client, "model.name": "cnn"})
    folder = run(run_config)
    losses = {
        r["name"]: float(r["value"])
        for r in history(folder)
        if (r["round"], r["level"], r["metric"]) == ("2", "domain", "loss")
    }
    actual = landscape(read_run(folder), grid=3, images=0)
    assert [(s.domain, s.split, s.num_images) for s in actual.surfaces] == [
        (domain, split, 20) for split in ("train", "test") for domain in losses
    ]
    for surface in actual.surfaces[4:]:
        assert surface.center == pytest.approx(losses[surface.domain], rel=1e-6)
        assert surface.loss[1, 1] == surface.center
    assert len({surface.center for surface in actual.surfaces}) == 8


def test_the_seed_determines_directions_and_images(tmp_path: Path) -> None:
    result = read_run(run(config(tmp_path, **{"num-server-rounds": 1})))
    first, again, other = (landscape(result, grid=3, images=8, seed=s) for s in (0, 0, 1))
    for one, two, three in zip(first.surfaces, again.surfaces, other.surfaces, strict=True):
        assert one.num_images == 8
        assert np.array_equal(one.loss, two.loss)
        assert not np.isclose(one.loss, three.loss).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": 4}, "--grid 4: expected an odd number"),
        ({"grid": 1}, "--grid 1: expected an odd number"),
        ({"span": 0.0}, r"--span 0\.0: expected a finite number above 0"),
        ({"span": float("nan")}, "--span nan"),
        ({"images": -1}, "--images -1"),
        ({"device": "tpu"}, "--device 'tpu': expected auto, cpu"),
    ],
)
def test_invalid_options_of_landscapes_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    result = read_run(run(config(tmp_path, **{"num-server-rounds": 0})))
    with pytest.raises(ConfigError, match=message):
        landscape(result, **options)


def test_a_run_without_a_model_or_with_a_wrong_model_is_refused(tmp_path: Path) -> None:
    untrained = read_run(run(config(tmp_path, **{"num-server-rounds": 0})))
    with pytest.raises(
        RunFolderError,
        match=r"has no model\.safetensors, because the run did not complete any round",
    ):
        landscape(untrained, grid=3)
    other = run(config(tmp_path, **{"model.name": "vpt-vit-tiny", "num-server-rounds": 1}))
    (untrained.path / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(RunFolderError, match=r"does not contain a cnn for these data"):
        landscape(untrained, grid=3)
    (untrained.path / "model.safetensors").write_bytes(b"no model")
    with pytest.raises(RunFolderError, match=r"model\.safetensors is damaged"):
        landscape(untrained, grid=3)


# --- the figure and the command ----------------------------------------------------------


def constructed(*losses: float) -> Landscape:
    loss = np.resize(np.array(losses, float), (3, 3))
    return Landscape("x", np.linspace(-1, 1, 3), (Surface("a", "test", 1, loss),))


@given(st.lists(st.floats(1e-6, 1e6), min_size=9, max_size=9))
def test_contours_cover_every_loss_and_increase(losses: list[float]) -> None:
    levels = levels_of([constructed(*losses[:4]), constructed(*losses)])
    assert levels[0] <= min(losses)
    assert levels[-1] >= max(losses)
    assert np.all(np.diff(levels) > 0)
    assert 5 <= len(levels) <= 18


def test_contours_handle_equal_zero_and_infinite_losses() -> None:
    assert np.all(np.diff(levels_of([constructed(2.3)])) > 0)
    assert np.all(np.diff(levels_of([constructed(0.0)])) > 0)
    assert levels_of([constructed(np.inf, np.nan, 0.5, 2.0)])[-1] == 2.0


@pytest.mark.slow
def test_the_landscape_command_draws_all_runs_with_the_same_contours(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folders = [
        run(config(tmp_path, **{"run-name": name, "client.name": name})) for name in ("sgd", "sam")
    ]
    output = call(tmp_path, "--grid=5", "--images=10", "--span=0.5", command=LANDSCAPE)
    assert re.search(r"domain +┃ +examples ", output)
    for folder in folders:
        assert str(folder / "landscape.png") in output
        height, width, _ = imread(folder / "landscape.png").shape
        assert width > height > 500
        assert (folder / "landscape.svg").read_text().count("test: ") >= 4
        with (folder / "landscape.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 2 * 4 * 25
        assert {float(r["x"]) for r in rows} == {-0.5, -0.25, 0.0, 0.25, 0.5}
        center = [r for r in rows if (float(r["x"]), float(r["y"])) == (0, 0)]
        for row in center:
            assert f"{float(row['loss']):.4f}" in output
    # All numbers except in titles: those of axes and contours.
    ticks = [re.findall(r">(\d[\d.]*)<", (f / "landscape.svg").read_text()) for f in folders]
    assert ticks[0] == ticks[1]
    assert len(ticks[0]) > 10

    request.getfixturevalue("undrawn")
    out = tmp_path / "figures"
    call(folders[0], "--grid=3", "--images=5", "--out", out, command=LANDSCAPE)
    assert sorted(path.name for path in out.iterdir()) == [
        f"sgd-landscape.{kind}" for kind in ("csv", "png", "svg")
    ]


@pytest.mark.slow
def test_zero_infinite_and_nan_losses_can_be_drawn(tmp_path: Path) -> None:
    odd = constructed(0.0, np.inf, np.nan, 0.5, 2.0)
    draw(odd, levels_of([odd]), tmp_path)
    colors = np.unique(imread(tmp_path / "landscape.png").reshape(-1, 4), axis=0)
    assert len(colors) > 20
