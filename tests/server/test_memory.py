"""The server's memory does not grow from round to round."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from pathlib import Path

import pytest
from apps import app_with_handlers
from flwr.app import Array, Context, Message
from resuming import config, session

from fairflower.client_app import app as client_app
from fairflower.machine import release_memory
from fairflower.server import rounds
from fairflower.strategies import STRATEGIES


@pytest.fixture(autouse=True, scope="module")
def _objects_of_these_tests() -> None:
    """The garbage collector ignores what earlier tests left, so that it is quick."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    "strategy",
    [
        *("fedavg", "fedequilibria"),
        *(pytest.param(strategy, marks=pytest.mark.nightly) for strategy in ("fedheal", "fedfv")),
    ],
)
def test_replies_of_earlier_rounds_are_freed_by_garbage_collection(
    strategy: str, tmp_path: Path
) -> None:
    assert strategy in STRATEGIES
    arrays: dict[int, list[weakref.ref[Array]]] = defaultdict(list)
    left: dict[int, int] = {}

    def train(message: Message, context: Context) -> Message:
        server_round = int(message.content["config"]["server-round"])
        reply = client_app(message, context)
        for record in reply.content.array_records.values():
            arrays[server_round] += map(weakref.ref, record.values())
        gc.collect()
        earlier = [a for r in arrays if r < server_round for a in arrays[r]]
        left[server_round] = sum(array() is not None for array in earlier)
        return reply

    session(config(tmp_path, **{"strategy.name": strategy}), app_with_handlers(train=train)).run()
    assert {len(arrays[r]) > 20 for r in (1, 2, 3)} == {True}
    assert left == {1: 0, 2: 0, 3: 0}


def test_replies_are_freed_while_automatic_garbage_collection_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are in reference cycles inside Flower once their records have been read."""
    monkeypatch.setattr(rounds, "_RELEASE_EVERY", -1.0)
    arrays: dict[int, list[weakref.ref[Array]]] = defaultdict(list)
    left: dict[int, int] = {}

    def train(message: Message, context: Context) -> Message:
        server_round = int(message.content["config"]["server-round"])
        reply = client_app(message, context)
        earlier = [a for r in arrays if r < server_round for a in arrays[r]]
        left[server_round] = sum(array() is not None for array in earlier)
        arrays[server_round] += map(weakref.ref, reply.content["arrays"].values())
        return reply

    gc.disable()
    try:
        session(config(tmp_path), app_with_handlers(train=train)).run()
    finally:
        gc.enable()
    assert left == {1: 0, 2: 0, 3: 0}


def anonymous_memory() -> int:
    """Return the bytes of this process's memory that no file backs."""
    (line,) = (row for row in STATUS.read_text().splitlines() if row.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


STATUS = Path("/proc/self/status")


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux reports this memory")
def test_release_memory_returns_free_pages_to_the_system() -> None:
    blocks = [bytearray(60_000) for _ in range(2000)]  # too small for memory mappings of their own
    held = blocks[::20]  # so that the others are not one free block
    before = anonymous_memory()
    blocks.clear()
    release_memory()
    assert before - anonymous_memory() > 80e6
    assert len(held) == 100


def test_a_run_releases_memory_between_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(rounds, "release_memory", lambda: calls.append("released"))
    monkeypatch.setattr(rounds, "_RELEASE_EVERY", -1.0)
    session(config(tmp_path)).run()
    assert len(calls) == 4  # after the test of the first model, and after each of three rounds
