"""FedRDN: statistics by a loop, images normalized with those of random clients, the exchange."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_trainers import models_equal, trainer

from fairflower.client_app import _check_means
from fairflower.clients.fedrdn import FedRDN
from fairflower.config import RunConfig
from fairflower.data import Split
from fairflower.errors import ConfigError
from fairflower.exchanges import ImageStatistics
from fairflower.strategies import Uniform
from fairflower.testing.federations import SETTINGS, data, run_toy_rounds, tiny_model
from fairflower.testing.rounds import Rounds

OTHERS = np.array([[[0.2], [0.1]], [[0.6], [0.4]]], np.float32)  # two clients: mean, std


def test_statistics_are_means_over_images_of_each_images_mean_and_std():
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (1100, 3, 4, 5), np.uint8)
    x[0] = 7
    split = Split(x, np.arange(1100) % 4)
    client = FedRDN.__new__(FedRDN)
    three = data().__class__(split, split, mean=(0.5,) * 3, std=(0.5,) * 3, num_classes=4)
    FedRDN.__init__(client, torch.nn.Linear(1, 1), three, SETTINGS, client_id=0, seed=0)
    client.end(1)
    mean = [np.mean([image[c].mean() / 255 for image in x]) for c in range(3)]
    std = [np.mean([np.std(image[c] / 255) for image in x]) for c in range(3)]
    sent = client.returns["statistics"]["statistics"]
    assert sent.dtype == np.float32
    np.testing.assert_allclose(sent, [mean, std], rtol=1e-5)
    np.testing.assert_allclose([client.data.mean, client.data.std], [mean, std], rtol=1e-5)


def steps_of(client) -> list[torch.Tensor]:
    """The batches, [B, 1, 8, 8], that a round's steps train on."""
    seen, loss = [], client.loss
    client.loss = lambda x, y: (seen.append(x.clone()), loss(x, y))[1]
    client.train(2)
    return seen


def test_each_image_is_normalized_with_the_statistics_of_one_client():
    client, plain = trainer("fedrdn"), trainer("fedrdn")
    client.shared = {"statistics": {"statistics": OTHERS}}
    (mean,), (std,) = client.own
    used = []
    for x, original in zip(steps_of(client), steps_of(plain), strict=True):
        original = original * std + mean  # in [0, 1]
        options = [(original - m) / s for m, s in OTHERS[:, :, 0]]
        near = torch.stack([(x - option).abs().amax((1, 2, 3)) for option in options])
        assert near.min(0).values.max() < 1e-5
        used += near.argmin(0).tolist()
    assert set(used) == {0, 1}


def test_own_statistics_alone_change_no_image():
    client, plain = trainer("fedrdn"), trainer("fedrdn")
    client.shared = {"statistics": {"statistics": client.own[None]}}
    for x, original in zip(steps_of(client), steps_of(plain), strict=True):
        torch.testing.assert_close(x, original, atol=1e-5, rtol=1e-5)


def test_sharpness_aware_steps_see_the_same_images_twice():
    client = trainer("fedrdn", settings=SETTINGS.__class__(sharpness="sam", local_epochs=1))
    client.shared = {"statistics": {"statistics": OTHERS}}
    seen = steps_of(client)
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(first, second)


def test_clients_get_all_statistics_from_round_2_on():
    seen = []

    def make(k):
        client = trainer("fedrdn", k)
        begin = client.begin
        client.begin = lambda r: (seen.append((r, k, client)), begin(r))[1]
        return client

    run_toy_rounds(Uniform(exchanges=[ImageStatistics()]), make, 3, 2)
    for server_round, _, client in seen:
        own = {k: c.own for _, k, c in seen}
        if server_round == 1:
            assert client.statistics is None
        else:
            np.testing.assert_array_equal(client.statistics, [own[k] for k in range(3)])


MODEL = {"w": np.zeros(2, np.float32)}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        {"mean": OTHERS[0]},
        {"statistics": OTHERS[0, 0]},
        {"statistics": OTHERS},
        {"statistics": OTHERS[0], "more": OTHERS[0]},
        {"statistics": OTHERS[0].astype(np.float64)},
        {"statistics": np.array([[0.5], [0.0]], np.float32)},
        {"statistics": np.array([[np.nan], [0.1]], np.float32)},
        {"statistics": np.array([[1.5], [0.1]], np.float32)},
    ],
)
def test_invalid_statistics_drop_the_client_with_the_reason(bad, later):
    strategy = Uniform(min_clients=1, exchanges=[ImageStatistics()])
    rounds = Rounds(strategy, MODEL, range(2))
    good = {"statistics": {"statistics": OTHERS[0]}}
    if later:
        rounds.step(dict.fromkeys(range(2), MODEL), measured={0: good, 1: good})
    rounds.step(dict.fromkeys(range(2), MODEL), measured={0: good, 1: {"statistics": bad}})
    assert strategy.client_ids == (0,)
    assert "expected 'statistics', float32 (2, " in strategy.dropped[1]


def test_absent_clients_keep_their_statistics_also_in_a_checkpoint():
    exchange, again = ImageStatistics(), ImageStatistics()
    rounds = Rounds(Uniform(min_clients=1, exchanges=[exchange]), MODEL, range(2))
    for k in (1, 0):
        rounds.step({k: MODEL}, measured={k: {"statistics": {"statistics": OTHERS[k]}}})
    np.testing.assert_array_equal(exchange.broadcast(3)["statistics"], OTHERS)
    Uniform(exchanges=[again]).load_state_dict(rounds.strategy.state_dict())
    assert models_equal(again.broadcast(3), exchange.broadcast(3))


def test_features_are_refused_and_tests_by_the_server_warned_of():
    with pytest.raises(ConfigError, match="FedRDN trains on images"):
        FedRDN.check_kind("features")
    assert "evaluate.by" in FedRDN.run_warning(tiny_model(), "server")
    assert not FedRDN.run_warning(tiny_model(), "both")
    masked = {"secure-aggregation": True, "strategy.name": "uniform"}
    with pytest.raises(ConfigError, match="'fedrdn' exchanges 'statistics'"):
        RunConfig.from_flat(masked | {"client.name": "fedrdn"})


def test_a_site_sends_no_statistics_of_fewer_images_than_its_smallest_group():
    run = RunConfig.from_flat({"client.name": "fedrdn", "train.batch-size": 1})
    _check_means(run, data(), {}, len(data().train.y))
    with pytest.raises(ConfigError, match=r"fewer than 13 examples .* or in total"):
        _check_means(run, data(), {}, len(data().train.y) + 1)
