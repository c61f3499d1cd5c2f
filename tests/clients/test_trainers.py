"""Clients against closed forms and plain loops."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from parametrize import mark_others_nightly
from torch import nn
from torch.nn import functional as F
from toy_trainers import (
    CLASSES,
    SETTINGS,
    data,
    exchanges,
    images,
    models_equal,
    quadratic_trainer,
    run_toy_rounds,
    tiny_model,
    trainer,
)

from fairflower.arrays import record_of
from fairflower.clients import ClientData, Trainer, make_client_app
from fairflower.clients.ditto import Ditto
from fairflower.clients.feddyn import FedDyn
from fairflower.clients.fedprox import FedProx
from fairflower.clients.scaffold import SCAFFOLD
from fairflower.clients.sgd import SGD
from fairflower.config import RunConfig, TrainConfig
from fairflower.data import Augment
from fairflower.errors import ConfigError
from fairflower.exchanges import ControlVariates, DynamicRegularizer
from fairflower.models import copy_arrays
from fairflower.strategies import FedAvg, Uniform

PLAIN = TrainConfig(local_epochs=1, batch_size=8, lr=0.1, momentum=0.0, weight_decay=0.0)

# Four clients whose losses have different curvatures and minima: averaging local
# minimizers does not minimize the mean loss.
CURVATURE = np.array([[1.0, 4.0], [5.0, 1.0], [2.0, 3.0], [0.5, 6.0]])
MINIMUM = np.array([[1.0, -2.0], [-1.0, 3.0], [4.0, 0.0], [0.0, 1.0]])


def optimum(weights: Any = None, decay: float = 0.0, clients: int = 4) -> np.ndarray:
    """Minimum of sum_k p_k F_k(w) + decay/2 ||w||^2."""
    p = np.full(clients, 1 / clients) if weights is None else np.asarray(weights)
    a, c = CURVATURE[:clients], MINIMUM[:clients]
    return np.asarray((p @ (a * c)) / (p @ a + decay))


def on_bowls(kind, strategy, rounds, settings, clients=4, examples=(2, 2, 2, 2), **arguments):
    """Return the global w after rounds; client k has the k-th of the four losses."""

    def make(k):
        a, c = CURVATURE[k].tolist(), MINIMUM[k].tolist()
        return quadratic_trainer(kind, a, c, settings, client=k, examples=examples[k], **arguments)

    return run_toy_rounds(strategy, make, clients, rounds)[0]["w"]


# --- FedProx -----------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0])
def test_fedprox_descends_the_loss_plus_the_proximal_term(mu):
    a, c, start = CURVATURE[0], MINIMUM[0], np.array([2.0, 2.0])
    settings = replace(PLAIN, local_epochs=3, weight_decay=0.2)
    client = quadratic_trainer(FedProx, a.tolist(), c.tolist(), settings, mu=mu)
    client.receive({"w": start.astype(np.float32)})
    client.train(1)
    w = start
    for _ in range(3):
        w = w - 0.1 * (a * (w - c) + mu * (w - start) + 0.2 * w)
    np.testing.assert_allclose(client.send()["w"], w, rtol=1e-5)


def test_fedprox_converges_to_the_proximal_point():
    a, c, start = CURVATURE[0], MINIMUM[0], np.array([2.0, 2.0])
    client = quadratic_trainer(
        FedProx, a.tolist(), c.tolist(), replace(PLAIN, local_epochs=300), mu=3.0
    )
    client.receive({"w": start.astype(np.float32)})
    client.train(1)
    np.testing.assert_allclose(client.send()["w"], (a * c + 3 * start) / (a + 3), rtol=1e-5)


# --- SCAFFOLD ----------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("momentum", "decay"),
    mark_others_nightly(itertools.product((0.0, 0.9), (0.0, 0.3)), {(0.0, 0.0), (0.9, 0.3)}),
)
def test_scaffold_reaches_the_joint_optimum_where_fedavg_does_not(momentum, decay):
    lr = 0.03 if momentum else 0.1
    settings = TrainConfig(5, 8, "sgd", lr=lr, momentum=momentum, weight_decay=decay)
    best = optimum(decay=decay, clients=2)
    scaffold = on_bowls(SCAFFOLD, Uniform(exchanges=[ControlVariates()]), 40, settings, clients=2)
    np.testing.assert_allclose(scaffold, best, rtol=0, atol=1e-3)
    fedavg = on_bowls(SGD, Uniform(), 40, settings, clients=2)
    assert np.abs(fedavg - best).max() > 0.05


@pytest.mark.slow
def test_scaffold_reaches_the_joint_optimum_with_half_of_the_clients():
    settings = replace(PLAIN, local_epochs=4, lr=0.05)
    rule = Uniform(fraction_train=0.5, exchanges=[ControlVariates()])
    w = on_bowls(SCAFFOLD, rule, 80, settings)
    np.testing.assert_allclose(w, optimum(), rtol=0, atol=0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_control_variate_is_the_mean_gradient_with_weight_decay(momentum):
    """After one step it is the gradient; after more, it lies between the first and the last."""
    a, c, start = CURVATURE[0], MINIMUM[0], np.array([2.0, 2.0])
    for epochs in (1, 4):
        settings = replace(PLAIN, local_epochs=epochs, momentum=momentum, weight_decay=0.2, lr=0.01)
        client = quadratic_trainer(SCAFFOLD, a.tolist(), c.tolist(), settings)
        client.receive({"w": start.astype(np.float32)})
        client.train(1)
        first = a * (start - c) + 0.2 * start
        end = client.send()["w"]
        last = a * (end - c) + 0.2 * end
        control = client.state["control"]["w"]
        np.testing.assert_array_equal(client.returns["control"]["w"], control)
        if epochs == 1:
            np.testing.assert_allclose(control, first, rtol=1e-3)
        else:
            assert (np.abs(last) < np.abs(control)).all()
            assert (np.abs(control) < np.abs(first)).all()


def test_scaffold_refuses_optimizers_other_than_sgd():
    settings = {"client.name": "scaffold", "train.optimizer": "adam"}
    with pytest.raises(ConfigError, match=r"train.optimizer = 'adam': SCAFFOLD .* 'sgd'"):
        RunConfig.from_flat(settings)
    with pytest.raises(ConfigError, match="SCAFFOLD"):
        trainer("scaffold", settings=replace(SETTINGS, optimizer="adamw"))


# --- FedDyn ------------------------------------------------------------------------------

THOROUGH = replace(PLAIN, local_epochs=10, lr=0.15)


@pytest.mark.slow
def test_feddyn_reaches_the_joint_optimum_where_fedavg_does_not():
    rule = Uniform(exchanges=[DynamicRegularizer()])
    w = on_bowls(FedDyn, rule, 30, THOROUGH, alpha=2.0)
    np.testing.assert_allclose(w, optimum(), rtol=0, atol=0.01)
    fedavg = on_bowls(SGD, Uniform(), 15, THOROUGH)
    assert np.abs(fedavg - optimum()).max() > 0.2


@pytest.mark.slow
def test_feddyn_reaches_the_joint_optimum_with_half_of_the_clients():
    rule = Uniform(fraction_train=0.5, exchanges=[DynamicRegularizer()])
    w = on_bowls(FedDyn, rule, 60, THOROUGH, alpha=2.0)
    np.testing.assert_allclose(w, optimum(), rtol=0, atol=0.01)


@pytest.mark.slow
def test_feddyn_under_fedavg_reaches_the_sample_weighted_optimum():
    examples = (2, 6, 3, 9)
    rule = FedAvg(exchanges=[DynamicRegularizer()])
    settings = replace(THOROUGH, batch_size=16)
    w = on_bowls(FedDyn, rule, 30, settings, examples=examples, alpha=2.0)
    np.testing.assert_allclose(w, optimum(np.array(examples) / 20), rtol=0, atol=0.01)
    assert np.abs(optimum(np.array(examples) / 20) - optimum()).max() > 0.1


@pytest.mark.slow
def test_feddyn_reaches_the_optimum_with_weight_decay_and_momentum():
    settings = replace(THOROUGH, momentum=0.5, lr=0.1, weight_decay=0.3)
    w = on_bowls(FedDyn, Uniform(exchanges=[DynamicRegularizer()]), 30, settings, alpha=2.0)
    np.testing.assert_allclose(w, optimum(decay=0.3), rtol=0, atol=0.01)


def test_feddyn_matches_algorithm_1_with_exact_local_solutions():
    """The paper's h and g_k in numpy, half of the clients a round."""
    alpha, clients = 0.5, 4
    rule = Uniform(fraction_train=0.5, exchanges=[DynamicRegularizer()])
    theta, h, g = np.zeros(2), np.zeros(2), np.zeros((clients, 2))
    for number in range(1, 7):
        random = np.random.default_rng([0, number])
        chosen = sorted(random.choice(clients, 2, replace=False))
        local = {}
        for k in chosen:
            a, c = CURVATURE[k], MINIMUM[k]
            local[k] = (a * c + g[k] + alpha * theta) / (a + alpha)
            g[k] -= alpha * (local[k] - theta)
        h = h - alpha * sum(local[k] - theta for k in chosen) / clients
        theta = np.mean([local[k] for k in chosen], axis=0) - h / alpha
    actual = on_bowls(FedDyn, rule, 6, replace(THOROUGH, local_epochs=60), alpha=alpha)
    np.testing.assert_allclose(actual, theta, rtol=1e-4, atol=1e-4)


# --- MOON --------------------------------------------------------------------------------


def batch(n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % CLASSES


def trained(model: nn.Module) -> nn.Module:
    """Set random running statistics, so that training and evaluation mode differ."""
    model.norm.running_mean.uniform_(-0.5, 0.5)
    model.norm.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize(("mu", "tau"), [(5.0, 0.5), (1.0, 0.2)])
def test_moons_loss_matches_eq_3_with_frozen_networks(mu, tau):
    torch.manual_seed(0)
    local, received, previous = (
        trained(tiny_model(1)),
        trained(tiny_model(2)),
        trained(tiny_model(3)),
    )
    x, y = batch()
    client = trainer("moon", model=local, mu=mu, tau=tau)
    client.receive(copy_arrays(received))
    client.state["previous"] = copy_arrays(previous)
    client.begin(2)
    client.receive(copy_arrays(trained(tiny_model(1))))  # as if training had moved it there
    statistics = copy_arrays(local)
    reference = copy.deepcopy(local).train()

    local.train()
    loss = client.loss(x, y)
    loss.backward()
    received.eval()
    previous.eval()
    z = reference.features(x)
    terms = []
    for n in range(len(y)):
        with torch.no_grad():
            others = [model.features(x)[n] for model in (received, previous)]
        near, far = (cosine(z[n], other) / tau for other in others)
        terms.append(-torch.log(near.exp() / (near.exp() + far.exp())))
    expected = F.cross_entropy(reference.head(z), y) + mu * torch.stack(terms).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for p, q in zip(local.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    # Batch norm has seen this one batch, and none of the frozen networks' passes.
    assert local.norm.num_batches_tracked == statistics["norm.num_batches_tracked"] + 1
    assert models_equal(copy_arrays(local), copy_arrays(reference))
    assert all(module.training for module in local.modules())


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b) / (a.norm() * b.norm()).clamp(min=1e-8)


@pytest.mark.parametrize("name", ["moon", "fedproto", "fedproc", "fedlsa"])
def test_the_first_round_equals_sgd(name):
    """Without a previous model or shared arrays, the labels have their full weight."""
    start = trainer("sgd").send()
    results = []
    for each in ("sgd", name):
        client = trainer(each)
        client.num_rounds = 10
        client.receive(start)
        client.train(1)
        results.append(client.send())
    assert models_equal(*results)
    if name == "moon":
        assert models_equal(client.state["previous"], results[1])


@pytest.mark.parametrize("name", ["moon", "fedproto", "fedproc", "fedlsa"])
def test_clients_that_use_features_require_a_classifier(name):
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    with pytest.raises(TypeError, match=r"features.*Sequential.*fairflower.models.Classifier"):
        trainer(name, model=plain)


# --- prototypes: FedProto and FedProc ------------------------------------------------------


def test_class_means_match_a_loop_over_the_images():
    client = trainer("fedproto", data=data(classes=3))
    client.eval_batch_size = 5
    client.train(1)
    returned = client.returns["prototypes"]
    model, split = client.model.eval(), client.data.train
    features: dict[int, list[np.ndarray]] = {}
    for image, label in zip(split.x, split.y, strict=True):
        x = torch.tensor((image[None] / 255 - 0.5) / 0.5, dtype=torch.float32)
        with torch.no_grad():
            features.setdefault(int(label), []).append(model.features(x)[0].numpy())
    for label in range(CLASSES):
        members = features.get(label, [])
        assert returned["count"][label] == len(members)
        mean = np.mean(members, axis=0) if members else np.zeros(6)
        np.testing.assert_allclose(returned["mean"][label], mean, rtol=1e-4, atol=1e-6)
    assert returned["count"][CLASSES - 1] == 0
    assert returned["mean"].dtype == np.float32


PROTOTYPES = np.linspace(-1, 2, CLASSES * 6, dtype=np.float32).reshape(CLASSES, 6)
KNOWN = np.array([3, 0, 1, 9])  # class 1 has no prototype


def test_fedprotos_loss_matches_a_hand_computation():
    x, y = batch()
    client = trainer("fedproto", lambda_=0.7)
    client.shared["prototypes"] = {"mean": PROTOTYPES, "count": KNOWN}
    client.begin(2)
    reference = copy.deepcopy(client.model)
    z = reference.features(x).detach()
    apart = [
        float((z[n] - torch.tensor(PROTOTYPES[y[n]])).square().mean()) if KNOWN[y[n]] else 0.0
        for n in range(len(y))
    ]
    expected = F.cross_entropy(reference.head(z), y).item() + 0.7 * np.mean(apart)
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("server_round", "rounds", "num_rounds", "a"),
    [(2, 0, 10, 0.9), (10, 0, 10, 0.1), (3, 4, 10, 0.5), (9, 4, 10, 0.0), (2, 0, 0, 0.99)],
)
def test_fedprocs_loss_matches_a_hand_computation(server_round, rounds, num_rounds, a):
    x, y = batch()
    client = trainer("fedproc", rounds=rounds)
    client.num_rounds = num_rounds
    client.shared["prototypes"] = {"mean": PROTOTYPES, "count": KNOWN}
    client.begin(server_round)
    reference = copy.deepcopy(client.model)
    z = reference.features(x).detach()
    terms = []
    for n in range(len(y)):
        likeness = {
            c: math.exp(float(z[n] @ torch.tensor(PROTOTYPES[c] / np.linalg.norm(PROTOTYPES[c]))))
            for c in range(CLASSES)
            if KNOWN[c]
        }
        label = int(y[n])
        terms.append(-math.log(likeness[label] / sum(likeness.values())) if KNOWN[label] else 0.0)
    expected = a * np.mean(terms) + (1 - a) * F.cross_entropy(reference.head(z), y).item()
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_known_classes_has_finite_gradients():
    x, y = batch(2)
    for name in ("fedproto", "fedproc"):
        client = trainer(name)
        client.shared["prototypes"] = {"mean": PROTOTYPES, "count": np.array([0, 0, 5, 5])}
        client.begin(2)
        client.loss(x, y).backward()
        assert all(p.grad.isfinite().all() for p in client.model.parameters())


def test_prototypes_reach_the_clients_of_the_next_round():
    seen = []

    def make(k):
        client = trainer("fedproto", k)
        begin = client.begin
        client.begin = lambda r: (seen.append((r, client.shared)), begin(r))[1]  # type: ignore
        return client

    run_toy_rounds(Uniform(exchanges=exchanges("fedproto")), make, 2, 2)
    first, second = ([shared for r, shared in seen if r == n] for n in (1, 2))
    assert first == [{}, {}]
    assert [set(shared["prototypes"]) for shared in second] == [{"mean", "count"}] * 2
    assert second[0]["prototypes"]["count"].sum() == 24  # all images of both clients


# --- FedLSA ------------------------------------------------------------------------------


def test_fedlsas_loss_matches_a_hand_computation():
    x, y = batch()
    anchors = F.normalize(torch.tensor(PROTOTYPES)).numpy()
    client = trainer("fedlsa", lambda_=0.7, tau=0.2)
    client.shared["anchors"] = {"anchors": anchors}
    client.begin(2)
    reference = copy.deepcopy(client.model)
    z = reference.features(x)
    terms = []
    for n in range(len(y)):
        h = (z[n] / z[n].norm().clamp(min=1e-12)).detach().numpy()
        likeness = np.exp(anchors @ h / 0.2)
        terms.append(-np.log(likeness[y[n]] / likeness.sum()))
    expected = F.cross_entropy(reference.head(z), y).item() + 0.7 * np.mean(terms)
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-5)


# --- Ditto -------------------------------------------------------------------------------


def ditto(
    lambda_: float, rounds: int = 3, epochs: int = 4, lr: float = 0.1, share: str = "global"
) -> tuple[Any, Any]:
    """Return the global w and client 0's personal w after rounds with two clients."""
    settings = replace(PLAIN, local_epochs=epochs, lr=lr, momentum=0.5, weight_decay=0.1)

    def make(k):
        a, c = CURVATURE[k].tolist(), MINIMUM[k].tolist()
        return quadratic_trainer(Ditto, a, c, settings, client=k, lambda_=lambda_, share=share)

    model, grid = run_toy_rounds(Uniform(), make, 2, rounds)
    state = next(iter(grid.contexts.values())).state
    return model["w"], state["fairflower/personal"]["w"].numpy()


def personal_by_hand(
    lambda_: float, received: list[np.ndarray], epochs: int, lr: float, k: int = 0
) -> Any:
    a, c = CURVATURE[k], MINIMUM[k]
    v = received[0]
    for w in received:
        velocity = np.zeros(2)
        for _ in range(epochs):
            velocity = 0.5 * velocity + a * (v - c) + lambda_ * (v - w) + 0.1 * v
            v = v - lr * velocity
    return v


def global_by_hand(rounds: int, epochs: int, lr: float) -> list[np.ndarray]:
    """Return the models received in each round and the last one, by plain averaging."""
    w = [np.zeros(2)]
    for _ in range(rounds):
        local = []
        for a, c in zip(CURVATURE[:2], MINIMUM[:2], strict=True):
            u, velocity = w[-1], np.zeros(2)
            for _ in range(epochs):
                velocity = 0.5 * velocity + a * (u - c) + 0.1 * u
                u = u - lr * velocity
            local.append(u)
        w.append(np.mean(local, axis=0))
    return w


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
def test_dittos_personal_model_matches_eq_2(lambda_):
    received = global_by_hand(3, 4, 0.1)
    model, personal = ditto(lambda_)
    np.testing.assert_allclose(model, received[-1], rtol=1e-4, atol=1e-5)
    expected = personal_by_hand(lambda_, received[:-1], 4, 0.1)
    np.testing.assert_allclose(personal, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
def test_ditto_can_send_the_personal_models(lambda_):
    received = [np.zeros(2)]
    for _ in range(3):
        v = [personal_by_hand(lambda_, received, 4, 0.1, k) for k in (0, 1)]
        received.append(np.mean(v, axis=0))
    model, personal = ditto(lambda_, share="personal")
    np.testing.assert_allclose(model, received[-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(personal, v[0], rtol=1e-4, atol=1e-5)
    assert np.abs(model - personal).max() > 0.1
    assert np.abs(model - ditto(lambda_)[0]).max() > 0.01


def test_ditto_with_share_personal_trains_only_the_personal_model(monkeypatch):
    one = trainer("ditto", share="personal")
    two = trainer("ditto")
    taken = []
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, *a: taken.append(self) or step(self, *a))
    for client in (one, two):
        client.train(1)
    assert taken.count(two) == 2 * taken.count(one)
    assert two.steps == one.steps  # those of the model that is sent
    assert models_equal(one.send(), two.state["personal"])
    assert models_equal(one.state["personal"], two.state["personal"])
    proximal = trainer("fedprox", mu=1.0)  # the same in the first round, which starts from w_t
    proximal.train(1)
    assert models_equal(one.send(), proximal.send())
    with pytest.raises(ConfigError, match=r"client\.share = 'all'"):
        trainer("ditto", share="all")


def test_ditto_with_lambda_0_equals_training_alone():
    """With batch norm and augmentation; alone means without any other client."""
    _, grid = run_toy_rounds(Uniform(), lambda k: trainer("ditto", k, lambda_=0.0), 2, 3)
    alone = trainer("sgd", 1)
    for number in (1, 2, 3):
        alone.train(number)
    context = list(grid.contexts.values())[1]
    personal = {k: a.numpy() for k, a in context.state["fairflower/personal"].items()}
    assert models_equal(personal, alone.send())


@pytest.mark.slow
def test_ditto_with_a_large_lambda_is_the_global_model():
    _, personal = ditto(1000.0, rounds=3, epochs=75, lr=0.002)
    last_received = global_by_hand(3, 75, 0.002)[-2]
    np.testing.assert_allclose(personal, last_received, rtol=5e-3, atol=5e-3)
    _, free = ditto(0.0, rounds=3, epochs=75, lr=0.002)
    assert np.abs(free - last_received).max() > 0.2


def test_dittos_global_model_equals_that_of_sgd():
    plain, _ = run_toy_rounds(Uniform(), lambda k: trainer("sgd", k), 3, 2)
    model, _ = run_toy_rounds(Uniform(), lambda k: trainer("ditto", k), 3, 2)
    assert models_equal(model, plain)


def test_ditto_tests_both_models_on_the_clients_test_images():
    client = trainer("ditto", data=replace(data(), test=images(40, 3)))
    before = client.test()
    assert before["personal_accuracy"] == before["accuracy"]
    received = client.send()
    client.state["personal"] = trainer("sgd", model=tiny_model(9)).send()
    after = client.test()
    assert after["accuracy"] == before["accuracy"]
    other = trainer("sgd", model=tiny_model(9), data=client.data)
    assert after["personal_accuracy"] == other.test()["accuracy"]
    assert after["personal_accuracy"] != after["accuracy"]
    assert models_equal(client.send(), received)


# --- client state -------------------------------------------------------------------


class Counting(SGD):
    """Count rounds in the client's state."""

    def end(self, server_round: int) -> None:
        n = self.state.get("rounds", {}).get("n", np.zeros((), np.int64))
        self.state = {"rounds": {"n": np.asarray(n + 1), "last": np.asarray(server_round)}}


def count(context: Context, server_round: int, run_id: str | None = "a") -> int:
    """Run one more round; return the number of rounds in the client's state."""
    client = Counting(
        nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)),
        ClientData(images(4, 0), images(4, 1), (0.5,), (0.5,), CLASSES, Augment()),
        SETTINGS,
        client_id=0,
        seed=0,
    )
    config = ConfigRecord({"server-round": server_round})
    if run_id is not None:
        config["run-id"] = run_id
    content = RecordDict({"arrays": record_of(client.send()), "config": config})
    make_client_app(lambda context, config: client)(Message(content, 1, "train"), context)
    return int(client.state["rounds"]["n"])


@pytest.mark.parametrize(
    ("rounds", "counts"),
    [
        ("1a 2a 7a", [1, 2, 3]),  # skipped rounds
        ("1a 2a 3b 4b", [1, 2, 1, 2]),  # another run
        ("1 2", [1, 2]),  # without a run id
        ("1a 2a 2a", [1, 2, 1]),  # a repeated round does not use its own state
    ],
)
def test_state_persists_over_the_rounds_of_a_run(context, rounds, counts):
    assert [count(context, int(r[0]), r[1:] or None) for r in rounds.split()] == counts


def test_state_that_the_trainer_clears_is_deleted(context):
    count(context, 1)
    assert "fairflower/rounds" in context.state
    client = trainer("sgd")
    config = ConfigRecord({"server-round": 2, "run-id": "a"})
    content = RecordDict({"arrays": record_of(client.send()), "config": config})
    app = make_client_app(lambda context, config: client)
    client.end = lambda server_round: client.state.clear()  # type: ignore[method-assign]
    app(Message(content, 1, "train"), context)
    assert not context.state.array_records
