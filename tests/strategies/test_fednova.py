"""FedNova: normalized updates with and without momentum, and the step counts of clients."""

from __future__ import annotations

import numpy as np
import pytest
from toy_trainers import trainer

from fairflower.strategies import FedNova
from fairflower.testing.rounds import Rounds
from fairflower.training.measurements import train_and_measure

EXAMPLES = {0: 100, 1: 300, 2: 600}
P = np.array([0.1, 0.3, 0.6])


def one_round(moves, steps, **arguments) -> tuple[float, FedNova]:
    strategy = FedNova(**arguments)
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(3))
    after = rounds.step(
        {k: {"x": np.array([move])} for k, move in enumerate(moves)},
        EXAMPLES,
        metrics={k: {"steps": s} for k, s in enumerate(steps)},
    )
    return float(after["x"][0]), strategy


def descent(gradient: float, steps: int, momentum: float, lr: float = 0.1) -> float:
    """Return the update by SGD on a loss with a constant gradient."""
    x = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + gradient
        x -= lr * velocity
    return x


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_direction_is_the_mean_gradient_for_any_numbers_of_steps(momentum):
    gradients, steps = np.array([1.0, -2.0, 0.7]), (1, 5, 20)
    moves = [descent(g, s, momentum) for g, s in zip(gradients, steps, strict=True)]
    after, strategy = one_round(moves, steps, momentum=momentum)
    counts = np.array([-descent(1.0, s, momentum, lr=1.0) for s in steps])
    np.testing.assert_allclose(strategy.diagnostics["steps"], counts)
    assert after == pytest.approx(-0.1 * (P @ counts) * (P @ gradients), rel=1e-6)


def test_the_step_matches_a_hand_computation():
    """Steps 1, 2, 4 and updates 1, 2, 4: each moves 1 a step, and 3.1 steps are taken."""
    after, strategy = one_round((1.0, 2.0, 4.0), (1, 2, 4))
    assert after == pytest.approx(0.1 + 0.6 + 2.4)
    weights = np.array([0.1, 0.15, 0.15]) / 0.4
    np.testing.assert_allclose(strategy.diagnostics["weights"], weights)


def test_the_weight_cap_bounds_a_clients_share_of_the_step_length():
    """Of 4 a_k p_k = 1, 1, 1 and 10^6, the last may be 40 %: with three others, it is 2."""
    strategy = FedNova(max_client_weight=0.4)
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(4))
    after = rounds.step(
        {k: {"x": np.array([1.0 if k < 3 else 0.0])} for k in range(4)},
        metrics={k: {"steps": 1 if k < 3 else 1e6} for k in range(4)},
    )
    assert after["x"][0] == pytest.approx((3 + 2) / 4 * 3 / 4, rel=1e-4)


def test_equal_steps_equal_fedavg():
    assert one_round((1.0, 2.0, 4.0), (7, 7, 7))[0] == pytest.approx(P @ [1, 2, 4])


def test_steps_proportional_to_examples_give_equal_weights():
    after, strategy = one_round((3.0, 6.0, 30.0), (1, 3, 6))
    np.testing.assert_allclose(strategy.diagnostics["weights"], 1 / 3)
    assert after == pytest.approx(P @ [1, 3, 6] * P @ [3, 2, 5])


def test_a_client_without_steps_counts_as_a_zero_update():
    assert one_round((0.0, 3.0, 3.0), (0, 3, 3))[0] == pytest.approx((0.1 + 2.7) * 0.9)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(-1, "expected a number >= 0"), (2.0**54, "expected at most 9.0072e+15")],
)
def test_a_client_with_an_impossible_number_of_steps_is_dropped(steps, expected):
    strategy = FedNova(min_clients=1)
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(3))
    rounds.step(
        {k: {"x": np.ones(1)} for k in range(3)},
        metrics={k: {"steps": s} for k, s in enumerate((steps, 0, 1))},
    )
    assert strategy.dropped[0] == f"steps = {steps}: {expected}"
    assert strategy.client_ids == (1, 2)


@pytest.mark.parametrize("name", ["sgd", "ditto", "scaffold"])
def test_clients_count_the_steps_of_the_model_they_send(name):
    client = trainer(name)  # 12 images in batches of 8, one epoch
    client.receive(client.send())
    metrics, _ = train_and_measure(client, {"server-round": 1, "measure": "steps"})
    assert metrics["steps"] == 2


def test_momentum_comes_from_the_train_config():
    strategy = FedNova()
    strategy.read_config({"train.momentum": 0.9})
    assert strategy.momentum == 0.9


@pytest.mark.parametrize(
    ("config", "named"),
    [({"train.optimizer": "adam"}, "train.optimizer = 'adam'"), ({"train.momentum": 1.0}, "1.0")],
)
def test_adam_and_momentum_1_are_refused(config, named):
    with pytest.raises(ValueError, match=named):
        FedNova().read_config(config)
