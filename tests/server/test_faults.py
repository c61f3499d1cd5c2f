"""Faults of clients, nodes and replies, and how the server handles them.

A test for each line of docs/faults.md that is not tested elsewhere: replies
(tests/aggregation/test_rounds.py, "replies that cannot be used"), sessions, sites, checkpoints,
real processes (tests/deploy/test_deployment.py, tests/engines/test_reproducible.py).
"""

from __future__ import annotations

import io
import itertools
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from apps import app_with_handlers
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from malformed_replies import NUMBERS as HOSTILE
from malformed_replies import npy_bytes
from parametrize import mark_others_nightly
from replies import error_reply, valid_reply
from resuming import config, outcome, resume
from rich.console import Console

from fairflower.aggregation.records import InvalidReply, decode_record
from fairflower.arrays import record_of
from fairflower.client_app import app as client_app
from fairflower.engines.inline import InlineGrid, send_and_receive
from fairflower.errors import ConfigError, Diverged, RoundFailed, RunInterrupted
from fairflower.exchanges import AveragedBatches, ControlVariates, Prototypes
from fairflower.flower_compat import set_ids
from fairflower.server.discovery import NodeDiscovery
from fairflower.server.registration import ClientRegistry, NodeTracker, register_clients
from fairflower.server.session import Session
from fairflower.strategies import STRATEGIES, FairFed, FedAvg, FedEBAPlus, FedEquilibria
from fairflower.testing.rounds import MODEL, Rounds, reply, zero_update

# --- replies -------------------------------------------------------------------------------


def test_a_reply_that_arrives_a_round_late_is_not_merged(caplog):
    def model(late: bool):
        rounds = Rounds(FedAvg(min_clients=1), MODEL, range(3))
        first = rounds.ask()
        rounds.finish([valid_reply(first[k], k) for k in (0, 1)])
        second = rounds.ask()
        replies = [valid_reply(second[k], k) for k in (0, 1)]
        if late:  # from a client that has not answered this round, and from one that has
            replies += [
                reply(first[k], {n: 9 * a for n, a in MODEL.items()}, {"num-examples": 7})
                for k in (1, 2)
            ]
        merged = rounds.finish(replies)
        assert rounds.strategy.dropped == {2: "no reply before the timeout"}
        return merged

    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        on_time, late = model(False), model(True)
    assert all(on_time[name].tobytes() == late[name].tobytes() for name in MODEL)
    assert "ignores a reply from client 2, because it is late" in caplog.text


def test_a_second_reply_to_the_same_message_is_ignored(caplog):
    rounds = Rounds(FedAvg(), MODEL, range(2))
    messages = rounds.ask()
    again = reply(messages[1], {n: 5 * a for n, a in MODEL.items()}, {"num-examples": 900})
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        model = rounds.finish([valid_reply(messages[0], 0), valid_reply(messages[1], 1), again])
    np.testing.assert_array_equal(model["conv.weight"], MODEL["conv.weight"] + 1)
    assert not rounds.strategy.dropped
    assert "ignores a reply from client 1" in caplog.text


def test_of_two_nodes_with_the_same_client_id_the_larger_node_id_is_dropped():
    """In an app without fairflower's client registration."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        node = context.node_config["partition-id"]
        arrays = {name: array + np.ones((), array.dtype) for name, array in MODEL.items()}
        return reply(message, arrays, {"num-examples": 10**node, "client-id": node // 2})

    strategy = FedAvg(fraction_evaluate=0.0)
    grid = InlineGrid(app, 3)
    strategy.start(grid, record_of(MODEL), num_rounds=1)
    assert strategy.client_ids == (0, 1)
    (dropped_node,) = strategy.dropped
    assert dropped_node == sorted(grid.get_node_ids())[1]
    assert "client id 0 has already replied" in strategy.dropped[dropped_node]


@pytest.mark.parametrize(
    ("metric", "claim", "reason"),
    [
        *(("num-examples", claim, "at most 2**53") for claim in (2**53 + 2, 1e30)),
        *(
            ("state-round", claim, "state-round")
            for claim in (-1, -1e308, 0.5, float("nan"), 10**400)
        ),
    ],
)
def test_impossible_numbers_drop_the_client(metric, claim, reason):
    rounds = Rounds(FedAvg(), MODEL, range(3))
    messages = rounds.ask()
    replies = [valid_reply(m, k) for k, m in enumerate(messages)]
    replies[1] = valid_reply(messages[1], 1, **{metric: claim})
    rounds.finish(replies)
    assert list(rounds.strategy.dropped) == [1]
    assert reason in rounds.strategy.dropped[1]


@pytest.mark.parametrize("name", ["model", "control", "gradient"])
def test_arrays_too_long_for_single_precision_drop_the_client(name):
    """Otherwise all other clients would train on these arrays, and their losses would be NaN."""
    exchanges = [ControlVariates()] if name == "control" else []
    rounds = Rounds(FedEBAPlus(exchanges=exchanges), MODEL, range(4))
    one = {"conv.weight": np.full((3, 4), 0.1, np.float32)}
    far = {"conv.weight": np.full((3, 4), 3e38, np.float32)}
    moves = {k: zero_update() | (far if name == "model" and k == 2 else {}) for k in range(4)}
    kinds = ("gradient", "control")[: 1 + len(exchanges)]
    sent = {k: {kind: far if kind == name and k == 2 else one for kind in kinds} for k in range(4)}
    rounds.step(moves, measured=sent)
    assert list(rounds.strategy.dropped) == [2]
    assert "norm 1.04e+39" in rounds.strategy.dropped[2]
    assert name in rounds.strategy.dropped[2]


@pytest.mark.parametrize("kind", ["model", "control"])
@pytest.mark.parametrize("ratio", [0.99, 1.01])
def test_a_vector_more_than_2_to_24_times_as_long_as_others_drops_the_client(ratio, kind):
    """A norm below 1, as that of the received model and of the others' vectors, counts as 1."""
    zero = {"w": np.zeros(1, np.float32)}
    far, near = {"w": np.float32([ratio * 2**24])}, {"w": np.float32([0.5])}
    rounds = Rounds(FedAvg(exchanges=[ControlVariates()]), zero, range(4))
    rounds.step(
        {k: far if (kind, k) == ("model", 2) else zero for k in range(4)},
        measured={k: {"control": far if (kind, k) == ("control", 2) else near} for k in range(4)},
    )
    assert list(rounds.strategy.dropped) == ([2] if ratio > 1 else [])


@pytest.mark.parametrize(("factor", "named"), [(990, False), (1010, True), (1e6, True)])
def test_diverging_training_names_clients_with_unusually_long_arrays(factor, named):
    rounds = Rounds(FedAvg(exchanges=[ControlVariates()]), MODEL, range(4))
    sent = {k: {"control": {"conv.weight": np.ones((3, 4), np.float32)}} for k in range(4)}
    sent[2]["control"]["conv.weight"] *= factor
    rounds.step({k: zero_update() for k in range(4)}, measured=sent)
    assert rounds.strategy.dropped == {}
    lost = [error_reply(message, "its training loss became nan") for message in rounds.ask()]
    with pytest.raises(Diverged) as raised:
        rounds.finish(lost)
    text = f"client 2's 'control' has norm {factor * 12**0.5:.3g}, but the others'"
    assert (text in str(raised.value)) == ("client 2's" in str(raised.value)) == named


class Trap:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["objects", "half an array", "no array", "nothing"])
def test_invalid_arrays_are_refused_and_nothing_is_unpickled(kind, tmp_path):
    sprung = tmp_path / "sprung"
    whole = npy_bytes(MODEL["conv.weight"])
    data = {
        "objects": npy_bytes(np.array([Trap(sprung)], object)),
        "half an array": whole[: len(whole) // 2 + 40],
        "no array": b"<html>",
        "nothing": b"",
    }[kind]
    rounds = Rounds(FedAvg(), MODEL, range(3))
    messages = rounds.ask()
    replies = [valid_reply(m, k) for k, m in enumerate(messages)]
    bad = Array(dtype="float32", shape=(3, 4), stype="numpy.ndarray", data=data)
    replies[1].content["arrays"]["conv.weight"] = bad
    rounds.finish(replies)
    assert list(rounds.strategy.dropped) == [1]
    assert "array 'conv.weight' is not a plain NumPy array" in rounds.strategy.dropped[1]
    assert not sprung.exists()
    np.load(io.BytesIO(npy_bytes(np.array([Trap(sprung)], object))), allow_pickle=True)
    assert sprung.exists(), "the trap does not work"


def decoded(received: ArrayRecord) -> str:
    """Return the names of the arrays, or the error."""
    try:
        return " ".join(decode_record(received))
    except InvalidReply as problem:
        return str(problem)


def test_a_flipped_bit_in_an_array_header_is_decoded_or_raises_invalid_reply():
    array = MODEL["conv.weight"]
    whole = npy_bytes(array)
    received = record_of(MODEL)
    for bit in range(8 * (len(whole) - array.nbytes)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        received["conv.weight"] = Array("float32", (3, 4), "numpy.ndarray", bytes(data))
        assert "conv.weight" in decoded(received)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_merged_model_with_nan_or_infinity_raises_and_names_the_longest_update(value):
    class Overflowing(FedAvg):
        def merge(self, cohort):
            return {**super().merge(cohort), "conv.weight": np.full((3, 4), value, np.float32)}

    rounds = Rounds(Overflowing(), MODEL, range(3))
    moves = {k: {name: np.full_like(a, k + 1) for name, a in MODEL.items()} for k in range(3)}
    with pytest.raises(
        Diverged, match=r"'conv.weight'.*largest update norm.*is that of client 2.*clip"
    ):
        rounds.step(moves)


def test_finite_updates_whose_merged_model_overflows_fail_the_round():
    far = {name: np.zeros_like(array) for name, array in MODEL.items()}
    rounds = Rounds(FedAvg(), far | {"conv.weight": np.full((3, 4), -3e38, np.float32)}, range(4))
    still = {name: np.zeros(array.shape) for name, array in MODEL.items()}
    across = still | {"conv.weight": np.full((3, 4), 6e38)}
    with pytest.raises(
        RoundFailed, match=r"NaN or infinite.*largest update norm.*is that of client 0"
    ):
        rounds.step({0: across, 1: still, 2: still, 3: still}, {0: 2**53, 1: 1, 2: 1, 3: 1})
    assert rounds.strategy.dropped == {}


NUMBERS = [
    (name, need)
    for name, kind in STRATEGIES.items()
    for need in kind().measurements
    if need not in kind()._array_measurements
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("name", "need"), NUMBERS)
def test_a_measured_number_that_is_not_finite_drops_the_client(name, need, value):
    rounds = Rounds(STRATEGIES[name](min_clients=1), MODEL, range(3))
    move = {key: np.ones_like(array) for key, array in MODEL.items()}
    rounds.step(dict.fromkeys(range(3), move), metrics={0: {}, 1: {need: value}, 2: {}})
    assert rounds.strategy.client_ids == (0, 2)
    assert rounds.strategy.dropped == {1: f"{need} = {value}: expected a finite number"}


def test_negative_fisher_information_is_refused():
    rounds = Rounds(FedEquilibria(min_clients=1), MODEL, range(3))
    move = {name: np.ones_like(array) for name, array in MODEL.items()}
    fisher = {"conv.weight": np.full((3, 4), 0.1, np.float32)}
    negative = {"conv.weight": fisher["conv.weight"].copy()}
    negative["conv.weight"][1, 1] = -1e-9
    measured = {0: {"fisher": fisher}, 1: {"fisher": negative}, 2: {"fisher": fisher}}
    rounds.step(dict.fromkeys(range(3), move), measured=measured)
    assert list(rounds.strategy.dropped) == [1]
    assert rounds.strategy.dropped[1] == "its 'fisher': array 'conv.weight' holds negative values"


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ({"accuracy": 1.5}, "accuracy = 1.5: expected a number from 0 to 1"),
        ({"accuracy": -0.1}, "accuracy = -0.1: expected"),
        ({"accuracy": np.inf}, "accuracy = inf: expected"),
        ({"personal_accuracy": 7.0}, "personal_accuracy = 7.0: expected"),
        ({"num-examples": 2**50}, "but its domain has only 5"),
        ({"eval_loss": np.nan}, "eval_loss = nan"),
        ({"eval_loss": 10**400}, "eval_loss: an integer too large for a float"),
        ({"num-examples": 10**5000}, "num-examples: an integer too large for a float"),
        ({"r2": -(10**400)}, "r2: an integer too large for a float"),
    ],
)
def test_evaluation_replies_with_impossible_metrics_are_refused(claim, reason):
    strategy = FedAvg()
    strategy.enroll({k: 1000 + k for k in range(2)}, 0)
    messages = list(strategy.configure_evaluate(1, record_of(MODEL), ConfigRecord(), None))
    sound = {"accuracy": 0.5, "personal_accuracy": 0.5, "eval_loss": 1.0, "num-examples": 5}
    answers = [
        Message(RecordDict({"metrics": MetricRecord({**sound, **more})}), reply_to=message)
        for message, more in zip(messages, ({"r2": -3.0}, claim), strict=True)
    ]
    assert list(strategy._evaluations(1, answers, {0: 5, 1: 5})) == [0]
    assert reason in strategy.dropped[1]


def test_aggregate_evaluate_in_a_foreign_app_ignores_invalid_replies(caplog):
    """Without client registration, in a round of Flower: sampling, ``aggregate_evaluate``."""
    grid = InlineGrid(client_app, 4)
    strategy = FedAvg()
    messages = list(strategy.configure_evaluate(1, record_of(MODEL), ConfigRecord(), grid))
    for number, message in enumerate(messages):
        set_ids(message, message_id=f"m{number}")
    sent = sorted(messages, key=lambda m: m.metadata.dst_node_id)
    claims = [
        {
            "accuracy": 50.0,
            "num-examples": 1,
            "client-id": 3,
            "mine": 1.0,
        },  # in percent, as the foreign app chooses
        {"accuracy": float("nan"), "num-examples": 1},
        {"accuracy": 90.0, "num-examples": -1},
        {"accuracy": 80.0, "num-examples": 3},
    ]
    replies = [
        Message(RecordDict({"metrics": MetricRecord(claim)}), reply_to=message)
        for message, claim in zip(sent, claims, strict=True)
    ]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert strategy.aggregate_evaluate(1, [*replies, replies[0]]) == {"accuracy": 72.5}
    assert list(strategy.dropped) == [1001, 1002]
    assert "accuracy = nan" in strategy.dropped[1001]
    assert "it is late or the client has already" in caplog.text
    assert strategy.aggregate_evaluate(1, []) is None


@pytest.mark.parametrize(
    ("exchange", "good", "odd"),
    [
        (
            Prototypes(),
            {"mean": np.ones((3, 4), np.float32), "count": np.ones(3, int)},
            {"mean": np.ones((4, 2), np.float32), "count": np.ones(4, int)},
        ),
        (
            AveragedBatches(),
            {"images": np.ones((2, 1, 8, 8), np.float32), "labels": np.eye(2, dtype=np.float32)},
            {"images": np.ones((1, 3, 9, 9), np.float32), "labels": np.eye(1, dtype=np.float32)},
        ),
    ],
    ids=["prototypes", "averages"],
)
def test_a_client_with_another_exchange_shape_than_the_majority_is_dropped(exchange, good, odd):
    model = MODEL | {"head.weight": np.zeros((4, 2), np.float32)}
    rounds = Rounds(FedAvg(exchanges=[exchange], min_clients=1), model, range(3))
    moves = {k: {name: np.ones_like(a) for name, a in model.items()} for k in range(3)}
    rounds.step(moves, measured={k: {exchange.name: odd if k == 0 else good} for k in range(3)})
    assert list(rounds.strategy.dropped) == [0]
    assert f"its {exchange.name!r} has shape" in rounds.strategy.dropped[0]
    assert set(exchange.broadcast(2)) == set(good)
    # From the second round on, the shape of the first round decides.
    rounds.step(moves, measured={k: {exchange.name: good if k == 0 else odd} for k in range(3)})
    assert list(rounds.strategy.dropped) == [1, 2]


def test_a_measured_accuracy_above_1_is_refused():
    rounds = Rounds(FairFed(min_clients=1), MODEL, range(3))
    move = {name: np.ones_like(array) for name, array in MODEL.items()}
    claims = {k: {"received_score": a} for k, a in enumerate((0.5, 1e6, 0.7))}
    rounds.step(dict.fromkeys(range(3), move), metrics=claims)
    assert list(rounds.strategy.dropped) == [1]
    assert "received_score = 1000000.0" in rounds.strategy.dropped[1]


# --- nodes ---------------------------------------------------------------------------------


def run(grid: InlineGrid, folder, **settings):
    settings = {"num-server-rounds": 4, "fraction-train": 1.0, "round-timeout": 0.4} | settings
    return Session(grid, config(folder, **settings), Console(quiet=True)).run()


def dropped(folder) -> list[dict[str, str]]:
    lines = (folder / "diagnostics.jsonl").read_text().splitlines()
    return [json.loads(line).get("dropped", {}) for line in lines]


class Slow(InlineGrid):
    """Client 1's reply to round 2 is delivered during round 3, or never."""

    def __init__(self, delivers: bool) -> None:
        super().__init__(client_app, 4)
        self.delivers = delivers
        self.held: list[Message] = []

    def pull_messages(self, message_ids):
        replies = []
        for message in list(self._pending.values()):
            if message.metadata.message_id not in message_ids:
                continue
            is_training = message.metadata.message_type == "train"
            now = message.content["config"]["server-round"] if is_training else 0
            if (now, message.metadata.dst_node_id) == (2, 1001):
                self._pending.pop(message.metadata.message_id)
                self.held.append(message)
                continue
            if now == 3 and self.delivers and self.held:
                replies.append(self._deliver(self.held.pop()))
            replies += super().pull_messages([message.metadata.message_id])
            break
        return replies


@pytest.mark.slow
def test_a_client_that_hangs_is_left_out_and_its_late_reply_is_not_merged(tmp_path):
    late, never = run(Slow(True), tmp_path), run(Slow(False), tmp_path)
    assert dropped(late) == [{}, {"1": "no reply before the timeout"}, {}, {}]
    assert outcome(late) == outcome(never)


def test_a_client_is_left_out_of_rounds_in_which_its_num_examples_differ_from_registration(
    tmp_path,
):
    def exaggerate(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        now = message.content["config"]["server-round"]
        if (now, context.node_config["partition-id"]) == (1, 1):
            reply.content["metrics"]["num-examples"] *= 10
        return reply

    folder = run(
        InlineGrid(app_with_handlers(train=exaggerate), 4), tmp_path, **{"num-server-rounds": 3}
    )
    first, *later = dropped(folder)
    assert list(first) == ["1"]
    assert "num-examples = 120, but it had 12 training examples" in first["1"]
    assert later == [{}, {}]


STATEFUL = ("scaffold", "feddyn", "moon", "ditto", "fedgc")


#: Pairs of the metrics that are invalid in replies to training and to tests.
INVALID_METRICS = [("state-round", "eval_loss"), ("num-examples", "num-examples")]
INVALID_METRICS += [("train_loss", "accuracy"), ("client-id", "client-id"), ("more", "more")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "tested"),
    mark_others_nightly(INVALID_METRICS, standing_for_all=INVALID_METRICS[:1]),
)
def test_a_client_that_sends_invalid_numbers_in_every_round_does_not_end_the_run(
    trained, tested, tmp_path
):
    def lie(message: Message, context: Context) -> Message:
        answer = client_app(message, context)
        record, kind = answer.content["metrics"], message.metadata.message_type
        if record["client-id"] == 1:
            metric = trained if kind == "train" else tested
            record[metric] = HOSTILE[message.content["config"]["server-round"] - 1]
        return answer

    grid = InlineGrid(app_with_handlers(train=lie, evaluate=lie), 4)
    rounds = {"num-server-rounds": len(HOSTILE), "evaluate.by": "both", "round-timeout": 9.0}
    folder = run(grid, tmp_path, **rounds, **{"client.name": "scaffold"})
    assert json.loads((folder / "run.json").read_text())["status"] == "completed"
    assert {client for line in dropped(folder) for client in line} == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "dies"),
    mark_others_nightly(
        itertools.product(STATEFUL, [False, True]),
        {("scaffold", False), ("scaffold", True), ("ditto", True)},
    ),
)
def test_a_client_with_dropped_updates_continues_as_if_it_had_been_absent(tmp_path, client, dies):
    def bad(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if context.node_config["partition-id"] == 1:
            if message.content["config"]["server-round"] in (2, 3):
                reply.content["metrics"]["num-examples"] = 0
            if dies:  # the process, with all state in memory
                context.state = RecordDict()
        return reply

    def absent(message: Message, context: Context) -> Message:
        rounds = message.content["config"]["server-round"]
        if context.node_config["partition-id"] == 1 and rounds in (2, 3):
            raise MemoryError("away")
        return client_app(message, context)

    ends = []
    for train in (bad, absent):
        grid = InlineGrid(app_with_handlers(train=train), 4)
        folder = run(grid, tmp_path, **{"client.name": client, "evaluate.by": "clients"})
        assert [list(names) for names in dropped(folder)] == [[], ["1"], ["1"], []]
        assert "lost its state" not in (folder / "log.txt").read_text()
        ends.append(outcome(folder) | {"diagnostics": None})
    assert ends[0] == ends[1]


class Restarted(InlineGrid):
    """Client 1's SuperNode dies in round 2 and is back before round 4, with another id."""

    def __init__(self) -> None:
        super().__init__(client_app, 4)
        self.round = 0

    def push_messages(self, messages):
        messages = list(messages)
        rounds = [
            m.content["config"]["server-round"]
            for m in messages
            if m.metadata.message_type == "train"
        ]
        self.round = max(rounds, default=self.round)
        if self.round == 4 and 1001 in self.contexts:
            old = self.contexts.pop(1001)
            self.contexts[7001] = Context(1, 7001, old.node_config, RecordDict(), {})
        ids = super().push_messages(messages)
        # Flower gives no id to a message for a node that it has given up.
        return [
            None if (m.metadata.dst_node_id, self.round) == (1001, 3) else message_id
            for m, message_id in zip(messages, ids, strict=True)
        ]

    def get_node_ids(self):
        if self.round == 2:
            return [node for node in self.contexts if node != 1001]
        if self.round == 3 and 1001 in self.contexts:
            old = self.contexts.pop(1001)
            self.contexts[7001] = Context(1, 7001, old.node_config, RecordDict(), {})
        return super().get_node_ids()

    def _deliver(self, message):
        if (message.metadata.dst_node_id, self.round) == (1001, 2):
            lost = Message(Error(code=5, reason="Node unavailable"), reply_to=message)
            lost.metadata.__dict__["_src_node_id"] = 1  # the SuperLink answers for it
            return lost
        return super()._deliver(message)


@pytest.mark.slow
def test_a_restarted_supernode_is_found_under_its_new_node_id(tmp_path):
    folder = run(Restarted(), tmp_path, **{"client.name": "scaffold"})
    assert dropped(folder)[:2] == [{}, {"1": "Node unavailable"}]
    assert dropped(folder)[2] == {"1": "its SuperNode is not connected"}
    assert dropped(folder)[3] == {}, "the client is asked again"
    # The client's state was on its disk, so no loss is reported.
    assert "lost its state" not in (folder / "log.txt").read_text()


def test_a_new_node_does_not_replace_a_connected_node():
    grid = InlineGrid(client_app, 2)
    nodes = {0: 1000, 1: 1001}
    impostor = Context(1, 666, {"partition-id": 1}, RecordDict(), {})
    grid.contexts[666] = impostor
    assert located(tracker(grid, nodes)) == nodes
    del grid.contexts[1001]
    assert located(tracker(grid, nodes)) == {0: 1000, 1: 666}
    grid.contexts[666].node_config["partition-id"] = 0
    assert located(tracker(grid, nodes)) == nodes


def tracker(grid: InlineGrid, nodes: dict[int, int], timeout: float = 1.0) -> NodeTracker:
    return NodeTracker(
        NodeDiscovery(grid, timeout, threading.Event()), ClientRegistry(dict(nodes), None)
    )


def located(tracker: NodeTracker) -> dict[int, int]:
    tracker.locate()
    return tracker.registry.nodes


class Counting(InlineGrid):
    """Records which nodes are asked; their answers can be withheld."""

    def __init__(self) -> None:
        super().__init__(client_app, 2)
        self.asked: list[int] = []
        self.holds = False

    def push_messages(self, messages):
        messages = list(messages)
        self.asked += [message.metadata.dst_node_id for message in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        return [] if self.holds else super().pull_messages(message_ids)


def test_a_new_node_is_asked_once_while_it_stays_connected(caplog):
    grid, nodes = Counting(), {0: 1000, 1: 1001}
    looking = tracker(grid, nodes)
    grid.contexts[666] = Context(1, 666, {"partition-id": 5}, RecordDict(), {})
    assert located(looking) == nodes
    assert grid.asked == [], "no client is away"
    del grid.contexts[1001]
    grid.contexts[777] = Context(1, 777, {}, RecordDict(), {})
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        for _ in range(3):
            assert located(looking) == nodes
    assert sorted(grid.asked) == [666, 777]
    assert caplog.text.count("Node 777 cannot take part") == 1
    back = grid.contexts.pop(777)
    assert located(looking) == nodes
    back.node_config["partition-id"] = 1
    grid.contexts[777] = back
    assert located(looking) == {0: 1000, 1: 777}
    assert sorted(grid.asked) == [666, 777, 777]


def test_a_late_answer_of_a_new_node_counts_in_the_next_round(caplog):
    grid, nodes = Counting(), {0: 1000, 1: 1001}
    del grid.contexts[1001]
    grid.contexts[666] = Context(1, 666, {"partition-id": 1}, RecordDict(), {})
    looking = tracker(grid, nodes, timeout=0.05)
    grid.holds = True
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert located(looking) == nodes
        assert located(looking) == nodes
    assert caplog.text.count("Node 666 is ignored: no answer in 0.05 s") == 1
    grid.holds = False
    assert located(looking) == {0: 1000, 1: 666}
    assert grid.asked == [666]


class Answering(InlineGrid):
    """Node 1001 gives the specified answer, or none."""

    def __init__(self, answer):
        super().__init__(client_app, 3)
        self.answer = answer

    def _deliver(self, message):
        if message.metadata.dst_node_id != 1001:
            return super()._deliver(message)
        return None if self.answer is None else Message(self.answer, reply_to=message)

    def pull_messages(self, message_ids):
        return [reply for reply in super().pull_messages(message_ids) if reply is not None]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, r"no answer in 0.3 s"),
        (RecordDict(), r"identifies its client"),
        (RecordDict({"config": ConfigRecord()}), r"identifies its client"),
        (
            RecordDict({"config": ConfigRecord({"site": "[]"})}),
            r"description of its data cannot be read",
        ),
        (
            RecordDict({"config": ConfigRecord({"site": "[" * 10**5})}),
            r"description of its data cannot be read",
        ),
        (RecordDict({"config": ConfigRecord({"partition-id": -1})}), r"partition-id = -1 is no"),
        (RecordDict({"config": ConfigRecord({"partition-id": 10**5000})}), r"partition-id is no"),
        (
            RecordDict({"config": ConfigRecord({"num-partitions": 2**40})}),
            r"num-partitions = 10995",
        ),
    ],
    ids=["none", "nothing", "empty", "no federation", "too deep", "negative", "digits", "many"],
)
def test_registration_names_nodes_with_missing_or_invalid_answers(answer, reason):
    expected = rf"2 of 3 clients.*missing: \[1\](?s:.*)1001: .*{reason}"
    with pytest.raises(ConfigError, match=expected) as caught:
        register_clients(NodeDiscovery(Answering(answer), 0.3, threading.Event()), 3)
    assert ("increase round-timeout" in str(caught.value)) == (answer is None)


def test_a_long_list_of_missing_clients_is_abbreviated():
    discovery = NodeDiscovery(InlineGrid(client_app, 1), 0.1, threading.Event(), None)
    message = str(discovery.missing_error(2**31 - 1, range(2**31 - 1)))
    assert message.startswith("0 of 2147483647 clients answered; missing: [0, 1, 2, ")
    assert "98, 99], and more. Start" in message


def test_registration_refuses_two_nodes_with_the_same_partition_id():
    grid = InlineGrid(client_app, 3)
    grid.contexts[1002].node_config["partition-id"] = 1
    with pytest.raises(ConfigError, match=r"Nodes 1001 and 1002 both claim to be client 1"):
        register_clients(NodeDiscovery(grid, 1, threading.Event()), 3)


def test_send_and_receive_returns_one_reply_per_message():
    grid = InlineGrid(lambda message, context: Message(RecordDict(), reply_to=message), 2)
    pull = grid.pull_messages
    grid.pull_messages = lambda ids: [m for m in pull(ids) for _ in range(2)]
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = send_and_receive(grid, messages, timeout=5, stop=threading.Event())
    assert sorted(r.metadata.src_node_id for r in replies) == sorted(grid.get_node_ids())


def test_send_and_receive_does_not_wait_for_messages_refused_by_flower():
    class Refusing(InlineGrid):
        def push_messages(self, messages):
            return [None, *list(super().push_messages(messages))[1:]]

    grid = Refusing(client_app, 2)
    messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    replies = send_and_receive(grid, messages, timeout=5, stop=threading.Event())
    assert [r.metadata.src_node_id for r in replies] == [1001]


def test_send_and_receive_pushes_nothing_after_a_stop():
    class Closed(InlineGrid):
        def push_messages(self, messages):
            raise AssertionError("a message was pushed")

    stop = threading.Event()
    stop.set()
    with pytest.raises(RunInterrupted):
        send_and_receive(Closed(client_app, 2), [Message(RecordDict(), 1001, "query")], 5, stop)


@pytest.mark.slow
def test_a_run_that_loses_all_clients_fails_and_can_be_resumed(tmp_path):
    class Outage(InlineGrid):
        def _deliver(self, message):
            if (
                message.metadata.message_type == "train"
                and message.content["config"]["server-round"] == 3
            ):
                return Message(Error(code=5, reason="Node unavailable"), reply_to=message)
            return super()._deliver(message)

    whole = run(InlineGrid(client_app, 4), tmp_path, **{"run-name": "whole"})
    with pytest.raises(RoundFailed, match=r"0 of 4 clients.*(?s:.*)Node unavailable"):
        run(Outage(client_app, 4), tmp_path, **{"run-name": "failed"})
    assert json.loads((tmp_path / "failed/run.json").read_text())["status"] == "failed"
    assert outcome(resume(tmp_path / "failed")) == outcome(whole)
