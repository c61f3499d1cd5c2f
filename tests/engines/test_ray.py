"""The Ray engine with foreign apps: results, client states, crashed workers, shared arrays."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from parametrize import at_night
from processes import TIMEOUT, wait_for

from fairflower.config import RunConfig
from fairflower.engines import ray_cluster
from fairflower.engines.inline import InlineGrid, send_and_receive
from fairflower.engines.launch import simulate
from fairflower.engines.ray import _HERE, RayGrid
from fairflower.engines.ray_cluster import Batch, Task, TaskQueue, Worker, last_words
from fairflower.errors import ConfigError, EngineError
from fairflower.flower_compat import set_ids

pytestmark = pytest.mark.slow

WEIGHTS = np.arange(40_000, dtype=np.float64).reshape(200, 200)  # 320 kB: shared


@pytest.fixture(scope="module")
def running_ray() -> Iterator[Any]:
    """Ray with two CPUs, for grids that do not test how it is started."""
    ray = ray_cluster.connect("", 2)
    yield ray
    ray.shutdown()


@pytest.fixture
def on_running_ray(running_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let grids use the running Ray; only their workers end with them."""

    def close(grid: RayGrid) -> None:
        for worker in (*grid._workers.ready, *grid._workers.starting.values()):
            running_ray.kill(worker.actor)
        last_words.end()

    monkeypatch.setattr("fairflower.engines.ray.connect", lambda *_: running_ray)
    monkeypatch.setattr(RayGrid, "close", close)


def foreign_clients() -> ClientApp:
    """Return clients that add their number and their count of rounds to the model."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record = message.content["arrays"]
        client = int(context.node_config["partition-id"])
        count = context.state.config_records.setdefault("seen", ConfigRecord({"n": 0}))
        count["n"] = int(count["n"]) + 1
        kept = context.state.array_records.get("kept")
        before = kept["w"].numpy() if kept else np.zeros_like(WEIGHTS)
        w = record["w"].numpy() + before + client * context.run_config["step"] + count["n"]
        context.state["kept"] = ArrayRecord({"w": Array(w)})
        die(message.content.config_records.get("config", {}), client)
        record["w"] = Array(w)  # clients do not share messages: no other client sees this
        content = {
            "arrays": ArrayRecord({"w": Array(w)}),
            "metrics": MetricRecord({"num-examples": client + 1, "n": count["n"]}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def die(config: Any, client: int) -> None:
    """End the process, as the kernel does when memory runs out: always, or once."""
    if config.get("dies") != client:
        return
    if marker := config.get("once"):
        if Path(marker).exists():
            return
        Path(marker).touch()
    os._exit(1)


def federate(engine: str, fails: bool = False, **options: Any) -> np.ndarray:
    """Return the model of three rounds of Flower's FedAvg, also if the server then fails."""
    server = ServerApp()
    outcome = {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        random.seed(0)  # sets Flower's order of nodes and thus of the sums
        strategy = FedAvg(fraction_evaluate=0.0)
        result = strategy.start(grid, ArrayRecord({"w": Array(WEIGHTS)}), num_rounds=3)
        outcome["w"] = result.arrays["w"].numpy()
        context.state["done"] = ConfigRecord({"step": context.run_config["step"]})
        if fails:
            raise ZeroDivisionError("of the server")

    config, step = RunConfig(engine=engine, **options), {"step": 0.5}
    if fails:
        with pytest.raises(ZeroDivisionError, match="of the server"):
            simulate(server, foreign_clients(), 5, config, run_config=step)
    else:
        context = simulate(server, foreign_clients(), 5, config, run_config=step)
        assert context.state["done"]["step"] == 0.5
    return outcome["w"]


@pytest.mark.parametrize("engine", ["inline", at_night("ray")])
def test_foreign_apps_compute_the_same_model_also_if_the_server_then_fails(engine):
    """``simulate`` raises an exception of the server."""
    assert np.array_equal(federate("inline"), federate(engine, fails=True, workers=2))
    assert not ray_cluster.prepare_ray().is_initialized()


def test_a_run_config_is_refused_with_flowers_engine():
    with pytest.raises(ConfigError, match="run_config"):
        federate("flower")


def ask(grid: InlineGrid, timeout: float | None = None, **config: Any) -> dict[int, Message]:
    """Return the replies of one round by client."""
    content = RecordDict({"arrays": ArrayRecord({"w": Array(WEIGHTS)})})
    content["config"] = ConfigRecord(config)
    nodes = {node: k for k, node in enumerate(grid.get_node_ids())}
    messages = [Message(content, node, "train") for node in nodes]
    return {
        nodes[r.metadata.src_node_id]: r for r in grid.send_and_receive(messages, timeout=timeout)
    }


def models(replies: dict[int, Message]) -> dict[int, list[float]]:
    return {
        k: reply.content["arrays"]["w"].numpy().ravel().tolist()
        for k, reply in sorted(replies.items())
        if not reply.has_error()
    }


@pytest.mark.usefixtures("on_running_ray")
def test_a_crashed_worker_is_replaced_and_its_client_is_retried_once(tmp_path, monkeypatch):
    settings = {"step": 0.5}
    inline = InlineGrid(foreign_clients(), 40, settings)
    expected = [models(ask(inline)) for _ in range(3)]
    with closing(RayGrid(foreign_clients(), 40, RunConfig(workers=2), settings)) as grid:
        puts: list[object] = []
        put = grid._ray.put
        monkeypatch.setattr(grid._ray, "put", lambda record: puts.append(record) or put(record))
        assert models(ask(grid)) == expected[0]
        assert len(puts) == 1  # one model for 40 messages
        puts.clear()
        # One crash: the clients of the batch are retried from their earlier states.
        sent: list[int] = []
        send = grid._send

        def watched(worker: Worker, tasks: list[Any]) -> None:
            send(worker, tasks)
            sent.append(len(tasks))
            there = [task for batch in worker.batches.values() for task in batch.tasks]
            assert len(there) == 1 or not any(task.deaths for task in there)

        monkeypatch.setattr(grid, "_send", watched)
        assert models(ask(grid, dies=3, once=str(tmp_path / "died"))) == expected[1]
        assert max(sent) > 1
        assert len(puts) == 1  # only the model, as states are not copied
        # A client that always crashes gets an error reply; no other client is affected.
        replies = ask(grid, dies=1)
        assert [k for k, reply in replies.items() if reply.has_error()] == [1]
        assert "ActorDied" in replies[1].error.reason
        alive = {k: w for k, w in expected[2].items() if k != 1}
        assert models(replies) == alive


@pytest.mark.nightly
@pytest.mark.usefixtures("on_running_ray")
def test_client_states_may_change_size_and_share_arrays_with_messages():
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        kept = context.state.array_records.get("kept", ArrayRecord())
        seen = {name: array.numpy() for name, array in kept.items()}
        content = {"arrays": ArrayRecord({n: Array(a + 1) for n, a in seen.items()})}
        record = message.content["arrays"]  # another part in each round, of 320 kB or 8 bytes
        part = message.content["config"]["keep"]
        context.state["kept"] = ArrayRecord({part: record[part]} if part else {})
        return Message(RecordDict(content), reply_to=message)

    def rounds(grid: InlineGrid) -> list[list[dict[str, list[float]]]]:
        each_round = []
        for number, part in enumerate(["large", "large", "small", "", "small", "large", "large"]):
            arrays = {"large": Array(WEIGHTS + number), "small": Array(np.array([number + 0.5]))}
            content = RecordDict({"arrays": ArrayRecord(arrays)})
            content["config"] = ConfigRecord({"keep": part})
            messages = [Message(content, node, "train") for node in grid.get_node_ids()]
            replies = [reply.content["arrays"] for reply in grid.send_and_receive(messages)]
            each_round.append([{n: a.numpy().tolist() for n, a in r.items()} for r in replies])
        return each_round

    with closing(RayGrid(app, 3, RunConfig(workers=2))) as grid:
        assert rounds(grid) == rounds(InlineGrid(app, 3))
        # Several messages to one node at a time: one of the resulting states is kept.
        content = RecordDict({"arrays": ArrayRecord({"large": Array(WEIGHTS)})})
        content["config"] = ConfigRecord({"keep": "large"})
        node = next(iter(grid.get_node_ids()))
        replies = grid.send_and_receive([Message(content, node, "train") for _ in range(6)])
        assert not any(reply.has_error() for reply in replies)


@pytest.mark.nightly
@pytest.mark.usefixtures("on_running_ray")
def test_the_slowest_client_of_the_previous_round_starts_first():
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        begun = time.time()
        time.sleep(0.3 if context.node_config["partition-id"] == 4 else 0.0)
        record = MetricRecord({"begun": begun, "num-examples": 1})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    with closing(RayGrid(app, 5, RunConfig(workers=1))) as grid:
        ask(grid)
        begun = {k: reply.content["metrics"]["begun"] for k, reply in ask(grid).items()}
    assert min(begun, key=begun.__getitem__) == 4


def test_a_ray_instance_of_the_user_is_not_used(monkeypatch):
    class Running:
        is_initialized = staticmethod(lambda: True)

    monkeypatch.setattr(ray_cluster, "prepare_ray", lambda: Running)
    with pytest.raises(EngineError, match=r"Ray already runs.*ray\.shutdown"):
        ray_cluster.connect("", 1)


def test_queued_messages_are_discarded_after_the_timeout():
    """Messages are queued while a worker is busy with an earlier message."""

    class Busy(RayGrid):
        def __init__(self):
            InlineGrid.__init__(self, ClientApp(), 2)
            self._queue = TaskQueue()
            self._workers = SimpleNamespace(ready=[])

        def push_messages(self, messages):
            ids = list(InlineGrid.push_messages(self, messages))
            self._queue.add(Task(self._pending[i], {}) for i in ids)
            return ids

        def pull_messages(self, message_ids):
            return []

    grid = Busy()
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    assert send_and_receive(grid, messages, 0.0, threading.Event()) == []
    assert not grid._queue
    (task, *_) = (Task(message, {}) for message in messages)
    grid._queue.put_back([task])  # its worker died
    assert not grid._queue, "a discarded message is queued again"


def test_replies_are_kept_until_their_message_ids_are_pulled():
    """As in Flower's grids; only replies to discarded messages are dropped."""

    class Answered(RayGrid):
        def __init__(self, replies):
            InlineGrid.__init__(self, ClientApp(), 3)
            self._arrived, self._queue = {}, TaskQueue()
            worker = Worker(None, None, dict(enumerate(replies)))
            self._workers = SimpleNamespace(ready=[worker], starting={})
            self._ray = SimpleNamespace(wait=lambda references, **_: (references, []))

        def _receive(self, worker, reference):
            return [worker.batches.pop(reference)]

        def _replace_stuck_workers(self):
            pass

        def _hand_out(self):
            pass

    queries = [Message(RecordDict(), node, "query") for node in (1000, 1001, 1002)]
    for number, query in enumerate(queries):
        set_ids(query, message_id=f"query-{number}")
    replies = [Message(RecordDict(), reply_to=query) for query in queries]
    grid = Answered(replies)
    grid.discard(["query-2"])
    assert grid.pull_messages(["query-1"]) == [replies[1]]
    assert grid.pull_messages(["query-1"]) == []
    assert grid.pull_messages(["query-0", "query-2"]) == [replies[0]]
    assert not grid._arrived


@pytest.mark.parametrize("kind", ["OutOfDiskError", "ObjectStoreFullError"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_full_object_store_ends_the_run_and_names_the_node(kind, remote):
    errors = ray_cluster.prepare_ray().exceptions
    error = getattr(errors, kind)("full")
    if remote:  # raised in a worker
        error = errors.RayTaskError("answer", "trace", error).as_instanceof_cause()

    def fail(_: Any) -> None:
        raise error

    class Full(RayGrid):
        def __init__(self) -> None:
            self._ray = SimpleNamespace(exceptions=errors, get=fail, put=fail)

    worker = SimpleNamespace(batches={"r": Batch([], [])}, node=SimpleNamespace(name="10.0.0.2"))
    node = r"10\.0\.0\.2" if remote else _HERE
    with pytest.raises(EngineError, match=f"object store on {node} is full"):
        Full()._receive(worker, "r")
    with pytest.raises(EngineError, match=f"object store on {_HERE} is full"):
        Full()._put(1)


def test_an_app_that_cannot_be_pickled_is_refused_and_ray_is_stopped(monkeypatch):
    app, lock, stopped = ClientApp(), threading.Lock(), []
    ray = SimpleNamespace(put=None, shutdown=lambda: stopped.append(True))
    monkeypatch.setattr("fairflower.engines.ray.connect", lambda *_: ray)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with lock:
            return Message(RecordDict(), reply_to=message)

    with pytest.raises(EngineError, match=r"cannot be sent to Ray's workers \(TypeError"):
        RayGrid(app, 2, RunConfig(workers=1))
    assert stopped == [True]


@pytest.mark.nightly
@pytest.mark.usefixtures("on_running_ray")
def test_the_timeout_is_kept_and_a_late_reply_does_not_change_a_newer_state(tmp_path, monkeypatch):
    monkeypatch.setattr("fairflower.engines.ray._LATE", TIMEOUT)  # its worker is not replaced
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen = context.state.config_records.setdefault("seen", ConfigRecord({"rounds": []}))
        config = message.content.config_records["config"]
        if config["round"] == 1 and context.node_config["partition-id"] == 0:
            while not (tmp_path / "second").exists():
                time.sleep(0.01)
        seen["rounds"] = [*seen["rounds"], config["round"]]
        metrics = MetricRecord({"rounds": list(seen["rounds"])})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    with closing(RayGrid(app, 2, RunConfig(workers=2))) as grid:
        while len(grid._workers.ready) < 2:  # a single worker would be blocked in round 1
            grid._workers.collect_started()
            time.sleep(0.01)
        assert ask(grid, round=0).keys() == {0, 1}
        assert ask(grid, timeout=5, round=1).keys() == {1}  # without the blocked client
        assert ask(grid, timeout=20, round=2).keys() == {0, 1}  # by the other worker
        (tmp_path / "second").touch()
        time.sleep(1)
        actual = ask(grid, round=3)[0].content["metrics"]["rounds"]
    assert actual == [0, 2, 3]


@pytest.mark.usefixtures("on_running_ray")
def test_no_client_is_left_out_because_another_one_hangs(monkeypatch, caplog):
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = context.node_config["partition-id"]
        while message.content["config"].get("hangs") == client:
            time.sleep(1)
        time.sleep(0.02 if client == 5 else 0.01)  # client 5 is the first of the first batch
        count = context.state.config_records.setdefault("seen", ConfigRecord({"n": 0}))
        count["n"] = int(count["n"]) + 1
        metrics = MetricRecord({"n": count["n"]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def ask_others(grid: RayGrid, hangs: int) -> None:
        """Wait until all other clients have replied, and discard the message to this one."""
        content = RecordDict({"config": ConfigRecord({"hangs": hangs})})
        waiting = set(grid.push_messages([Message(content, n, "train") for n in grid.contexts]))

        def answered() -> bool:
            replies = grid.pull_messages(waiting)
            waiting.difference_update(reply.metadata.reply_to_message_id for reply in replies)
            return len(waiting) == 1

        wait_for(answered, f"replies of all clients but {hangs}")
        grid.discard(waiting)

    def counts(replies: dict[int, Message]) -> dict[int, int]:
        return {k: reply.content["metrics"]["n"] for k, reply in replies.items()}

    monkeypatch.setattr("fairflower.engines.ray._LATE", 0)
    with closing(RayGrid(app, 20, RunConfig(workers=2))) as grid:
        # In the first round the durations are unknown, and no message is sent behind another.
        ask_others(grid, hangs=0)
        assert caplog.text.count("has not answered") == 1  # after its message was discarded
        assert counts(ask(grid)) == {0: 1} | dict.fromkeys(range(1, 20), 2)
        # Now there are batches. Those of the hanging client's worker are moved.
        monkeypatch.setattr("fairflower.engines.ray._STUCK", 2)
        ask_others(grid, hangs=5)
        assert caplog.text.count("has not answered") >= 3
        assert counts(ask(grid)) == {0: 3, 5: 3} | dict.fromkeys({*range(1, 20)} - {5}, 4)
