"""FedGC: losses against loops, trained and kept arrays, and cluster centers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_trainers import SETTINGS, exchanges, models_equal, run_toy_rounds, tiny_model, trainer

from fairflower import models
from fairflower.arrays import arrays_of
from fairflower.config import RunConfig
from fairflower.errors import ConfigError
from fairflower.exchanges import ClusterCenters, centers
from fairflower.numerics.clustering import cluster
from fairflower.strategies import FedAvg, FedGCR, Uniform
from fairflower.testing.rounds import Rounds
from fairflower.training.measurements import representation, train_and_measure
from fairflower.training.modes import eval_mode

variants = pytest.mark.parametrize("variant", ["adapted", "paper", "released"])
TRAINED = {"prompts", "gc_net", "head"}


def alike(a, b, similarity):
    product = sum(p.item() * q.item() for p, q in zip(a, b, strict=True))
    if similarity == "dot":
        return product
    return product / math.sqrt(sum(p.item() ** 2 for p in a) * sum(q.item() ** 2 for q in b))


def second_round(variant="adapted", **changes):
    """Return a client at the start of its second round, with centers."""
    client = trainer("fedgc", variant=variant, **changes)
    train_and_measure(client, {"server-round": 1})
    client.num_rounds = 10
    rng = np.random.default_rng(0)
    client.shared = {"centers": {"H": rng.normal(size=(3, 8)).astype(np.float32)}}
    client.round_config = {"server-round": 2, "cluster": 1}
    client.receive({k: a + np.float32(0.01) for k, a in client.send().items()})
    client.begin(2)
    return client


@pytest.mark.parametrize("similarity", ["variant", "cosine", "dot"])
@variants
def test_the_losses_match_equations_6_to_8(variant, similarity):
    client = second_round(variant, similarity=similarity)
    if similarity == "variant":  # the equations are printed with products
        similarity = "dot" if variant == "paper" else "cosine"
    x, y = next(client.train_examples.eval_batches(5))
    h = client.model.type_prompt(x)
    z = client.model.prompted(x, h)
    z_0, z_prev = (client.features_with(a, x) for a in (client.anchor, client.previous))
    H, h_prev = client.shared["centers"]["H"], client.state["h"]["h"]
    gc = ra = 0.0
    for b in range(len(x)):
        over = [math.exp(alike(h[b], c, similarity) / 0.5) for c in H]
        over_all = sum(over) + math.exp(alike(h[b], h_prev, similarity) / 0.5)
        gc -= math.log(over[1] / over_all) / len(x)
        tau = 1.0 if variant == "released" else 0.5
        near, far = (alike(z[b], other[b], similarity) / tau for other in (z_0, z_prev))
        ra += math.log1p(math.exp(far - near)) / len(x)
    ce = torch.nn.functional.cross_entropy(client.model.head(z), y).item()
    first, second = (0.05 * 1.1, 0.05) if variant == "released" else (0.5, 0.1)
    expected = ce + first * gc + second * ra
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-4)


@variants
def test_the_loss_of_a_batch_is_the_mean_over_its_images(variant):
    client = second_round(variant)
    x, y = next(client.train_examples.eval_batches(5))
    alone = [client.loss(x[i : i + 1], y[i : i + 1]).item() for i in range(5)]
    assert client.loss(x, y).item() == pytest.approx(np.mean(alone), rel=1e-5)


def test_only_prompts_gc_net_and_head_get_gradients():
    client = second_round()
    client.loss(*next(client.train_examples.eval_batches(5))).backward()
    reached = {n for n, p in client.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {name.split(".")[0] for name in reached} == TRAINED


def test_sent_arrays_have_the_size_of_the_trained_parameters():
    client = trainer("fedgc")
    sent = sum(array.nbytes for array in client.send().values())
    assert sent == sum(4 * p.numel() for p in client.trainable)


def test_the_loss_without_a_cluster_is_the_cross_entropy():
    client = second_round()
    x, y = next(client.train_examples.eval_batches(5))
    plain = torch.nn.functional.cross_entropy(client.model(x), y)
    for shared, config in (({}, {"cluster": 1}), (client.shared, {})):
        client.shared, client.round_config = shared, config
        client.begin(2)
        torch.testing.assert_close(client.loss(x, y), plain)


def test_a_network_without_gc_net_and_an_unknown_variant_are_refused():
    base = models.build("vpt-vit-tiny", 4, (1, 8, 8), seed=0)
    for model in (tiny_model(), base):
        with pytest.raises(ConfigError, match=r"GC-Net.*is a .* without.*prompt-vit-tiny"):
            trainer("fedgc", model=model)
    with pytest.raises(ConfigError, match="variant = 'new'"):
        trainer("fedgc", variant="new")


# --- the centers ---------------------------------------------------------------------------

MODEL = {"w": np.zeros(2, np.float32)}


@pytest.mark.parametrize("sharpness", ["none", "sam"])
@pytest.mark.parametrize("ready", [False, True])
@variants
def test_the_reported_loss_is_the_cross_entropy_except_in_the_paper_variant(
    variant, ready, sharpness
):
    """With one step on all images, it is the loss of the received model."""
    settings = replace(SETTINGS, batch_size=100, sharpness=sharpness)
    make = second_round if ready else lambda variant, **o: trainer("fedgc", variant=variant, **o)
    client = make(variant, settings=settings)
    x, y = next(client.train_examples.eval_batches(100))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(client.model(x), y).item()
        if ready and variant == "paper":
            entropy, expected = expected, client.loss(x, y).item()  # Eq. 6
            assert expected > entropy + 0.01
    assert client.train(3)["train_loss"] == pytest.approx(expected, rel=1e-5)
    assert client.steps == 1
    assert client.ready == ready


@pytest.mark.parametrize("variant", ["adapted", "paper"])
@pytest.mark.parametrize(
    "asked", ["received_representation", "representation", ""], ids=["received", "trained", "none"]
)
def test_the_kept_representation_is_the_one_sent(asked, variant):
    client = trainer("fedgc", variant=variant)
    _, sent = train_and_measure(client, {"server-round": 1, "measure": asked})
    kept = client.state["h"]["h"]
    if asked:
        np.testing.assert_array_equal(kept, sent[asked]["h"])
    else:
        with eval_mode(client.model):
            np.testing.assert_array_equal(kept, representation(client)["h"].numpy())


POINTS = {0: (0, 0), 1: (0, 1), 2: (9, 9), 3: (9, 8)}


def step(rounds, clients):
    h = {k: {"received_representation": {"h": np.array(POINTS[k], np.float32)}} for k in clients}
    rounds.step(dict.fromkeys(clients, MODEL), measured=h)


@pytest.mark.parametrize("rule", [FedAvg, lambda **o: FedGCR(num_clusters=2, **o)])
def test_centers_are_cluster_means_whether_exchange_or_strategy_clusters(rule):
    exchange = ClusterCenters(num_clusters=2)
    rounds = Rounds(rule(min_clients=1, exchanges=[exchange]), MODEL, range(5))
    step(rounds, [0, 1, 2, 3])
    assert rounds.strategy.diagnostics["cluster"].tolist() == [0, 0, 1, 1]
    assert rounds.strategy.diagnostics["num_clusters"] == 2
    messages = {m.metadata.dst_node_id - 1000: m.content for m in rounds.ask()}
    for k, mean in ((0, (0, 0.5)), (1, (0, 0.5)), (2, (9, 8.5)), (3, (9, 8.5))):
        H = arrays_of(messages[k]["centers"])["H"]
        np.testing.assert_allclose(H[messages[k]["config"]["cluster"]], mean)
    assert "cluster" not in messages[4]["config"]  # never seen
    step(rounds, [0, 3])
    assert exchange.members.keys() == POINTS.keys()  # absent clients keep theirs
    assert exchange.members[0] == exchange.members[1] != exchange.members[2]


def test_clients_receive_the_row_of_their_center():
    exchange = ClusterCenters(num_clusters=2)
    exchange.members = {5: 10, 6: 2}
    exchange.centers = {10: np.ones(3), 2: np.zeros(3)}
    for client, center in ((5, 1), (6, 0)):
        row = exchange.client_config(client)["cluster"]
        np.testing.assert_array_equal(exchange.broadcast(2)["H"][row], center)


def test_the_exchange_variants_match_those_of_the_strategy():
    """The measured representation, the clustering, and a required number of clusters."""
    for variant in ("adapted", "paper", "released"):
        exchange, rule = (
            kind(num_clusters=2, variant=variant) for kind in (ClusterCenters, FedGCR)
        )
        assert exchange.measurements == rule.measurements[:1]
        assert exchange.clustering == rule.clustering
    assert ClusterCenters(clustering="gmm").clustering == "gmm"
    with pytest.raises(ValueError, match=r"^num_clusters = 'auto'.*Set the number"):
        ClusterCenters(variant="paper")
    with pytest.raises(ConfigError, match=r"^client\.num_clusters = 'auto'.*Set the number"):
        RunConfig.from_flat(
            {"client.name": "fedgc", "client.variant": "paper", "model.name": "prompt-vit-tiny"}
        )


def test_the_exchange_uses_the_chosen_clustering(monkeypatch):
    asked = []

    def spy(*args, clustering, **options):
        asked.append(clustering)
        return cluster(*args, clustering=clustering, **options)

    monkeypatch.setattr(centers, "cluster", spy)
    for arguments in ({}, {"clustering": "gmm"}, {"variant": "released"}):
        exchange = ClusterCenters(num_clusters=2, **arguments)
        rounds = Rounds(FedAvg(min_clients=1, exchanges=[exchange]), MODEL, range(4))
        step(rounds, range(4))
        assert exchange.members[0] == exchange.members[1] != exchange.members[2]
    assert asked == ["kmeans", "gmm", "gmm"]


@pytest.mark.parametrize("rule", [FedAvg, lambda **o: FedGCR(num_clusters=2, variant="paper", **o)])
def test_the_paper_variant_trains_in_a_federation(rule):
    """The trained model's representation is measured once; clients report the loss of Eq. 6."""
    arguments = {"variant": "paper", "num_clusters": 2}
    strategy = rule(min_clients=1, exchanges=[ClusterCenters.made_with(arguments)])
    model, _ = run_toy_rounds(strategy, lambda k: trainer("fedgc", k, **arguments), 4, 3)
    assert all(np.isfinite(array).all() for array in model.values())
    assert strategy._measurements == ("representation",)
    assert strategy.diagnostics["num_clusters"] == 2


def test_the_exchange_uses_the_strategys_clusters():
    exchange = ClusterCenters(num_clusters=1)
    rule = FedGCR(num_clusters=2, exchanges=[exchange])
    step(Rounds(rule, MODEL, range(4)), range(4))
    assert exchange.members == rule.members
    assert len(exchange.centers) == 2


@pytest.mark.parametrize("rule", [Uniform, FedGCR])
def test_runs_with_absent_clients_are_reproducible(rule):
    def run(reverse):
        strategy = rule(fraction_train=0.6, exchanges=exchanges("fedgc"))
        return run_toy_rounds(strategy, lambda k: trainer("fedgc", k), 4, 3, reverse=reverse)[0]

    assert models_equal(run(False), run(True))


def test_the_state_holds_only_the_trained_arrays_and_h():
    client = second_round()
    assert client.state.keys() == {"h", "previous"}
    assert {name.split(".")[0] for name in client.state["previous"]} == TRAINED
