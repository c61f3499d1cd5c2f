"""Exchanges, which share state beside the model: merging, checks, checkpoints, messages."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from remembering import attributes, equal
from torch.nn import functional as F
from toy_trainers import exchanges, models_equal, run_toy_rounds, trainer

from fairflower.arrays import arrays_of, record_of
from fairflower.exchanges import ControlVariates, DynamicRegularizer, Prototypes, SemanticAnchors
from fairflower.exchanges.anchors import _forward, anchor_loss, initial
from fairflower.registry import CLIENTS
from fairflower.strategies import FedAvg, FedHEAL, Uniform
from fairflower.testing.rounds import Rounds, reply

MODEL = {
    "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "norm.running_mean": np.array([0.5, -0.5], np.float32),
    "head.weight": np.linspace(-2, 2, 6, dtype=np.float32).reshape(3, 2),
    "head.bias": np.array([0.1, 0.0, -0.1], np.float32),
}


def moved(by: float) -> dict[str, np.ndarray]:
    return {name: np.full(array.shape, by, np.float32) for name, array in MODEL.items()}


def one_round(strategy, shared, clients=range(2), population=None):
    """Make a round in which client k changes the model by k + 1 and sends ``shared[k]``."""
    rounds = Rounds(strategy, MODEL, range(population or len(clients)))
    return rounds.step({k: moved(k + 1.0) for k in clients}, measured=shared)


# --- control variates ----------------------------------------------------------------------


def test_control_variates_average_changes_over_all_clients_without_weights():
    exchange = ControlVariates()
    strategy = FedAvg(min_clients=1, exchanges=[exchange])
    trained = [name for name in MODEL if "running" not in name]
    returned = {
        k: {"control": {name: np.full(MODEL[name].shape, v, np.float32) for name in trained}}
        for k, v in ((1, 1.0), (4, 5.0))
    }
    rounds = Rounds(strategy, MODEL, range(8))
    rounds.step({k: moved(0.0) for k in returned}, {1: 1, 4: 99}, measured=returned)
    assert set(exchange.c) == set(trained)
    assert all(np.all(array == 6 / 8) for array in exchange.c.values())
    rounds.step({k: moved(0.0) for k in returned}, {1: 1, 4: 99}, measured=returned)
    assert all(np.all(array == 12 / 8) for array in exchange.c.values())
    (message, *_) = rounds.ask()
    assert models_equal(arrays_of(message.content["control"]), exchange.c)


def scaffold_limit(strategy: FedAvg) -> float:
    """Train by SCAFFOLD on a_k (x - b_k)^2 / 2 with one step per round; return the last x."""
    a, b, lr = {0: 1.0, 1: 1.0, 2: 2.0}, {0: 1.0, 1: 6.0, 2: -4.0}, 0.1
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(3))
    estimates = dict.fromkeys(range(3), 0.0)
    for _ in range(400):
        x, c = float(rounds.model["x"][0]), float(strategy.exchanges[0].c.get("x", [0.0])[0])
        gradients = {k: a[k] * (x - b[k]) for k in range(3)}
        changes = {k: gradients[k] - estimates[k] for k in range(3)}
        steps = {k: {"x": np.array([-lr * (c - estimates[k] + gradients[k])])} for k in range(3)}
        measured = {k: {"control": {"x": np.array([change])}} for k, change in changes.items()}
        rounds.step(steps, {0: 10, 1: 30, 2: 60}, measured=measured)
        estimates = gradients
    return float(rounds.model["x"][0])


def test_scaffold_converges_to_the_optimum_of_the_mean_loss_with_any_weights():
    """(1 + 6 - 2 * 4) / (1 + 1 + 2) = -0.25; weighted by examples it would be -1.8125."""
    assert scaffold_limit(FedAvg(exchanges=[ControlVariates()])) == pytest.approx(-0.25, abs=1e-5)
    clipped = FedAvg(exchanges=[ControlVariates()], clip_update_median=1.0)
    assert abs(scaffold_limit(clipped) + 0.25) > 0.1


# --- FedDyn's regularizer ------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), alpha=st.floats(0.01, 10))
def test_the_regularizer_equals_h_of_feddyns_algorithm_1(seed, alpha):
    """As in the paper, with alpha; for equal weights and any participation."""
    random = np.random.default_rng(seed)
    population = int(random.integers(2, 7))
    rounds = Rounds(
        Uniform(min_clients=1, exchanges=[DynamicRegularizer()]), MODEL, range(population)
    )
    h = {name: np.zeros(array.shape) for name, array in MODEL.items()}
    for _ in range(3):
        present = random.choice(population, random.integers(1, population + 1), replace=False)
        moves = {
            int(k): {n: random.normal(size=a.shape).astype(np.float32) for n, a in MODEL.items()}
            for k in present
        }
        before = rounds.model
        after = rounds.step(moves)
        for name in MODEL:
            mean = before[name] + np.mean([move[name] for move in moves.values()], axis=0)
            if "running" in name:
                expected = mean
            else:
                h[name] -= alpha * sum(move[name] for move in moves.values()) / population
                expected = mean - h[name] / alpha
            np.testing.assert_allclose(after[name], expected, rtol=1e-4, atol=1e-4)


def test_the_regularizer_asks_for_nothing_and_sends_nothing():
    rounds = Rounds(FedAvg(exchanges=[DynamicRegularizer()]), MODEL, range(2))
    rounds.step({k: moved(1.0) for k in range(2)})
    assert set(rounds.ask()[0].content) == {"arrays", "config"}


# --- prototypes ----------------------------------------------------------------------------


def returned(mean, count) -> dict[str, dict[str, np.ndarray]]:
    return {"prototypes": {"mean": np.array(mean, np.float32), "count": np.array(count)}}


def test_prototypes_are_means_over_all_images_and_stay_for_absent_classes():
    exchange = Prototypes()
    rounds = Rounds(Uniform(min_clients=1, exchanges=[exchange]), MODEL, range(3))
    nothing = {k: moved(0.0) for k in range(2)}
    one = returned([[1, 2], [5, 5], [0, 0]], [3, 1, 0])
    two = returned([[5, 0], [0, 0], [0, 0]], [1, 0, 0])
    rounds.step(nothing, measured={0: one, 1: two})
    np.testing.assert_array_equal(exchange.mean, [[2, 1.5], [5, 5], [0, 0]])
    np.testing.assert_array_equal(exchange.count, [4, 1, 0])
    later = returned([[7, 7], [0, 0], [2, 4]], [2, 0, 1])
    rounds.step({2: moved(0.0)}, measured={2: later})
    np.testing.assert_array_equal(exchange.mean, [[7, 7], [5, 5], [2, 4]])
    np.testing.assert_array_equal(exchange.count, [2, 1, 1])
    shared = arrays_of(rounds.ask()[0].content["prototypes"])
    assert models_equal(shared, {"mean": exchange.mean, "count": exchange.count})


@given(st.integers(0, 10_000))
def test_prototypes_do_not_depend_on_the_partition_of_images(seed):
    random = np.random.default_rng(seed)
    z, y = random.normal(size=(20, 2)), random.integers(0, 3, 20)
    means = []
    for clients in (1, 4):
        owner = random.integers(0, clients, 20)
        shared = {}
        for k in range(clients):
            mine = [(owner == k) & (y == c) for c in range(3)]
            mean = [z[m].mean(0) if m.any() else np.zeros(2) for m in mine]
            shared[k] = returned(mean, [m.sum() for m in mine])
        exchange = Prototypes()
        one_round(Uniform(exchanges=[exchange]), shared, range(clients))
        means.append(exchange.mean)
    np.testing.assert_allclose(means[0], means[1], rtol=1e-4, atol=1e-5)


GOOD = np.ones((3, 2), np.float32)
COUNT = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"mean": GOOD}, "expected the arrays 'mean' and 'count'"),
        ({"mean": GOOD, "count": COUNT, "more": COUNT}, "expected the arrays"),
        ({"mean": np.ones((3, 4), np.float32), "count": COUNT}, r"\(3, 4\).*\(3, 2\)"),
        ({"mean": GOOD[0], "count": COUNT}, r"shape \(2,\)"),
        ({"mean": GOOD, "count": COUNT[:2]}, r"'count' \(2,\)"),
        ({"mean": np.full((3, 2), np.nan, np.float32), "count": COUNT}, "finite"),
        ({"mean": np.ones((3, 2), int), "count": COUNT}, "not finite 32-bit numbers"),
        ({"mean": GOOD, "count": np.array([1, -1, 2])}, "non-negative integers"),
        ({"mean": GOOD, "count": np.array([1.0, 0.5, 2.0])}, "non-negative integers"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_invalid_prototypes_drop_the_client_with_the_reason(arrays, reason, later, caplog):
    strategy = Uniform(min_clients=1, exchanges=[Prototypes()])
    rounds = Rounds(strategy, MODEL, range(2))
    good = {"prototypes": {"mean": GOOD, "count": COUNT}}
    nothing = {k: moved(0.0) for k in range(2)}
    if later:
        rounds.step(nothing, measured={0: good, 1: good})
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        rounds.step(nothing, measured={0: good, 1: {"prototypes": arrays}})
    assert strategy.client_ids == (0,)
    assert "client 1: its 'prototypes': " in caplog.text
    assert re.search(reason, caplog.text)


def test_a_client_that_sends_no_record_of_the_exchange_is_dropped():
    strategy = Uniform(min_clients=1, exchanges=[Prototypes()])
    rounds = Rounds(strategy, MODEL, range(2))
    good = {"prototypes": {"mean": GOOD, "count": COUNT}}
    messages = rounds.ask()
    values = {"num-examples": 100, "client-id": 0}
    rounds.finish(
        [
            reply(messages[0], MODEL, values, good),
            reply(messages[1], MODEL, values | {"client-id": 1}),
        ]
    )
    assert (
        "sent no ArrayRecord 'prototypes', which the exchange Prototypes needs"
        in strategy.dropped[1]
    )


# --- anchors -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    classes=st.integers(2, 6),
    d=st.integers(2, 9),
    alpha=st.floats(0, 2),
    tau=st.floats(0.05, 1),
)
def test_the_loss_and_gradient_of_anchors_equal_those_of_autograd(seed, classes, d, alpha, tau):
    random = np.random.default_rng(seed)
    parameters = initial((classes, d), 8, seed)
    parameters |= {"b1": random.normal(size=8), "b2": random.normal(size=d)}  # 0 in `initial`
    weight, bias = random.normal(size=(classes, d)), random.normal(size=classes)
    loss, gradients = anchor_loss(parameters, weight, bias, alpha, tau)
    leaves = {name: torch.tensor(v, requires_grad=True) for name, v in parameters.items()}
    hidden = F.relu(leaves["R"] @ leaves["W1"] + leaves["b1"])
    anchors = F.normalize(hidden @ leaves["W2"] + leaves["b2"])
    logits = anchors @ torch.tensor(weight).T + torch.tensor(bias)
    total = F.cross_entropy(logits, torch.arange(classes))
    for i in range(classes):
        others = [torch.exp(anchors[i] @ anchors[j] / tau) for j in range(classes) if j != i]
        total = total + alpha * torch.stack(others).mean().log() / classes
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-8)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        np.testing.assert_allclose(gradients[name], leaf.grad, rtol=1e-6, atol=1e-9)


def test_anchors_are_unit_vectors_classified_by_the_head_and_separated_by_alpha():
    random = np.random.default_rng(0)
    weight = random.normal(size=(5, 12)).astype(np.float32)
    model = {"head.weight": weight, "head.bias": random.normal(size=5).astype(np.float32)}
    closest = {}
    for alpha in (0.0, 1.0):
        exchange = SemanticAnchors(alpha=alpha)
        Rounds(Uniform(exchanges=[exchange]), model, range(1)).step(
            {0: {name: np.zeros_like(array) for name, array in model.items()}}
        )
        anchors = exchange.anchors
        assert anchors is not None
        np.testing.assert_allclose(np.linalg.norm(anchors, axis=1), 1, rtol=1e-5)
        logits = anchors @ weight.T + model["head.bias"]
        assert logits.argmax(1).tolist() == list(range(5))
        closest[alpha] = (anchors @ anchors.T - 9 * np.eye(5)).max()
    assert closest[1.0] < closest[0.0]
    assert closest[1.0] < 0


def test_anchors_continue_training_from_round_to_round():
    weight, bias = MODEL["head.weight"].astype(float), MODEL["head.bias"].astype(float)
    whole, halves = SemanticAnchors(epochs=40), SemanticAnchors(epochs=20)
    still = {0: moved(0.0)}
    Rounds(Uniform(exchanges=[whole]), MODEL, range(1)).step(still)
    rounds = Rounds(Uniform(exchanges=[halves]), MODEL, range(1))
    rounds.step(still)
    first = halves.anchors
    rounds.step(still)
    np.testing.assert_allclose(halves.anchors, whole.anchors, rtol=1e-6)
    assert not np.allclose(first, halves.anchors)
    start = anchor_loss(initial((3, 2), 64, 0), weight, bias, 0.02, 0.1)[0]
    assert anchor_loss(halves.parameters, weight, bias, 0.02, 0.1)[0] < start
    assert np.allclose(_forward(halves.parameters)["A"], halves.anchors, atol=1e-6)


def test_the_seed_of_the_run_determines_the_anchors():
    def anchors(seed):
        exchange = SemanticAnchors(epochs=1)
        strategy = Uniform(exchanges=[exchange])
        rounds = Rounds(strategy, MODEL, range(1))
        strategy.enroll({0: 1000}, seed)
        rounds.step({0: moved(0.0)})
        return exchange.anchors

    assert np.array_equal(anchors(1), anchors(1))
    assert not np.array_equal(anchors(1), anchors(2))


def test_a_head_without_bias_has_the_anchors_of_a_head_with_zero_bias():
    def anchors(model):
        exchange = SemanticAnchors(head="fc", epochs=5)
        rounds = Rounds(Uniform(exchanges=[exchange]), model, range(1))
        rounds.step({0: {name: np.zeros_like(array) for name, array in model.items()}})
        return exchange.anchors

    weight = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    zero = {"fc.weight": weight, "fc.bias": np.zeros(3, np.float32)}
    np.testing.assert_array_equal(anchors({"fc.weight": weight}), anchors(zero))


def test_a_model_without_the_named_head_is_refused_with_advice():
    rounds = Rounds(Uniform(exchanges=[SemanticAnchors(head="fc")]), MODEL, range(1))
    with pytest.raises(ValueError, match=r"'fc\.weight'.*SemanticAnchors\(head=\.\.\.\)"):
        rounds.step({0: moved(0.0)})


# --- all exchanges -------------------------------------------------------------------------

with_exchange = pytest.mark.parametrize(
    "name", [name for name, method in CLIENTS.items() if method.exchanges]
)


def test_names_of_exchanges_are_unique():
    kinds = {kind for method in CLIENTS.values() for kind in method.exchanges}
    assert len({kind.name for kind in kinds}) == len(kinds)


@pytest.mark.few(3)
@with_exchange
def test_a_restored_exchange_gives_the_model_of_an_uninterrupted_run(name):
    def make():
        return FedHEAL(exchanges=exchanges(name))

    def clients(k):
        return trainer(name, k)

    uninterrupted = make()
    whole, _ = run_toy_rounds(uninterrupted, clients, 3, 3)

    strategy = make()
    half, grid = run_toy_rounds(strategy, clients, 3, 2)
    resumed = make()
    resumed.load_state_dict(strategy.state_dict())
    resumed.enroll(dict(enumerate(grid.get_node_ids())), seed=0)
    config = ConfigRecord({"run-id": "toy"})
    messages = list(resumed.configure_train(3, record_of(half), config, grid))
    merged, _ = resumed.aggregate_train(3, grid.send_and_receive(messages))
    assert merged is not None
    assert models_equal(arrays_of(merged), whole)
    for one, two in zip(uninterrupted.exchanges, resumed.exchanges, strict=True):
        assert equal(attributes(one), attributes(two))


@with_exchange
def test_the_order_of_replies_does_not_change_an_exchange(name):
    states = []
    for reverse in (False, True):
        strategy = Uniform(exchanges=exchanges(name))
        run_toy_rounds(strategy, lambda k: trainer(name, k), 3, 2, reverse=reverse)
        states.append(strategy.state_dict())
    assert models_equal(*states)


@pytest.mark.parametrize(
    "arguments", [{"epochs": -1}, {"hidden": 0}, {"lr": 0.0}, {"lr": np.nan}, {"lr": np.inf}]
)
def test_invalid_arguments_of_anchors_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match="expected epochs >= 0"):
        SemanticAnchors(**arguments)
