"""The measuring helpers on batches as in Flower's tutorials: DataLoaders, dicts and generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from toy_trainers import data, tiny_network, trainer

from fairflower.clients import (
    fisher_diagonal,
    mean_gradient,
    mean_loss,
    mean_representation,
    sharpness,
)
from fairflower.training.measurements import COMPUTE

torch.manual_seed(0)
X, Y = torch.randn(10, 6), torch.tensor([0, 1, 1, 3, 0, 1, 3, 3, 3, 1])
MODEL = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
PAIRS = [(X[:7], Y[:7]), (X[7:], Y[7:])]

KINDS: dict[str, Callable[[], Any]] = {
    "loader of tuples": lambda: DataLoader(TensorDataset(X, Y), 4),
    "loader of dicts": lambda: DataLoader(
        [{"img": x, "label": y} for x, y in zip(X, Y.tolist(), strict=True)], 4
    ),
    "dicts by other names": lambda: [{"pixel_values": x, "labels": y} for x, y in PAIRS],
    "dicts with more in them": lambda: [{"image": x, "label": y, "id": 7} for x, y in PAIRS],
    "generator": lambda: (pair for pair in PAIRS),
    "generator of dicts": lambda: ({"x": x, "y": y} for x, y in PAIRS),
}
HELPERS: dict[str, Callable[[Any], Any]] = {
    "fisher": lambda batches: fisher_diagonal(MODEL, batches),
    "gradient": lambda batches: mean_gradient(MODEL, batches),
    "sharpness": lambda batches: sharpness(MODEL, batches),
    "loss": lambda batches: mean_loss(MODEL, batches),
    "representation": lambda batches: mean_representation(MODEL, batches, MODEL[:2]),
}


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_helpers_accept_all_batch_formats(kind: str, helper: str) -> None:
    measure = HELPERS[helper]
    torch.testing.assert_close(measure(KINDS[kind]()), measure([(X, Y)]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"picture": X, "label": Y}, r"\['picture', 'label'\]: expected .* x \(img, image"),
        ({"img": [X], "label": Y}, "expected tensors"),
        ((X, Y, Y), "A batch is tuple: expected tensors"),
        (X, "A batch is Tensor"),
    ],
)
def test_other_batches_are_refused_with_the_expected_names(
    batch: Any, message: str, helper: str
) -> None:
    with pytest.raises(TypeError, match=message):
        HELPERS[helper]([batch])


@pytest.mark.parametrize("helper", HELPERS)
def test_no_samples_are_an_error(helper: str) -> None:
    with pytest.raises(ValueError, match="There are no samples"):
        HELPERS[helper](iter([]))


def test_loss_and_representation_match_a_hand_computation() -> None:
    with torch.no_grad():
        assert mean_loss(MODEL, PAIRS) == pytest.approx(F.cross_entropy(MODEL(X), Y).item())
        features: Tensor = MODEL[:2](X)
        means = [features[label == Y].mean(0) for label in (0, 1, 3)]
    actual = mean_representation(MODEL, PAIRS, MODEL[:2])["h"]
    torch.testing.assert_close(actual, torch.stack(means).mean(0))


def test_helpers_match_the_trainers_measurements_and_leave_the_model_unchanged() -> None:
    model = tiny_network("sgd").train()
    client = trainer("sgd", model=model, data=data())
    images = client.train_examples
    before = {name: array.clone() for name, array in model.state_dict().items()}
    loss, h = mean_loss(model, images), mean_representation(model, images)["h"]
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before)
    model.eval()
    assert loss == pytest.approx(COMPUTE["received_loss"](client), rel=1e-6)
    actual = COMPUTE["received_representation"](client)
    assert isinstance(actual, dict)
    torch.testing.assert_close(h, actual["h"])


def test_a_representation_requires_the_networks_features() -> None:
    with pytest.raises(TypeError, match="A representation needs the network's features"):
        mean_representation(MODEL, PAIRS)
