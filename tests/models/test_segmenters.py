"""Segmentation networks: U-Net, those of segmentation-models-pytorch, and users' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fairflower import models
from fairflower.clients import SGD, ClientData, fisher_diagonal
from fairflower.config import RunConfig, TrainConfig
from fairflower.data import Split
from fairflower.errors import ConfigError, NotInstalled
from fairflower.models import Model, norm_arrays
from fairflower.models.unet import UNet
from fairflower.registry import CLIENTS
from fairflower.tasks import task_of
from fairflower.testing import check_model

TASK = task_of("segmentation")


@pytest.mark.parametrize("name", ["unet", "unet:norm=batch", "unet:width=8", "smp:Unet"])
def test_images_of_any_size_are_mapped_to_logits_of_their_size(name: str) -> None:
    for shape in ((3, 8, 8), (1, 33, 46)):
        model = models.build(name, 4, shape, seed=0, task=TASK).eval()
        x = torch.randn(2, *shape)
        assert model(x).shape == (2, 4, *shape[1:])
        torch.testing.assert_close(model(x[:1]), model(x)[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_u_net_passes_check_model(norm: str) -> None:
    check_model(UNet, (1, 13, 10), task="segmentation", norm=norm)


def test_the_u_net_sees_detail_and_context() -> None:
    """Each logit depends on its own pixel, and on pixels some twenty pixels away."""
    model = models.build("unet:norm=batch", 2, (1, 64, 64), seed=0, task=TASK).eval()
    x = torch.randn(1, 1, 64, 64, requires_grad=True)
    model(x)[0, 0, 32, 32].backward()
    assert x.grad is not None
    moved = x.grad[0, 0].abs() > 0
    assert moved[32, 32]
    rows = torch.nonzero(moved.any(1)).flatten()
    assert 0 < rows[0] <= 15
    assert 50 <= rows[-1] < 63


@pytest.mark.parametrize("width", [6, 10])
def test_a_width_that_cannot_be_normalized_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=rf"'unet:width={width}': expected a multiple of 4"):
        models.build(f"unet:width={width}", 2, (1, 8, 8), seed=0, task=TASK)


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 8x8 pixels, but the images are 7x9"):
        models.build("unet", 2, (1, 7, 9), seed=0, task=TASK)


def test_models_for_another_output_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'cnn': its output .* a vector, .*Set it to unet"):
        models.build("cnn", 2, (1, 8, 8), seed=0, task=TASK)
    with pytest.raises(ConfigError, match=r"'unet': its output .* at each pixel.*Set it to cnn"):
        models.build("unet", 2, (1, 8, 8), seed=0)
    with pytest.raises(ConfigError, match=r"'mlp'.*Set it to unet"):
        RunConfig.from_flat({"data.name": "strokes", "model.name": "mlp"})
    assert RunConfig.from_flat({"data.name": "strokes"}).model.name == "unet"
    assert RunConfig.from_flat({"data.name": "npz", "data.task": "segmentation"}).model.name == (
        "unet"
    )
    assert RunConfig.from_flat({"data.name": "npz"}).model.name == "cnn"


#: Clients that need a linear head, or one class per example.
NEEDY = (
    *("moon", "fedproc", "fedproto", "fpl", "fedplvm", "fedlsa", "fedgc"),
    *("fedmix", "fedper", "fedrep", "lg-fedavg"),
)


@pytest.mark.parametrize("name", NEEDY)
def test_clients_that_are_not_defined_refuse_by_name(name: str) -> None:
    flat = {"data.name": "strokes", "client.name": name}
    if name == "fedgc":
        flat["model.name"] = "unet"
    with pytest.raises(ConfigError, match=rf"{CLIENTS[name].__name__} needs (features|one class)"):
        RunConfig.from_flat(flat)


@pytest.mark.parametrize("name", [name for name in CLIENTS if name not in NEEDY])
def test_all_other_clients_can_be_chosen(name: str) -> None:
    RunConfig.from_flat({"data.name": "strokes", "client.name": name})


def test_the_fisher_information_by_layer_is_that_of_a_loop() -> None:
    model = models.build("unet:width=4", 2, (1, 9, 10), seed=0, task=TASK).eval()
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(3, 1, 9, 10)), dtype=torch.float32)
    y = torch.tensor(rng.integers(2, size=(3, 9, 10)), dtype=torch.uint8)
    found = fisher_diagonal(model, [(x, y)], task=TASK)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for k in range(3):
        model.zero_grad()
        TASK.loss(model(x[k : k + 1]), y[k : k + 1]).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            expected[name] += p.grad.square() / 3
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-3, atol=1e-7)


# --- segmentation-models-pytorch ------------------------------------------------------------------


def test_encoders_and_architectures_can_be_chosen() -> None:
    model = models.build("smp:FPN:encoder=mobilenet_v2", 3, (3, 32, 32), seed=0, task=TASK).eval()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3, 32, 32)
    again = models.build("smp:FPN:encoder=mobilenet_v2", 3, (3, 32, 32), seed=0, task=TASK)
    same = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert len(norm_arrays(model, affine=True)) > 100


@pytest.mark.parametrize(
    ("name", "message"),
    [("smp:Unet:encoder=vgg7", "Wrong encoder name `vgg7`"), ("smp:ZNet", "`ZNet`")],
)
def test_unknown_networks_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.build(name, 2, (1, 32, 32), seed=0, task=TASK)


def test_weights_are_those_of_the_encoder_or_of_the_whole_network(tmp_path: Path) -> None:
    source = models.build("smp:Unet", 3, (3, 32, 32), seed=0, task=TASK).body
    torch.save(source.encoder.state_dict(), tmp_path / "encoder.pth")
    torch.save(source.state_dict(), tmp_path / "whole.pth")
    for file in ("encoder", "whole"):
        weights = str(tmp_path / f"{file}.pth")
        model = models.build("smp:Unet", 2, (3, 32, 32), 1, weights, task=TASK).body
        whole = file == "whole"
        same = torch.equal(
            model.decoder.state_dict()["blocks.0.conv1.0.weight"],
            source.decoder.state_dict()["blocks.0.conv1.0.weight"],
        )
        assert same == whole
        assert torch.equal(model.encoder.conv1.weight, source.encoder.conv1.weight)
    weights = str(tmp_path / "encoder.pth")
    with pytest.raises(ConfigError, match=r"belong to another network.*smp's resnet34"):
        models.build("smp:Unet:encoder=resnet34", 2, (3, 32, 32), 1, weights, task=TASK)


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairflower.errors.installed", lambda library: False)
    with pytest.raises(NotInstalled, match=r"fairflower\[smp\]"):
        models.build("smp:Unet", 2, (1, 32, 32), seed=0, task=TASK)


# --- a user's networks ----------------------------------------------------------------------------


class PlainNet(nn.Module):
    """A user's network, which knows nothing of fairflower."""

    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(shape[0], num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for each pixel."""
        return self.layer(x)  # type: ignore[no-any-return]


class Halved(PlainNet):
    """A network with too small an output."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for every second pixel."""
        return super().forward(x)[..., ::2, ::2]


def test_a_users_own_network_is_used_as_it_is() -> None:
    model = models.build(f"{__name__}:PlainNet", 2, (1, 8, 8), seed=0, task=TASK)
    assert isinstance(model, Model)
    x, y = np.zeros((4, 1, 8, 8), np.uint8), np.zeros((4, 8, 8), np.uint8)
    data = ClientData(Split(x, y), Split(x, y), (0.5,), (0.5,), 2, task=TASK)
    trainer = SGD(model, data, TrainConfig(batch_size=2), client_id=0, seed=0)
    before = trainer.evaluate(trainer.test_examples)["loss"]
    trainer.train(1)
    assert trainer.evaluate(trainer.test_examples)["loss"] < before


def test_a_users_network_with_another_output_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"to \(2, 2, 4, 4\), expected .* \(2, 2, 8, 8\)"):
        models.build(f"{__name__}:Halved", 2, (1, 8, 8), seed=0, task=TASK)
