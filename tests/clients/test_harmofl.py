"""HarmoFL: amplitudes against numpy's full Fourier transform, and whole runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import config, history, run
from safetensors.numpy import load_file
from sgd_clients import batch_normed, random_images
from torch import nn
from toy_trainers import SETTINGS, data, tiny_model

from fairflower.clients import ClientData, Trainer
from fairflower.clients.harmofl import AmplitudeNorm, HarmoFL
from fairflower.config import ClientConfig, RunConfig, TrainConfig
from fairflower.data import Augment, Split, prepare
from fairflower.training.build import build_trainer
from fairflower.training.measurements import representation

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
AMPLITUDE = "amplitude_norm.running_mean"


# --- an independent implementation: per image, over the full spectrum ----------------------


def amplitude_of(image: np.ndarray) -> np.ndarray:
    return np.abs(np.fft.fft2(image))


def harmonized(image: np.ndarray, amplitude: np.ndarray, band: float) -> np.ndarray:
    """Return an image [C, H, W] with low frequencies from another amplitude."""
    spectrum = np.fft.fft2(image)
    down, across = (np.abs(np.fft.fftfreq(n)) <= band + 1e-9 for n in image.shape[1:])
    low = np.outer(down, across)
    new = np.where(low, amplitude, np.abs(spectrum)) * np.exp(1j * np.angle(spectrum))
    return np.fft.ifft2(new).real


def statistics(values: tuple[float, ...]) -> np.ndarray:
    return np.array(values)[:, None, None]


def layer(shape: tuple[int, int, int], band: float = 0.5, momentum: float = 0.1) -> AmplitudeNorm:
    return AmplitudeNorm(shape, MEAN[: shape[0]], STD[: shape[0]], momentum, band)


def apply(norm: AmplitudeNorm, images: np.ndarray) -> np.ndarray:
    """Apply the layer to intensities in [0, 1], which are normalized before and restored after."""
    mean, std = (statistics(v[: images.shape[1]]) for v in (MEAN, STD))
    x = torch.tensor((images - mean) / std, dtype=torch.float32)
    return norm(x).numpy().astype(float) * std + mean


@pytest.mark.parametrize("band", [0.5, 0.2, 0.0])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 7, 10), (2, 6, 5)])
def test_the_layer_tracks_a_running_mean_in_training_and_fixes_it_in_evaluation(
    shape: tuple[int, int, int], band: float
) -> None:
    batches = np.random.default_rng(0).random((3, 4, *shape))
    norm = layer(shape, band, momentum=0.3)
    norm.track_running_stats = True
    norm.train()
    running = None
    for batch in batches:
        mean = np.mean([amplitude_of(image) for image in batch], axis=0)
        running = mean if running is None else 0.7 * running + 0.3 * mean
        expected = [harmonized(image, running, band) for image in batch]
        np.testing.assert_allclose(apply(norm, batch), expected, atol=2e-6)
    assert running is not None
    half = running[:, :, : shape[2] // 2 + 1]
    np.testing.assert_allclose(norm.running_mean, half, rtol=1e-5)
    norm.eval()
    before = norm.running_mean.clone()
    expected = [harmonized(image, running, band) for image in batches[0]]
    np.testing.assert_allclose(apply(norm, batches[0]), expected, atol=2e-6)
    assert torch.equal(norm.running_mean, before)


def test_images_are_unchanged_without_a_known_amplitude() -> None:
    images = np.random.default_rng(0).random((3, 3, 8, 8))
    np.testing.assert_allclose(apply(layer((3, 8, 8)).train(), images), images, atol=1e-6)


def test_band_0_replaces_only_the_mean_color() -> None:
    images = np.random.default_rng(0).random((3, 3, 8, 8)) * [[[[0.1]]], [[[0.5]]], [[[1.0]]]]
    norm = layer((3, 8, 8), band=0.0)
    norm.running_mean[:, 0, 0] = 64 * torch.tensor([0.1, 0.2, 0.3])
    after = apply(norm, images)
    np.testing.assert_allclose(after.mean((2, 3)), [[0.1, 0.2, 0.3]] * 3, atol=1e-6)
    deviation = images - images.mean((2, 3), keepdims=True)
    np.testing.assert_allclose(after - after.mean((2, 3), keepdims=True), deviation, atol=1e-6)


@given(st.integers(0, 2**31), st.tuples(st.integers(1, 3), st.integers(2, 12), st.integers(2, 12)))
def test_normalized_images_have_the_common_amplitude(
    seed: int, shape: tuple[int, int, int]
) -> None:
    rng = np.random.default_rng(seed)
    norm = layer(shape)
    common = amplitude_of(rng.random(shape))
    norm.running_mean.copy_(torch.tensor(common[:, :, : shape[2] // 2 + 1]))
    after = apply(norm, rng.random((2, *shape)))
    for image in after:
        np.testing.assert_allclose(amplitude_of(image), common, atol=2e-4)
    np.testing.assert_allclose(apply(norm, after), after, atol=2e-4)  # idempotent


@pytest.mark.parametrize("value", [0, 255])
def test_a_constant_image_gives_no_nan(value: int) -> None:
    norm = layer((3, 8, 8))
    norm.running_mean.fill_(2.0)
    assert np.isfinite(apply(norm, np.full((1, 3, 8, 8), value / 255))).all()


# --- a client ----------------------------------------------------------------------------


class Net(nn.Module):
    """``batch_normed`` in a module with its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = batch_normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


ROUND = TrainConfig(local_epochs=2, batch_size=32, lr=0.1)


def client(name: str = "harmofl", model: nn.Module | None = None, **arguments: Any) -> Trainer:
    client_data = ClientData(random_images(20, 0), random_images(5, 1), MEAN, STD, 4, Augment())
    method = ClientConfig(name, arguments)
    return build_trainer(method, model or Net(), client_data, ROUND, client_id=0, seed=0)


def test_a_sam_step_counts_its_images_once() -> None:
    trainer = client()
    assert (trainer.settings.rho, trainer.sharpness) == (0.05, "sam")
    trainer.train(1)
    expected = np.mean([amplitude_of(x / 255) for x in trainer.data.train.x], axis=0)
    assert trainer.model.amplitude_norm.batches == 2  # type: ignore[union-attr]
    np.testing.assert_allclose(trainer.send()[AMPLITUDE], expected[:, :, :5], rtol=1e-5)


def test_a_received_amplitude_is_kept_and_training_equals_fedsam() -> None:
    received = client().send()
    received[AMPLITUDE] = np.random.default_rng(0).random((3, 8, 5)).astype(np.float32)
    after = {}
    adapted = client().model
    for name, arguments in (("harmofl", {"alpha": 0.2}), ("fedsam", {"rho": 0.2})):
        trainer = client(name, adapted, **arguments)
        trainer.receive(received)
        trainer.train(2)
        after[name] = trainer.send()
    assert np.array_equal(after["harmofl"][AMPLITUDE], received[AMPLITUDE])
    for array, expected in zip(after["harmofl"].values(), after["fedsam"].values(), strict=True):
        assert np.array_equal(array, expected)


def test_a_shared_network_tracks_amplitudes_only_in_training() -> None:
    """Clients of a worker share the network, whose running mean only training may change."""
    network = Net()
    first = client(model=network)
    first.train(1)
    second = client(model=network)
    before = second.send()[AMPLITUDE]
    layer = network.amplitude_norm
    network.train()
    network(torch.zeros(2, 3, 8, 8))
    np.testing.assert_array_equal(second.send()[AMPLITUDE], before)
    assert isinstance(layer, AmplitudeNorm)
    layer.track_running_stats = True  # as after a round that raised an error
    client(model=network)
    assert not layer.track_running_stats


def test_the_trainer_tests_on_amplitude_normalized_images() -> None:
    trainer = client()
    assert isinstance(trainer, HarmoFL)
    norm = trainer.model.amplitude_norm
    norm.running_mean.copy_(torch.rand(3, 8, 5))
    x, y = trainer.data.test
    images = apply(norm, x / 255)
    plain = client("sgd")
    inputs = torch.tensor((images - statistics(MEAN)) / statistics(STD), dtype=torch.float32)
    plain.model.eval()
    expected = nn.functional.cross_entropy(plain.model(inputs), torch.tensor(y)).item()
    assert trainer.test()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert trainer.test()["eval_loss"] != pytest.approx(plain.test()["eval_loss"], abs=1e-3)


def test_a_sequential_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        client(model=batch_normed())


# --- whole runs --------------------------------------------------------------------------


def mean_amplitude(train: Split) -> np.ndarray:
    return np.mean([amplitude_of(x / 255) for x in train.x], axis=0)


HARMONIZED = {"client.name": "harmofl", "data.augment": False, "evaluate.by": "both"}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "strategy", ["fedavg", "uniform", "fedheal", "fedequilibria", "fedmgda+", "fedism", "fedce"]
)
def test_the_server_averages_amplitudes_once_and_tests_like_the_clients(
    tmp_path: Any, strategy: str
) -> None:
    run_config = config(
        tmp_path, **HARMONIZED, **{"strategy.name": strategy, "fraction-train": 0.5}
    )
    folder = run(run_config)
    model = load_file(folder / "model.safetensors")
    federation = prepare(run_config.data)
    rows = history(folder)
    (first, second) = (
        [int(r["name"]) for r in rows if (r["round"], r["metric"]) == (n, "train_loss")]
        for n in ("1", "2")
    )
    assert first != second  # so a client trains that did not contribute to the amplitude
    halves = [mean_amplitude(federation.train(k))[:, :, :9] for k in first]
    low, high = np.min(halves, axis=0), np.max(halves, axis=0)
    actual = model[AMPLITUDE]
    assert np.all((actual >= low * 0.9999) & (actual <= high * 1.0001))
    if strategy == "uniform":
        np.testing.assert_allclose(actual, np.mean(halves, axis=0), rtol=1e-4)
    accuracy = {
        level: [float(r["value"]) for r in rows if (r["level"], r["metric"]) == (level, "accuracy")]
        for level in ("domain", "client")
    }
    tested_by_clients = len(accuracy["client"])
    assert tested_by_clients == 2 * 4
    assert accuracy["client"] == accuracy["domain"][4:]  # one client a domain; not round 0


def test_the_run_config_sets_the_band() -> None:
    config = RunConfig.from_flat({"client.name": "harmofl", "client.band": 0.0})
    trainer = client(**config.client.args)
    assert trainer.model.amplitude_norm.normalized.sum() == 1  # type: ignore[union-attr]


def test_other_runs_in_the_same_process_have_no_amplitude(tmp_path: Any) -> None:
    before, between, after = (
        load_file(run(config(tmp_path, **{"client.name": name})) / "model.safetensors")
        for name in ("sgd", "harmofl", "sgd")
    )
    assert between.keys() - before.keys() == {AMPLITUDE}
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_representations_use_the_normalized_images() -> None:
    trainer = HarmoFL(tiny_model(), data(0, train=40), SETTINGS, client_id=0, seed=0)
    trainer.train(1)
    measured = representation(trainer)["h"]
    seen, labels = [], []
    trainer.model.eval().head.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    for x, y in trainer.train_examples.eval_batches(500):
        trainer.model(x)
        labels.append(y)
    z, y = torch.cat(seen).detach(), torch.cat(labels)
    expected = torch.stack([z[y == c].mean(0) for c in y.unique()]).mean(0)
    torch.testing.assert_close(measured, expected)
