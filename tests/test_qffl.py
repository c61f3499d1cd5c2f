"""q-FFL against its authors' numbers and Flower's own q-FedAvg."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Rounds, record, reply, unpack
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import QFedAvg
from hypothesis import given
from hypothesis import strategies as st

from fairflower.strategies import QFFL

W, LOCALS, LOSSES = np.array([0.0, 1.0]), ([0.1, 0.8], [-0.2, 1.1]), (2.0, 0.5)
GOLDEN = {
    0: (-0.05, 0.95),
    0.5: (0.0, 0.92),
    1: (0.02857143, 0.9),
    2: (0.05185185, 0.88518519),
}


def step(rounds: Rounds, updates, losses, examples=None) -> dict[str, np.ndarray]:
    return rounds.step(
        dict(enumerate(updates)),
        examples or {k: 10**k for k in range(len(losses))},
        metrics={k: {"received_loss": loss, "train_loss": 99.0} for k, loss in enumerate(losses)},
    )


@pytest.mark.parametrize("q", GOLDEN)
def test_the_authors_numbers(q):
    rounds = Rounds(QFFL(q=q, lr=0.1), {"x": W}, range(2))
    after = step(rounds, [{"x": np.array(local) - W} for local in LOCALS], LOSSES)
    np.testing.assert_allclose(after["x"], GOLDEN[q], atol=1e-8)


@pytest.mark.parametrize(("q", "lr"), [(0.1, 0.5), (1, 0.01), (3, 0.1)])
def test_flowers_own_strategy_does_the_same_without_batchnorm(q, lr):
    random, clients = np.random.default_rng(3), 3
    model = {"a": random.normal(size=(2, 3)), "b": random.normal(size=4)}
    updates = [
        {name: random.normal(size=array.shape) for name, array in model.items()}
        for _ in range(clients)
    ]
    losses = random.uniform(0.01, 5, clients).tolist()
    rounds = Rounds(QFFL(q=q, lr=lr), model, range(clients))
    found = step(rounds, updates, losses)

    theirs = QFedAvg(client_learning_rate=lr, q=q)
    theirs.current_arrays = record(model)
    asked = rounds.ask()
    replies = [
        reply(
            asked[k],
            {name: model[name] + move for name, move in update.items()},
            {"num-examples": 1, "train_loss": loss},
        )
        for k, (update, loss) in enumerate(zip(updates, losses, strict=True))
    ]
    merged, _ = theirs.aggregate_train(1, replies)
    assert merged is not None
    for name, array in unpack(merged).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-8)


def by_formula(x, locals_, losses, q, lr):
    F = np.array(losses) + 1e-10
    deltas = [f**q * (x - local) / lr for f, local in zip(F, locals_, strict=True)]
    h = [
        q * f ** (q - 1) * (((x - local) / lr) ** 2).sum() + f**q / lr
        for f, local in zip(F, locals_, strict=True)
    ]
    return x - sum(deltas) / sum(h)


BATCHNORM = {
    "first.weight": np.array([1.0, 2.0]),
    "bn.weight": np.array([1.0]),
    "bn.running_mean": np.array([0.0]),
    "bn.running_var": np.array([1.0]),
    "bn.num_batches_tracked": np.array(5, np.int64),
    "last.weight": np.array([3.0, 4.0]),
}


def test_batchnorm_statistics_are_averaged_and_every_parameter_gets_its_own_step():
    moves = [
        {"first.weight": [0.1, 0.2], "bn.weight": [0.3], "last.weight": [-0.4, 0.5]},
        {"first.weight": [-0.2, 0.0], "bn.weight": [0.1], "last.weight": [0.6, -0.1]},
    ]
    statistics = [
        {"bn.running_mean": [9.0], "bn.running_var": [-0.9], "bn.num_batches_tracked": 7},
        {"bn.running_mean": [-3.0], "bn.running_var": [4.0], "bn.num_batches_tracked": 7},
    ]
    updates = [
        {name: np.array(value) for name, value in (move | rest).items()}
        for move, rest in zip(moves, statistics, strict=True)
    ]
    rounds = Rounds(QFFL(q=2, lr=0.1), BATCHNORM, range(2))
    after = step(rounds, updates, LOSSES)

    names = list(moves[0])
    flat = np.concatenate([BATCHNORM[name] for name in names])
    locals_ = [flat + np.concatenate([move[name] for name in names]) for move in moves]
    expected = by_formula(flat, locals_, LOSSES, 2, 0.1)
    np.testing.assert_allclose(np.concatenate([after[name] for name in names]), expected)

    w = np.array(LOSSES) ** 2 / (np.array(LOSSES) ** 2).sum()
    np.testing.assert_allclose(after["bn.running_mean"], w @ [9, -3])
    np.testing.assert_allclose(after["bn.running_var"], 1 + w @ [-0.9, 4])
    assert after["bn.num_batches_tracked"] == 12


@given(st.integers(0, 10_000), st.floats(0, 5), st.floats(1e-3, 1))
def test_the_step_is_that_of_the_formula(seed, q, lr):
    random = np.random.default_rng(seed)
    x, updates, losses = random.normal(size=3), random.normal(size=(4, 3)), random.exponential(1, 4)
    after = step(Rounds(QFFL(q=q, lr=lr), {"x": x}, range(4)), [{"x": u} for u in updates], losses)
    np.testing.assert_allclose(after["x"], by_formula(x, x + updates, losses, q, lr), atol=1e-9)


@given(st.integers(0, 10_000), st.floats(0.001, 10))
def test_the_step_never_leaves_the_clients_hull_with_the_received_model(seed, q):
    random = np.random.default_rng(seed)
    rounds = Rounds(QFFL(q=q, lr=0.5), {"x": np.zeros(3)}, range(4))
    step(rounds, [{"x": random.normal(size=3)} for _ in range(4)], random.exponential(1, 4))
    coefficients = rounds.strategy.diagnostics["coefficients"]
    assert coefficients.min() >= 0
    assert coefficients.sum() <= 1 + 1e-12


@pytest.mark.parametrize("rule", ["qfedavg", "weights"])
def test_q_0_is_the_plain_mean(rule):
    rounds = Rounds(QFFL(q=0, rule=rule), {"x": np.zeros(2)}, range(3))
    updates = [np.array(v, float) for v in ([1, 2], [3, -4], [5, 0])]
    after = step(rounds, [{"x": u} for u in updates], (0.0, 2.0, 9.0))
    np.testing.assert_allclose(after["x"], np.mean(updates, axis=0))


def test_the_weight_rule_is_the_mean_by_losses_to_the_power_q():
    rounds = Rounds(QFFL(q=2, rule="weights"), {"x": np.zeros(1)}, range(3))
    after = step(rounds, [{"x": np.array([v])} for v in (1.0, 2.0, 3.0)], (0.5, 1.0, 2.0))
    np.testing.assert_allclose(after["x"], (0.25 * 1 + 1 * 2 + 4 * 3) / 5.25)


def test_losses_of_zero_and_a_large_q_stay_finite():
    for q in (0.5, 1, 300):
        rounds = Rounds(QFFL(q=q, lr=0.1), {"x": np.zeros(1)}, range(2))
        after = step(rounds, [{"x": np.array([1.0])}, {"x": np.array([2.0])}], (0.0, 0.0))
        assert 0 <= after["x"][0] <= 2


def test_the_learning_rate_comes_from_the_config_that_the_clients_get():
    sent, given_ = (Rounds(strategy, {"x": W}, range(2)) for strategy in (QFFL(), QFFL(lr=0.05)))
    updates = [{"x": np.array(local) - W} for local in LOCALS]
    one, other = step(sent, updates, LOSSES), step(given_, updates, LOSSES)
    np.testing.assert_array_equal(one["x"], other["x"])
    assert sent.strategy.lr == 0.05


def test_an_app_that_sends_no_learning_rate_is_told_to_give_it():
    rounds = Rounds(QFFL(), {"x": W}, range(1))
    (message,) = rounds.strategy.configure_train(1, record({"x": W}), ConfigRecord(), None)
    answer = reply(message, {"x": W}, {"num-examples": 1, "received_loss": 1.0})
    with pytest.raises(ValueError, match=r"train.lr.*QFFL\(lr="):
        rounds.strategy.aggregate_train(1, [answer])


@pytest.mark.parametrize("bad", [{"q": -1}, {"q": np.inf}, {"lr": 0}, {"rule": "sgd"}])
def test_arguments_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        QFFL(**bad)
