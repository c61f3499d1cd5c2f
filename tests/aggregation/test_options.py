"""Options of every strategy, as a user's Flower app passes them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fairflower.arrays import arrays_of, record_of
from fairflower.clients.scaffold import SCAFFOLD
from fairflower.engines.inline import FIRST_NODE, InlineGrid
from fairflower.errors import ConfigError, RoundFailed
from fairflower.exchanges import ControlVariates
from fairflower.participation.policies import PowerOfChoice, RoundRobin
from fairflower.strategies import FedAvg, FedEquilibria, FedGA, FedHEAL
from fairflower.testing.federations import SETTINGS, data, run_toy_rounds, tiny_model

MODEL = {
    "w": np.zeros(3, np.float32),
    "frozen": np.ones(2, np.float32),
    "norm.running_mean": np.zeros(2, np.float32),
    "norm.num_batches_tracked": np.zeros((), np.int64),
}


def grid(reply: Callable[[Message, int], dict[str, Any]], clients: int = 6) -> InlineGrid:
    """Return the nodes of a Flower app that replies to training with the given records."""
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        return Message(RecordDict(reply(message, number)), reply_to=message)

    @app.evaluate()
    def test(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1, "eval_loss": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return InlineGrid(app, clients, raise_errors=True)


def plain(message: Message, client: int) -> dict[str, Any]:
    metrics = {"num-examples": client + 1, "train_loss": 1.0 + client}
    return {"arrays": message.content["arrays"], "metrics": MetricRecord(metrics)}


def rounds(strategy: Any, nodes: InlineGrid, number: int) -> list[list[int]]:
    """Train; return the indices of the nodes that were asked in each round."""
    asked = []
    push = nodes.push_messages

    def noted(messages: Any) -> Any:
        messages = list(messages)
        trained = [m for m in messages if m.metadata.message_type == MessageType.TRAIN]
        asked.append([m.metadata.dst_node_id - FIRST_NODE for m in trained])
        return push(messages)

    nodes.push_messages = noted  # type: ignore[method-assign]
    strategy.start(nodes, record_of(MODEL), num_rounds=number)
    return [sorted(places) for places in asked if places]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("fraction_train", 1.5),
        ("fraction_train", "0.5"),
        ("fraction_evaluate", -0.1),
        ("min_available_nodes", 2.5),
        ("min_train_nodes", True),
        ("min_clients", "2"),
        ("min_clients", 0),
        ("max_client_weight", "0.5"),
        ("max_client_weight", 0),
        ("clip_update_norm", "1"),
        ("clip_update_median", float("nan")),
        ("exchanges", 1),
        ("exchanges", [ControlVariates]),
        ("observers", print),
        ("participation", "round-robin"),
        ("availability", [0, 1]),
        ("buffers", "norm.running_mean"),
    ],
)
def test_a_wrong_option_is_named_in_the_error(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{option} = .*: expected "):
        FedAvg(**{option: value})


def test_given_buffers_are_added_to_the_detected_ones() -> None:
    detected = {"norm.running_mean", "norm.num_batches_tracked"}
    assert FedAvg().buffers_of(MODEL) == detected
    assert FedAvg(buffers=["frozen"]).buffers_of(MODEL) == detected | {"frozen"}
    with pytest.raises(ConfigError, match=r"buffers: the model has no array 'frosen'"):
        FedAvg(buffers=["frosen"]).buffers_of(MODEL)


def test_a_frozen_array_without_a_fisher_diagonal_must_be_a_buffer() -> None:
    pytest.importorskip("cvxpy")

    def reply(message: Message, client: int) -> dict[str, Any]:
        fisher = {"w": np.full(3, 1.0 + client, np.float32)}
        return {**plain(message, client), "fisher": record_of(fisher)}

    with pytest.raises(RoundFailed, match=r"If 'frozen' is not trained, add it to .*buffers="):
        FedEquilibria().start(grid(reply), record_of(MODEL), num_rounds=1)
    FedEquilibria(buffers=["frozen"]).start(grid(reply), record_of(MODEL), num_rounds=1)


def test_a_participation_policy_works_in_a_users_app() -> None:
    asked = rounds(FedHEAL(participation=RoundRobin(), fraction_train=1 / 3), grid(plain), 3)
    assert sorted(node for places in asked for node in places) == list(range(6))


def test_a_policy_sees_losses_by_client_id_in_a_users_app() -> None:
    """After round 1 each node is known by its client's id, 100 and more here.

    Replies to tests have no ``client-id`` and do not change that.
    """

    def reply(message: Message, client: int) -> dict[str, Any]:
        answer = plain(message, client)
        answer["metrics"]["client-id"] = 100 + client
        return answer

    policy = PowerOfChoice(loss="train", d=6)
    asked = rounds(FedAvg(participation=policy, fraction_train=0.5), grid(reply), 3)
    assert sorted([*asked[0], *asked[1]]) == list(range(6))  # unknown losses come first
    assert asked[2] == [3, 4, 5]  # then the largest
    assert set(policy.train_losses) == {100, 101, 102, 103, 104, 105}


def test_availability_works_in_a_users_app() -> None:
    def odd(server_round: int, clients: Any) -> list[int]:
        return [client for client in clients if client % 2]

    asked = rounds(FedAvg(availability=odd), grid(plain), 2)
    assert asked == [[1, 3, 5]] * 2


def test_the_first_round_waits_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight nodes are connected when the first round begins."""
    monkeypatch.setattr("fairflower.aggregation.messages.time.sleep", lambda seconds: None)
    connected = iter([[1, 2], [1, 2, 3, 4, 5]])
    late = SimpleNamespace(get_node_ids=lambda: next(connected, list(range(1, 9))))
    strategy = FedHEAL(min_available_nodes=8)
    asked = strategy.configure_train(1, record_of(MODEL), ConfigRecord(), late)  # type: ignore[arg-type]
    assert sorted(m.metadata.dst_node_id for m in asked) == list(range(1, 9))
    assert strategy._request(MessageType.TRAIN, 1).population == 8


def test_list_metrics_are_averaged_elementwise() -> None:
    """Metrics with unprintable names are left out, numbers as well as lists."""

    def reply(message: Message, client: int) -> dict[str, Any]:
        answer = plain(message, client)
        answer["metrics"]["per_class"] = [float(client), 1.0]
        answer["metrics"]["ragged"] = [0.0] * (client + 1)
        answer["metrics"]["a\nb"] = 1.0
        answer["metrics"]["\x1b[31m"] = [1.0, 2.0]
        return answer

    result = FedAvg().start(grid(reply, 3), record_of(MODEL), num_rounds=1)
    (metrics,) = result.train_metrics_clientapp.values()
    mean = (1 * 0 + 2 * 1 + 3 * 2) / 6
    assert metrics["per_class"] == pytest.approx([mean, 1.0])
    assert metrics["train_loss"] == pytest.approx(1 + mean)
    assert set(metrics) == {"per_class", "train_loss"}


def test_start_passes_the_number_of_rounds_unless_configured() -> None:
    strategy = FedGA()

    def reply(message: Message, client: int) -> dict[str, Any]:
        answer = plain(message, client)
        answer["metrics"].update({"received_loss": 1.0 + client, "trained_loss": 1.0})
        return answer

    strategy.start(grid(reply), record_of(MODEL), num_rounds=2)
    assert strategy.rounds == 2
    given = FedGA()
    config = ConfigRecord({"num-server-rounds": 9})
    given.start(grid(reply), record_of(MODEL), num_rounds=1, train_config=config)
    assert given.rounds == 9


@pytest.mark.parametrize("exchanges", [(), (ControlVariates(),)])
def test_arrays_that_nothing_reads_cause_a_warning(
    exchanges: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """SCAFFOLD without its exchange trains, but with corrections that cancel its steps."""

    def make(client: int) -> SCAFFOLD:
        return SCAFFOLD(tiny_model(), data(client), SETTINGS, client_id=client, seed=0)

    with caplog.at_level(logging.WARNING, "flwr"):
        run_toy_rounds(FedAvg(exchanges=exchanges), make, clients=2, rounds=2)
    warnings = [r.getMessage() for r in caplog.records if "'control'" in r.getMessage()]
    assert len(warnings) == (0 if exchanges else 1)


def test_a_model_under_another_name_is_read_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The only record beside the Fisher diagonal is the model."""
    pytest.importorskip("cvxpy")
    strategy = FedEquilibria(buffers=["frozen"])

    def reply(message: Message, client: int) -> dict[str, Any]:
        answer = plain(message, client)
        answer["weights"] = answer.pop("arrays")
        return {**answer, "fisher": record_of({"w": np.full(3, 1.0 + client, np.float32)})}

    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(grid(reply), record_of(MODEL), num_rounds=1)
    assert set(result.arrays) == set(MODEL)
    assert "does not read" not in caplog.text


@pytest.mark.parametrize("cause", ["replies", "selection"])
def test_a_failed_round_keeps_the_last_model_for_another_start(cause: str) -> None:
    def reply(message: Message, client: int) -> dict[str, Any]:
        moved = {name: a + 1 for name, a in arrays_of(message.content["arrays"]).items()}
        metrics = MetricRecord({"num-examples": 0 if failing else 1})
        return {"arrays": record_of(moved), "metrics": metrics}

    class Failing(FedAvg):
        def configure_train(self, server_round: int, *given: Any) -> Any:
            nonlocal failing
            failing = cause == "replies" and server_round == 3
            return super().configure_train(server_round, *given)

    failing = False
    online = {"replies": None, "selection": lambda number, ids: ids if number < 3 else []}
    strategy = Failing(availability=online[cause])
    nodes = grid(reply, 3)
    with pytest.raises(RoundFailed) as failed:
        strategy.start(nodes, record_of(MODEL), num_rounds=5)
    assert np.all(arrays_of(failed.value.arrays)["w"] == MODEL["w"] + 2)
    strategy._availability = None
    result = strategy.start(nodes, failed.value.arrays, num_rounds=2)
    assert np.all(arrays_of(result.arrays)["w"] == MODEL["w"] + 4)
