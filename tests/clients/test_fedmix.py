"""FedMix: the expanded loss against finite differences, and the averages that are sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from toy_trainers import (
    CLASSES,
    SETTINGS,
    data,
    models_equal,
    prompted,
    run_toy_rounds,
    tiny_model,
    trainer,
)

from fairflower.aggregation.records import InvalidReply
from fairflower.exchanges import AveragedBatches
from fairflower.strategies import Uniform

networks = pytest.mark.parametrize("make", [tiny_model, prompted])


def mixing(model, lambda_=0.1):
    client = trainer("fedmix", model=model, lambda_=lambda_)
    rng = np.random.default_rng(0)
    client.shared["averages"] = {
        "images": rng.normal(size=(1, 1, 8, 8)).astype(np.float32),
        "labels": np.array([[0.5, 0.25, 0.25, 0]], np.float32),
    }
    client.begin(2)
    client.model.eval()
    return client


@networks
def test_the_loss_is_first_order_mixup_per_image(make):
    client = mixing(make())
    client.images, client.labels = client.images.double(), client.labels.double()
    x, y = next(client.train_examples.eval_batches(4))
    client.model.double()
    x, step, lam = x.double(), 1e-5, 0.1
    expected = 0.0
    for i in range(4):
        u, one = (1 - lam) * x[i : i + 1], y[i : i + 1]

        def ce(at, label):
            with torch.no_grad():
                return F.cross_entropy(client.model(at), label).item()

        way = step * client.images[0]
        slope = (ce(u + way, one) - ce(u - way, one)) / (2 * step)
        expected += ((1 - lam) * ce(u, one) + lam * ce(u, client.labels) + lam * slope) / 4
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-6)


@networks
def test_every_trained_parameter_gets_a_finite_gradient(make):
    client = mixing(make())
    client.loss(*next(client.train_examples.eval_batches(4))).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in client.trainable)


def test_the_loss_without_averages_is_the_cross_entropy():
    client = trainer("fedmix")
    client.begin(1)
    client.model.eval()
    x, y = next(client.train_examples.eval_batches(4))
    torch.testing.assert_close(client.loss(x, y), F.cross_entropy(client.model(x), y))


def test_averages_are_means_of_fixed_disjoint_batches():
    held = data(train=16)
    client = trainer("fedmix", data=held)  # two batches of 8
    averages = client.averages()
    assert averages["images"].shape == (2, 1, 8, 8)
    whole = (held.train.x.mean(0) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(averages["images"].mean(0), whole, atol=1e-5)
    shares = np.bincount(held.train.y, minlength=CLASSES) / 16
    np.testing.assert_allclose(averages["labels"].mean(0), shares)
    client.train(1)
    client.train(5)
    assert models_equal(client.returns["averages"], averages)


def test_a_single_image_is_never_sent():
    one = trainer("fedmix", data=data(train=1)).averages()
    assert len(one["images"]) == len(one["labels"]) == 0
    few = trainer("fedmix", data=data(train=3), settings=SETTINGS).averages()
    assert len(few["images"]) == 1


def test_the_server_sends_the_averages_of_all_clients_in_order():
    exchange = AveragedBatches()
    run_toy_rounds(Uniform(exchanges=[exchange]), lambda k: trainer("fedmix", k), 3, 1)
    sent = exchange.broadcast(2)
    own = [trainer("fedmix", k).averages() for k in range(3)]
    for name in ("images", "labels"):
        np.testing.assert_array_equal(sent[name], np.concatenate([a[name] for a in own]))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"images": np.full((1, 1, 8, 8), np.nan, np.float32)}, "finite"),
        ({"labels": np.array([[2, -1]], np.float32)}, "numbers that sum to 1"),
        ({"labels": np.ones((2, 1), np.float32)}, "shape"),
        ({"more": np.zeros(1)}, "expected the arrays"),
    ],
)
def test_invalid_averages_are_refused(change, problem):
    good = {"images": np.zeros((1, 1, 8, 8), np.float32), "labels": np.ones((1, 1), np.float32)}
    exchange = AveragedBatches()
    exchange.check(good, {})
    with pytest.raises(InvalidReply, match=problem):
        exchange.check(good | change, {})
