"""Clients that run out of memory on a simulated GPU: a retry with fewer workers, or an error."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest
import ray
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from out_of_memory_client import ERROR, REASON

from fairflower.config import RunConfig
from fairflower.engines.ray import RayGrid
from fairflower.errors import GpuMemoryError

pytestmark = pytest.mark.slow


def app_that_needs(share: float) -> ClientApp:
    """Return clients that need this share of a GPU and count their rounds."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        got = ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)
        count = context.state.config_records.setdefault("seen", ConfigRecord({"n": 0}))
        count["n"] = int(count["n"]) + 1
        if got < share:
            raise torch.OutOfMemoryError(ERROR)
        metrics = MetricRecord({"share": got, "n": count["n"], "pid": os.getpid()})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def train_round(grid: RayGrid) -> list[dict[str, Any]]:
    nodes = grid.get_node_ids()
    messages = [Message(RecordDict({"config": ConfigRecord()}), node, "train") for node in nodes]
    return [dict(reply.content["metrics"]) for reply in grid.send_and_receive(messages)]


def workers(share: float, **settings: Any) -> RayGrid:
    """Return a grid of two workers that share a simulated GPU."""
    config = RunConfig(workers=2, client_gpus=0.5, **settings)
    return RayGrid(app_that_needs(share), 6, config, num_gpus=1)


def test_clients_without_gpu_memory_are_retried_with_fewer_workers(caplog):
    with closing(workers(1.0)) as grid:
        first, second = train_round(grid), train_round(grid)
    assert [reply["n"] for reply in first] == [1] * 6  # from their states before the failure
    assert [reply["n"] for reply in second] == [2] * 6
    assert {reply["share"] for reply in first + second} == {1.0}
    assert len({reply["pid"] for reply in first + second}) == 1
    message = f"A client ran out of GPU memory ({REASON}). It is retried once, and from now on 1"
    assert message in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize(("share", "retry"), [(2.0, True), (1.0, False)])
def test_a_client_without_enough_gpu_memory_ends_the_run(share, retry, caplog):
    """After a retry, or at once if ``retry`` is false."""
    with (
        closing(workers(share, gpu_memory_errors="retry" if retry else "stop")) as grid,
        pytest.raises(GpuMemoryError) as caught,
    ):
        train_round(grid)
    assert ("It is retried once" in caplog.text) == retry
    assert f"({REASON}). Resume the run with fewer parallel clients" in str(caught.value)


@pytest.mark.nightly
def test_a_client_without_enough_memory_on_a_gpu_of_its_own_ends_the_run(caplog):
    app = app_that_needs(2.0)
    with (
        closing(RayGrid(app, 4, RunConfig(workers=2, client_gpus=1.0), num_gpus=2)) as grid,
        pytest.raises(GpuMemoryError),
    ):
        train_round(grid)
    assert "It is retried" not in caplog.text
