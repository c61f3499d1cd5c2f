"""Strategies that need a number from clients, in an app with clients without fairflower."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fairflower.arrays import arrays_of, record_of
from fairflower.strategies import QFFL, STRATEGIES, FairStrategy

CLIENTS, ROUNDS = 3, 4
MODEL = {"w": np.zeros(2, np.float32)}
TARGETS = np.array([[1.0, 0.0], [0.0, 1.0], [3.0, 3.0]])

#: Strategies whose measurements are numbers only.
NUMERIC = [
    name
    for name, strategy in STRATEGIES.items()
    if strategy().measurements and not strategy()._array_measurements
]

#: Strategies that also equalize the losses: for three gradients in a plane they take no step.
NO_STEP = {"adafed", "fedmdfg", "fedlf"}

foreign = ClientApp()


@foreign.train()
def train(message: Message, context: Context) -> Message:
    """Take a gradient step to the client's target, and send the metrics that were asked for."""
    measure = str(message.content["config"].get("measure", ""))
    k = int(context.node_config["partition-id"])
    w = message.content["arrays"]["w"].numpy()
    new = (w - 0.4 * (w - TARGETS[k])).astype(np.float32)
    loss = {"received": ((w - TARGETS[k]) ** 2).sum(), "trained": ((new - TARGETS[k]) ** 2).sum()}
    metrics = {"num-examples": 10 * (k + 1)}
    for name in filter(None, measure.split(",")):
        when = "trained" if name.startswith("trained") else "received"
        metrics[name] = float(
            np.exp(-loss[when]) if name.endswith(("accuracy", "score")) else loss[when]
        )
    arrays = ArrayRecord({"w": Array(new)})
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=message
    )


class Nodes:
    """The part of a grid that sampling needs."""

    def get_node_ids(self) -> list[int]:
        return [11, 12, 13]


def run(strategy: FairStrategy) -> np.ndarray:
    """Return the model after ``ROUNDS`` rounds of a strategy with these clients."""
    arrays = record_of(MODEL)
    contexts = {
        11 + k: Context(1, 11 + k, {"partition-id": k}, RecordDict(), {}) for k in range(CLIENTS)
    }
    for server_round in range(1, ROUNDS + 1):
        messages = list(strategy.configure_train(server_round, arrays, ConfigRecord(), Nodes()))  # type: ignore[arg-type]
        replies = []
        for i, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"{server_round}-{i}"
            replies.append(foreign(message, contexts[message.metadata.dst_node_id]))
        merged, _ = strategy.aggregate_train(server_round, replies)
        assert merged is not None
        arrays = merged
    return arrays_of(arrays)["w"]


@pytest.mark.parametrize("name", NUMERIC)
def test_numeric_strategies_only_need_clients_that_send_metrics(name: str) -> None:
    given = {"lr": ("qffl", "dq-ffl"), "rounds": ("fedga", "fedism+")}
    values = {"lr": 0.4, "rounds": ROUNDS}
    arguments = {key: values[key] for key, names in given.items() if name in names}
    strategy = STRATEGIES[name](**arguments)
    w = run(strategy)
    assert strategy.client_ids == (11, 12, 13)
    assert not strategy.dropped
    assert strategy.diagnostics["weights"].sum() == pytest.approx(1)
    if name not in NO_STEP:
        assert (w > 0.1).all()
    assert (w < 3).all()


def test_seven_known_strategies_are_numeric() -> None:
    assert {"fedism", "afl", "qffl", "fairfed", "fedce", "fedga", "term"} <= set(NUMERIC)


@pytest.mark.parametrize("name", ["fedism", "afl", "qffl", "fedga", "term"])
def test_fair_strategies_lower_the_loss_of_the_worst_client(name: str) -> None:
    """Client 2's target is far from the others; its loss is lower than without fairness."""

    def loss(strategy: FairStrategy) -> float:
        return float(((run(strategy) - TARGETS[2]) ** 2).sum())

    arguments = {
        "fedism": {"q": 1.0},
        "afl": {"lr": 0.1},
        "qffl": {"q": 2.0, "rule": "weights"},
        "fedga": {"step": 0.2, "rounds": 1000},
        "term": {"t": 1.0},
    }[name]
    neutral = STRATEGIES["fedavg" if name == "term" else "uniform"]()
    assert loss(STRATEGIES[name](**arguments)) < 0.95 * loss(neutral)


def test_qffl_without_a_learning_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"QFFL\(lr="):
        run(QFFL())
