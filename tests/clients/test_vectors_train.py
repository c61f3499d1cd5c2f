"""Every client and strategy on features and on token ids: it trains or refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parametrize import STRATEGY_PER_NEEDS
from tiny_data_sets import MODELS, data
from toy_trainers import SETTINGS, exchanges, run_toy_rounds

from fairflower.clients import Trainer
from fairflower.config import ClientConfig, RunConfig
from fairflower.errors import ConfigError
from fairflower.models import build
from fairflower.registry import CLIENTS, STRATEGIES
from fairflower.strategies import Uniform
from fairflower.testing import check_model
from fairflower.training.build import build_trainer

kinds = pytest.mark.parametrize("kind", MODELS)
RUN = {"features": "randhie", "tokens": "tiny_data_sets:Texts"}

#: Clients that refuse, and their errors.
REFUSE = {
    "harmofl": "HarmoFL trains on images, but the data are",
    "fedmix": "FedMix trains on images, but the data are",
    "fedrdn": "FedRDN trains on images, but the data are",
    "fedgc": "FedGC trains prompt-vit-tiny or|needs a PromptViT with a GC-Net",
}


def trainer(name: str, kind: str, client: int) -> Trainer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[kind]()
    return build_trainer(
        ClientConfig(name), model, data(kind, client), SETTINGS, client_id=client, seed=0
    )


@pytest.mark.few(15)
@kinds
@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_trains_on_features_and_tokens_or_refuses(name: str, kind: str) -> None:
    if name in REFUSE:
        with pytest.raises(ConfigError, match=REFUSE[name]):
            trainer(name, kind, 0)
        with pytest.raises(ConfigError, match=REFUSE[name]):
            RunConfig.from_flat({"data.name": RUN[kind], "client.name": name})
        return
    RunConfig.from_flat({"data.name": RUN[kind], "client.name": name})
    start = trainer(name, kind, 0).send()
    rule = Uniform(exchanges=exchanges(name))
    model, _ = run_toy_rounds(rule, lambda client: trainer(name, kind, client), 3, 2, start)
    assert rule.dropped == {}
    assert any(not np.array_equal(model[key], start[key]) for key in start)
    assert all(np.isfinite(array).all() for array in model.values())


@pytest.mark.few(8)
@kinds
@pytest.mark.parametrize("name", STRATEGY_PER_NEEDS)
def test_strategies_merge_models_of_features_and_tokens(name: str, kind: str) -> None:
    rule = STRATEGIES[name]()
    start = trainer("sgd", kind, 0).send()
    model, _ = run_toy_rounds(rule, lambda client: trainer("sgd", kind, client), 3, 2, start)
    assert rule.dropped == {}
    assert any(not np.array_equal(model[key], start[key]) for key in start)
    assert all(np.isfinite(array).all() for array in model.values())


@kinds
def test_tested_loss_and_accuracy_match_a_hand_computation(kind: str) -> None:
    one = trainer("sgd", kind, 0)
    x, y = one.data.test
    scaled = torch.tensor(x if kind == "tokens" else (x - 0.5) / np.float32(2))
    logits = one.model(scaled).detach().double()
    loss = -logits.log_softmax(1)[torch.arange(len(y)), torch.tensor(y)].mean()
    right = (logits.argmax(1).numpy() == y).mean()
    actual = one.test()
    assert actual["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert actual["accuracy"] == pytest.approx(right)


def test_mlp_and_embedding_bag_pass_check_model() -> None:
    from fairflower.models.small import MLP, EmbeddingBag

    check_model(MLP, (7,))
    check_model(MLP, (3, 8, 8), hidden=5)
    check_model(EmbeddingBag, (30, 6))
    with pytest.raises(AssertionError, match="checked on images, but it takes tokens"):
        check_model(EmbeddingBag)


def test_an_embedding_bag_ignores_order_and_padding() -> None:
    bag = MODELS["tokens"]()
    x = torch.tensor([[3, 5, 9, 0, 0], [9, 3, 5, 0, 0], [3, 5, 9, 3, 5], [0, 0, 0, 0, 0]])
    features = bag.features(x)
    torch.testing.assert_close(features[0], features[1])
    torch.testing.assert_close(features[0], bag.tokens.weight[[3, 5, 9]].mean(0))
    assert not torch.allclose(features[0], features[2])
    assert not features[3].any()


# --- compatible settings --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_name", "model"),
    [
        ("uci-digits", "cnn"),
        ("randhie:groups=site", "mlp"),
        ("tiny_data_sets:Texts", "embedding-bag"),
    ],
)
def test_the_default_model_matches_the_data(data_name: str, model: str) -> None:
    assert RunConfig.from_flat({"data.name": data_name}).model.name == model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model.name": "cnn"},
            "this model accepts images, but the data are features. Set it to mlp",
        ),
        ({"model.name": "resnet18"}, "'resnet18': this model accepts images"),
        ({"model.name": "embedding-bag"}, "'embedding-bag': this model accepts tokens"),
        (
            {"model.name": "toy_trainers:tiny_network"},
            r"accepts images, .*\(--model mlp\), "
            r"or set toy_trainers:tiny_network.kinds = \('features'",
        ),
        ({"model.name": "mlp", "data.name": "tiny_data_sets:Texts"}, "to embedding-bag"),
        ({"model.name": "embedding-bag", "data.name": "uci-digits"}, "Set it to cnn"),
        (
            {"data.image-size": 8},
            "data.image-size = 8: this setting applies to images only, but data.name = 'randhie'",
        ),
        (
            {"data.corrupted-clients": 1},
            "data.corrupted-clients = 1: this setting applies to images only",
        ),
    ],
)
def test_incompatible_models_and_settings_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat({"data.name": "randhie"} | settings)


def test_an_mlp_flattens_images() -> None:
    net, x = build("mlp:hidden=8", 10, (1, 4, 4), 0), torch.rand(3, 1, 4, 4)
    torch.testing.assert_close(net(x), net(x.flatten(1)))
    assert not torch.allclose(net(x), net(x.flip(3)))
