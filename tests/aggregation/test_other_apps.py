"""Strategies in other people's apps, which choose messages and replies themselves.

Each app runs with Flower's ``FedAvg`` and with ours, in one simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as flower

from fairflower.config import RunConfig
from fairflower.engines.launch import simulate
from fairflower.strategies import FedAvg

pytestmark = pytest.mark.slow

CLIENTS = 4
NODES = {f"min_{which}_nodes": CLIENTS for which in ("train", "evaluate", "available")}


def client_app() -> ClientApp:
    """Clients add their number + 1 to ``w``, and return ``w`` alone, in float32."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        k = int(context.node_config["partition-id"])
        config, received = message.content["config"], message.content["arrays"]
        w = received["w"].numpy() if "w" in received else np.zeros(2)
        w = (w if w.shape == (2,) else np.zeros(2)).astype(np.float32) + np.float32(k + 1)
        examples = 0 if config.get("empty") and k >= CLIENTS // 2 else 10 * (k + 1)
        metrics = MetricRecord({"num-examples": examples, "train_loss": float(k)})
        content = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        k = int(context.node_config["partition-id"])
        loss = float(message.content["arrays"]["w"].numpy()[0]) + k
        metrics = MetricRecord({"num-examples": 10 * (k + 1), "eval_loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def request(kind: str, nodes: Iterable[int], arrays: ArrayRecord, config: ConfigRecord) -> Any:
    content = RecordDict({"arrays": arrays, "config": config})
    return [Message(content, node, kind) for node in nodes]


def apps(base: Any) -> dict[str, Any]:
    """Return strategies as people write them, on Flower's or on our ``FedAvg``."""

    class OwnTests(base):
        def configure_evaluate(self, server_round, arrays, config, grid):
            return request(MessageType.EVALUATE, grid.get_node_ids(), arrays, config)

    class OwnMessages(base):
        def configure_train(self, server_round, arrays, config, grid):
            nodes = sorted(grid.get_node_ids())[: server_round + 1]
            return request(MessageType.TRAIN, nodes, arrays, config)

    class OneMessage(base):
        def configure_train(self, server_round, arrays, config, grid):
            messages = super().configure_train(server_round, arrays, config, grid)
            return sorted(messages, key=lambda m: m.metadata.dst_node_id)[:1]

    class OneReply(base):
        def aggregate_train(self, server_round, replies):
            best = min(replies, key=lambda m: m.content["metrics"]["train_loss"])
            return super().aggregate_train(server_round, [best])

    class OwnLoop(base):
        def start(self, grid, initial_arrays, num_rounds=3, **options):
            result, arrays = flower.Result(), initial_arrays
            for number in range(1, num_rounds + 1):
                asked = self.configure_train(number, arrays, ConfigRecord(), grid)
                replies = grid.send_and_receive(asked)
                arrays, result.train_metrics_clientapp[number] = self.aggregate_train(
                    number, replies
                )
            result.arrays = arrays
            return result

    class Names(base):
        """Has attributes of its own, under any names."""

        def __init__(self, **options):
            self.seed, self.population, self.buffers = 7, 3, {"w": 1.0}
            super().__init__(**options)
            self.enrolled, self.participation, self.availability = set(), {}, "always"
            self.seed, self.population, self.observers, self.min_clients = 7, 3, print, 99
            self.buffers = {"w": 1.0}

        def aggregate_train(self, server_round, replies):
            assert (self.seed, self.population, self.enrolled) == (7, 3, set())
            return super().aggregate_train(server_round, replies)

    class Wrapper(flower.Strategy):
        """Hands a part of the messages and of the replies to another strategy."""

        def __init__(self, **options):
            self.inner = base(**options)

        def configure_train(self, server_round, arrays, config, grid):
            messages = self.inner.configure_train(server_round, arrays, config, grid)
            return sorted(messages, key=lambda m: m.metadata.dst_node_id)[1:]

        def aggregate_train(self, server_round, replies):
            replies = sorted(replies, key=lambda m: m.content["metrics"]["train_loss"])
            return self.inner.aggregate_train(server_round, replies[:1])

        def configure_evaluate(self, *given):
            return self.inner.configure_evaluate(*given)

        def aggregate_evaluate(self, *given):
            return self.inner.aggregate_evaluate(*given)

        def summary(self):
            pass

    return {
        kind.__name__: kind
        for kind in (base, OwnTests, OwnMessages, OneMessage, OneReply, OwnLoop, Names, Wrapper)
    }


START = {"w": np.zeros(2, np.float32)}
#: Name -> kind of app, initial arrays, train config.
CASES: dict[str, tuple[str, dict[str, np.ndarray], dict[str, bool]]] = {
    **{name: (name, START, {}) for name in apps(FedAvg)},
    "float64": ("FedAvg", {"w": np.zeros(2)}, {}),
    "placeholder": ("FedAvg", {"w": np.zeros((1, 1), np.float32)}, {}),
    "empty record": ("FedAvg", {}, {}),
    "part of the model": ("FedAvg", {**START, "frozen": np.ones(3, np.float32)}, {}),
    "clients without examples": ("FedAvg", START, {"empty": True}),
}


@pytest.fixture(scope="module")
def results(pytestconfig: pytest.Config) -> dict[str, list[flower.Result]]:
    """Run every case with Flower's FedAvg and with ours in one simulation."""
    found: dict[str, list[flower.Result]] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Context) -> None:
        for name, (kind, start, config) in CASES.items():
            for base in (flower.FedAvg, FedAvg):
                arrays = ArrayRecord({n: Array(a) for n, a in start.items()})
                strategy = apps(base)[kind](**NODES)
                given = {} if kind == "OwnLoop" else {"train_config": ConfigRecord(dict(config))}
                result = strategy.start(grid, arrays, num_rounds=2, **given)
                found.setdefault(name, []).append(result)

    engine = "flower" if pytestconfig.getoption("--nightly") else "inline"
    simulate(server, client_app(), CLIENTS, RunConfig(engine=engine))
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_app_gives_the_same_with_our_fedavg_as_with_flowers(name: str, results: Any) -> None:
    theirs, ours = results[name]
    assert list(ours.arrays) == list(theirs.arrays) == ["w"]
    wanted, got = theirs.arrays["w"].numpy(), ours.arrays["w"].numpy()
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert got.any()
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        expected, found = getattr(theirs, kind), getattr(ours, kind)
        assert found.keys() == expected.keys()
        assert found.keys() == ({1, 2} if name != "OwnLoop" or "train" in kind else set())
        for server_round, metrics in expected.items():
            assert dict(found[server_round]) == pytest.approx(dict(metrics))
