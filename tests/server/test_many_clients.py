"""Work that does not grow faster than the number of clients, counted instead of timed."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from flwr.app import ConfigRecord, Message, RecordDict

import fairflower as ff
from fairflower import arguments
from fairflower.client_app import app as client_app
from fairflower.data import Federation, prepare
from fairflower.engines.inline import InlineGrid, send_and_receive
from fairflower.engines.ray import RayGrid
from fairflower.engines.ray_cluster import Task, TaskQueue
from fairflower.errors import ConfigError
from fairflower.server import contents
from fairflower.server.discovery import NodeDiscovery
from fairflower.server.folder import RunFolder
from fairflower.server.registration import register_clients


class Ids(set[str]):
    """Ids of messages; a grid may look for an id, but not go through all of them at each poll."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all ids were read")


def queries(grid: InlineGrid) -> list[Message]:
    content = RecordDict({"config": ConfigRecord()})
    return [Message(content, node, "query") for node in grid.get_node_ids()]


def test_a_poll_of_our_engines_does_not_read_all_ids_that_are_waited_for() -> None:
    grid = InlineGrid(client_app, 5)
    ids = Ids(grid.push_messages(queries(grid)))
    assert len([reply for _ in range(5) for reply in grid.pull_messages(ids)]) == 5
    arrived: Any = SimpleNamespace(_arrived={"b": "reply", "other": "late"})
    assert RayGrid.pull_messages(arrived, Ids("abc")) == ["reply"]
    assert [*arrived._arrived] == ["other"]


def test_the_ids_that_are_waited_for_are_not_copied_at_each_poll() -> None:
    asked: list[Any] = []

    class Noting(InlineGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            asked.append(message_ids)
            return super().pull_messages(message_ids)

    grid = Noting(client_app, 20)
    assert len(send_and_receive(grid, queries(grid), 10, threading.Event())) == 20
    assert len(asked) == 20
    assert all(ids is asked[0] for ids in asked)


@pytest.mark.parametrize("seconds", [None, 1.0, 0.001])
def test_batches_of_tasks_are_chosen_without_adding_up_all_that_wait(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without known durations, with long tasks, and with short ones that share batches."""
    grid, queue, count = InlineGrid(client_app, 500), TaskQueue(), Counter[str]()
    tasks = [Task(message, {}) for message in queries(grid)]
    expected = TaskQueue._expected

    def counted(self: TaskQueue, task: Task) -> float:
        count["tasks"] += 1
        return expected(self, task)

    if seconds:
        for task in tasks:
            queue.note(task, seconds)
    queue.add(tasks)
    monkeypatch.setattr(TaskQueue, "_expected", counted)
    sizes = []
    while queue:
        sizes.append(len(queue.next_batch(2, 0.05)))
    assert sum(sizes) == 500
    assert count["tasks"] < 10 * 500
    assert (max(sizes) > 1) == (seconds == 0.001)
    assert sizes == sorted(sizes, reverse=True), "smaller batches at the end of a round"


def test_our_engines_ask_one_client_for_all() -> None:
    by_asking = register_clients(
        NodeDiscovery(InlineGrid(client_app, 40), 10, threading.Event()), 40
    )
    grid = InlineGrid(client_app, 40)
    grid.have_same_data = True
    sent: list[Message] = []
    push = grid.push_messages
    grid.push_messages = lambda messages: push(sent.extend(messages) or sent)  # type: ignore[func-returns-value, method-assign]
    assert register_clients(NodeDiscovery(grid, 10, threading.Event()), 40) == by_asking
    assert len(sent) == 1


def test_if_the_one_client_cannot_answer_the_others_are_asked() -> None:
    grid = InlineGrid(client_app, 3)
    grid.have_same_data = True
    first = next(iter(grid.contexts))
    grid.contexts[first].node_config = {}
    with pytest.raises(ConfigError, match=rf"2 of 3 (?s:.*)missing: \[0\](?s:.*)node {first}: "):
        register_clients(NodeDiscovery(grid, 0.2, threading.Event()), 3)


@pytest.mark.parametrize("by", ["server", "clients"])
def test_only_sampled_clients_are_opened_in_a_run(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, opened, grids = Counter[str](), set[int](), []
    deliver, splits, begin = InlineGrid._deliver, Federation.splits, InlineGrid.__init__

    def delivered(self: InlineGrid, message: Message) -> Message:
        kinds[message.metadata.message_type] += 1
        return deliver(self, message)

    def read(self: Federation, client: int, *names: str) -> Any:
        opened.add(client)
        return splits(self, client, *names)

    def begun(self: InlineGrid, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        grids.append(self)

    monkeypatch.setattr(InlineGrid, "_deliver", delivered)
    monkeypatch.setattr(InlineGrid, "__init__", begun)
    monkeypatch.setattr(Federation, "splits", read)
    settings = {**runs.SMALL, "data.clients-per-domain": 10, "data.examples-per-client": 5}
    settings |= {"evaluate.by": by, "fraction-train": 0.05, "evaluate.every": 5, "seed": 7}
    ff.run(settings=settings, output_dir=tmp_path)
    (grid,) = grids
    assert kinds["query"] == 1
    assert kinds["train"] == 4
    created = {node for node, context in grid.contexts.data.items() if context}
    assert len(grid.contexts) == 40
    if by == "server":
        assert len(opened) <= 4
        assert len(created) <= 5


def test_contexts_are_a_mapping_that_can_be_changed() -> None:
    contexts = InlineGrid(client_app, 3, {"a": 1}).contexts
    nodes = [*contexts]
    assert [contexts[node].node_config["partition-id"] for node in nodes] == [0, 1, 2]
    assert contexts[nodes[0]] is contexts[nodes[0]]
    assert contexts[nodes[0]].state is not contexts[nodes[1]].state
    contexts[5] = contexts.pop(nodes[2])
    assert [*contexts] == [*nodes[:2], 5]
    assert contexts[5].run_config == {"a": 1}
    assert nodes[2] not in contexts


def test_the_clients_in_run_json_are_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []
    dumps = json.dumps

    def noted(value: Any, **options: Any) -> str:
        encoded.append(value)
        return dumps(value, **options)

    monkeypatch.setattr("fairflower.server.folder.json", SimpleNamespace(dumps=noted))
    folder = runs.run(runs.config(tmp_path))
    facts = json.loads((folder / "run.json").read_text())
    assert [c["client_id"] for c in facts["clients"]] == [0, 1, 2, 3]
    assert facts == {**facts, "status": "completed", "rounds": 2}
    lines = [value for value in encoded if "client_id" in value]
    assert [json.loads(dumps(line)) for line in lines] == facts["clients"]
    assert not any(value.get("clients") for value in encoded if isinstance(value, dict))


def test_run_json_is_not_written_for_each_client_with_an_undefined_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Counter[int]()
    write = RunFolder._write_facts
    for clients in (1, 4):

        def written(self: RunFolder, clients: int = clients) -> None:
            writes[clients] += 1
            write(self)

        monkeypatch.setattr(RunFolder, "_write_facts", written)
        settings = {"data.name": "heart-disease", "data.groups": "sex", "run-name": f"{clients}"}
        settings |= {"data.clients-per-domain": clients, "data.examples-per-client": 6}
        folder = runs.run(runs.config(tmp_path, **settings), nodes=4 * clients)
        undefined = json.loads((folder / "run.json").read_text())["undefined_metrics"]
        assert sum(where.startswith("client ") for where in undefined) >= clients
    assert writes[1] == writes[4]


def test_types_of_the_entries_of_run_json_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs.run(runs.config(tmp_path))
    asked: list[Any] = []
    hints = arguments.get_type_hints
    monkeypatch.setattr(
        arguments, "get_type_hints", lambda kind, **o: asked.append(kind) or hints(kind, **o)
    )
    arguments._fields_of.cache_clear()
    contents.read_facts(folder)
    assert len(asked) == len(set(asked))


def test_clients_with_equal_counts_share_them_in_memory() -> None:
    config = runs.config(Path())
    federation = prepare(config.data)
    text = federation.to_json()
    again = Federation.from_json(text, federation.folder)
    assert again == federation
    entries = json.loads(text)
    entries["clients"] = [{**entries["clients"][0], "client_id": k} for k in range(3)]
    first, *others = Federation.from_json(json.dumps(entries), federation.folder).clients
    assert all(client.class_counts is first.class_counts for client in others)
    for wrong in ({}, {"class_counts": 3}, {**entries["clients"][0], "more": 1}, 5):
        damaged = json.dumps({**entries, "clients": [wrong]})
        with pytest.raises((TypeError, ValueError, KeyError)):
            Federation.from_json(damaged, federation.folder)
