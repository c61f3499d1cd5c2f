"""Server optimizers against Flower's strategies, and what they leave as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from hypothesis import given
from hypothesis import strategies as st
from replies import error_reply

from fairflower.aggregation.noise import NoisySum
from fairflower.arrays import arrays_of, record_of
from fairflower.errors import ConfigError, RoundFailed
from fairflower.exchanges import DynamicRegularizer, ServerOptimizer
from fairflower.strategies import FedAvg, Uniform
from fairflower.testing.rounds import MODEL, Rounds, reply, updates

NETWORK = {
    "conv.weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "head.bias": np.zeros(2, np.float32),
    "scale": np.ones((), np.float32),
}

#: Name and arguments of an optimizer -> Flower's strategy of the same name and arguments.
FLOWERS: dict[str, tuple[dict[str, float], type, dict[str, float]]] = {
    "sgd": ({"lr": 0.7}, flower.FedAvgM, {"server_learning_rate": 0.7}),
    "momentum": ({}, flower.FedAvgM, {"server_momentum": 0.9}),
    "adam": ({}, flower.FedAdam, {}),
    "yogi": ({}, flower.FedYogi, {}),
    "adagrad": ({}, flower.FedAdagrad, {}),
}
OTHERS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "momentum": (
        {"lr": 0.4, "momentum": 0.7},
        {"server_learning_rate": 0.4, "server_momentum": 0.7},
    ),
    "adam": (
        {"lr": 0.02, "momentum": 0.5, "beta_2": 0.9, "tau": 0.1},
        {"eta": 0.02, "beta_1": 0.5, "beta_2": 0.9, "tau": 0.1},
    ),
    "yogi": (
        {"lr": 0.03, "momentum": 0.8, "beta_2": 0.95, "tau": 0.01},
        {"eta": 0.03, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01},
    ),
    "adagrad": ({"lr": 0.3, "tau": 0.02}, {"eta": 0.3, "tau": 0.02}),
}
CASES = [
    *((name, ours, kind, theirs) for name, (ours, kind, theirs) in FLOWERS.items()),
    *((name, ours, FLOWERS[name][1], theirs) for name, (ours, theirs) in OTHERS.items()),
]


def moves(random: np.random.Generator, clients: int = 3) -> dict[int, dict[str, Any]]:
    return {
        k: {n: 0.1 * random.normal(size=a.shape).astype(a.dtype) for n, a in NETWORK.items()}
        for k in range(clients)
    }


@pytest.mark.parametrize("name", FLOWERS)
def test_single_precision_differs_from_flowers_strategies_by_rounding(name):
    _, kind, theirs = FLOWERS[name]
    compare(name, FLOWERS[name][0], kind(**theirs), np.float32, 1e-5)


@pytest.mark.parametrize(("name", "ours", "kind", "theirs"), CASES)
def test_with_fedavg_they_equal_flowers_strategies(name, ours, kind, theirs):
    compare(name, ours, kind(**theirs), np.float64, 1e-9)


def compare(name: str, ours: dict[str, float], strategy: Any, dtype: Any, tolerance: float) -> None:
    """Train ten rounds with a server optimizer and with Flower's strategy."""
    random = np.random.default_rng(3)
    start = {key: array.astype(dtype) for key, array in NETWORK.items()}
    rounds = Rounds(FedAvg(exchanges=[ServerOptimizer(optimizer=name, **ours)]), start, range(3))
    expected = dict(start)
    examples = {0: 10, 1: 30, 2: 5}
    nodes = type("Grid", (), {"get_node_ids": lambda self: [1000, 1001, 1002]})()
    for server_round in range(1, 11):
        asked = strategy.configure_train(server_round, record_of(expected), ConfigRecord(), nodes)
        steps, replies = moves(random), []
        for message in asked:
            k = message.metadata.dst_node_id - 1000
            arrays = {n: (a + steps[k][n]).astype(dtype) for n, a in expected.items()}
            replies.append(reply(message, arrays, {"num-examples": examples[k]}))
        expected = arrays_of(strategy.aggregate_train(server_round, replies)[0])
        model = rounds.step(steps, examples)
        for key, array in expected.items():
            assert model[key].dtype == dtype
            np.testing.assert_allclose(model[key], array, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FLOWERS)
def test_statistics_and_counters_take_the_merged_values(name):
    random = np.random.default_rng(5)
    plain = Rounds(FedAvg(), MODEL, range(3))
    stepped = Rounds(FedAvg(exchanges=[ServerOptimizer(optimizer=name, lr=0.5)]), MODEL, range(3))
    for _ in range(2):
        steps = updates(random, range(3))
        expected, model = plain.step(steps), stepped.step(steps)
        for key in ("bn.running_mean", "bn.num_batches_tracked"):
            np.testing.assert_array_equal(model[key], expected[key])
        assert not np.allclose(model["conv.weight"], expected["conv.weight"])


@given(st.floats(0.01, 3), st.integers(0, 100))
def test_plain_steps_scale_the_merged_update(lr, seed):
    steps = updates(np.random.default_rng(seed), range(2))
    optimizer = ServerOptimizer(optimizer="sgd", lr=lr)
    model = Rounds(Uniform(exchanges=[optimizer]), MODEL, range(2)).step(steps)
    mean = (steps[0]["conv.weight"] + steps[1]["conv.weight"]) / 2
    np.testing.assert_allclose(model["conv.weight"], MODEL["conv.weight"] + lr * mean, atol=1e-5)


def test_the_correction_of_another_exchange_is_part_of_the_pseudo_gradient():
    """FedDyn's model is its mean plus a sum H of the means' updates; half of that step is taken."""
    exchanges = [DynamicRegularizer(), ServerOptimizer(optimizer="sgd", lr=0.5)]
    rounds = Rounds(Uniform(exchanges=exchanges), {"w": np.zeros(1)}, range(2))
    assert (
        rounds.step({key: {"w": np.ones(1)} for key in range(2)})["w"] == 1.0
    )  # 0.5 (1 + H), H = 1
    assert rounds.step({key: {"w": np.ones(1)} for key in range(2)})["w"] == 2.5  # H = 2


def test_noise_for_privacy_is_added_before_the_step():
    """So the step is computed from what is released anyway."""
    steps = {key: {"w": np.full(5, 0.1)} for key in range(2)}
    models = []
    for optimizer in ([], [ServerOptimizer(optimizer="sgd", lr=0.5)]):
        noise = NoisySum(1.0, clip=1.0, max_weight=1.0, noise_seed=1)
        rounds = Rounds(Uniform(exchanges=[noise, *optimizer]), {"w": np.zeros(5)}, range(2))
        models.append(rounds.step(steps)["w"])
    np.testing.assert_allclose(models[1], models[0] / 2)


def test_a_failed_round_is_no_step():
    """The bias correction of adam counts steps, not rounds."""
    steady, failing = (
        Rounds(Uniform(exchanges=[ServerOptimizer(optimizer="adam")]), NETWORK, range(3))
        for _ in range(2)
    )
    random = np.random.default_rng(1)
    first, second = moves(random), moves(random)
    steady.step(first)
    failing.step(first)
    replies = [error_reply(message, "boom") for message in failing.ask()]
    with pytest.raises(RoundFailed):
        failing.finish(replies)
    expected, model = steady.step(second), failing.step(second)
    assert all(expected[key].tobytes() == model[key].tobytes() for key in NETWORK)


@pytest.mark.parametrize("name", FLOWERS)
def test_a_restored_optimizer_takes_the_same_steps(name):
    def start() -> Rounds:
        exchanges = [ServerOptimizer(optimizer=name)]
        return Rounds(FedAvg(exchanges=exchanges, min_clients=1), NETWORK, range(3))

    random = np.random.default_rng(2)
    steady, stopped = start(), start()
    for clients in (3, 2, 1, 3):  # some clients are absent
        resumed = start()
        resumed.model, resumed.round = stopped.model, stopped.round
        resumed.strategy.load_state_dict(stopped.strategy.state_dict())
        stopped, steps = resumed, moves(random, clients)
        expected, model = steady.step(steps), stopped.step(steps)
        assert all(expected[key].tobytes() == model[key].tobytes() for key in NETWORK)


def test_the_state_before_a_step_stays_as_it_was():
    """Secure aggregation goes back to it if it has no sum."""
    rounds = Rounds(FedAvg(exchanges=[ServerOptimizer(optimizer="yogi")]), NETWORK, range(2))
    rounds.step(moves(np.random.default_rng(1), 2))
    state = rounds.strategy.state_dict()
    copied = {name: np.array(array) for name, array in state.items()}
    rounds.step(moves(np.random.default_rng(2), 2))
    assert all(np.array_equal(state[name], array) for name, array in copied.items())


def test_half_precision_keeps_its_type_and_small_squares():
    optimizer = ServerOptimizer(optimizer="adam")
    start = {"w": np.ones(3, np.float16)}
    rounds = Rounds(FedAvg(exchanges=[optimizer]), start, range(2))
    tiny = {key: {"w": np.full(3, 0.001)} for key in range(2)}  # its square underflows in float16
    assert rounds.step(tiny)["w"].dtype == np.float16
    assert optimizer.v["w"].min() > 0


def test_flowers_privacy_wrappers_refuse_it():
    """Their noise covers a mean of clipped models, but not what is computed from it first."""
    strategy = FedAvg(exchanges=[ServerOptimizer(optimizer="adam")], min_available_nodes=1)
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 1.0, 2)
    nodes = type("Grid", (), {"get_node_ids": lambda self: [1, 2]})()
    with pytest.raises(ValueError, match="after ServerOptimizer has used it"):
        wrapped.configure_train(1, record_of(NETWORK), ConfigRecord(), nodes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "rmsprop"}, "optimizer = 'rmsprop': expected sgd or momentum or adam"),
        ({"optimizer": "adam", "momentum": 1.0}, r"momentum = 1.0: expected a number in \[0"),
        ({"optimizer": "adam", "tau": 0.0}, "tau = 0.0: expected a number above 0"),
        ({"optimizer": "adam", "lr": -1.0}, "lr = -1.0: expected a number >= 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ServerOptimizer(**arguments)
