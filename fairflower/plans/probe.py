"""GPU memory of a run, measured in a client's first epochs in a separate process."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, Message

from fairflower.aggregation.messages import add_client_config
from fairflower.arrays import record_of
from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.config.run import tested_split
from fairflower.config.settings import ParticipationConfig
from fairflower.data import prepare
from fairflower.engines.inline import FIRST_NODE, InlineGrid
from fairflower.errors import ConfigError, EngineError
from fairflower.server.setup import set_up
from fairflower.training.gpus import free_memory, out_of_memory, peak_memory

#: Factor applied to the measured bytes, because later rounds and fragmentation need more.
_MARGIN = 1.2


class Need(NamedTuple):
    """GPU memory needed by a client's process and the server's tests, in bytes, with a margin."""

    client: int
    server: int


class Room(NamedTuple):
    """Free memory of a GPU in bytes, and the memory that runs need."""

    free: int
    need: Need

    def clients(self, gpus: int = 1) -> int:
        """Return how many clients fit on ``gpus`` GPUs if one also runs the server's tests."""
        client = max(self.need.client, 1)
        return max(1, (self.free - self.need.server) // client) + (gpus - 1) * (self.free // client)

    def runs(self) -> int:
        """Return how many runs fit if each run trains one client at a time."""
        return max(1, self.free // max(self.need.client + self.need.server, 1))


def measure(configs: Sequence[RunConfig], device: torch.device) -> Room:
    """Measure the GPU memory that runs with different methods need; return the largest need.

    For each run, a new process trains the largest client for two rounds of one epoch each, and
    tests the model.
    Raises ``ConfigError`` if not even a single client fits on the GPU.
    """
    free = free_memory(device)
    needs = in_process(tuple(configs), device, free)
    for config, need in zip(configs, needs, strict=True):
        if need.client > free:
            raise does_not_fit(config, need.client, free)
    return Room(free, Need(*map(max, zip(*needs, strict=True))))


def in_process(configs: Sequence[RunConfig], device: torch.device, free: int) -> list[Need]:
    """Call `probe` for each config in a new process."""
    context = multiprocessing.get_context("spawn")
    needs = []
    for config in configs:
        # One process for each config, so that methods do not share reserved memory.
        with without_main(), ProcessPoolExecutor(1, context) as process:
            try:
                needs.append(process.submit(probe, config, device, free).result())
            except BrokenProcessPool as error:
                raise EngineError(
                    "The process that measures a client's memory died. Set client-gpus to the "
                    "fraction of a GPU per client, or --jobs to the number of parallel runs."
                ) from error
    return needs


def probe(config: RunConfig, device: torch.device, free: int) -> Need:
    """Train the largest client on ``device``, which has ``free`` bytes, and test the model.

    A client may keep its last model, so the second of the two rounds can need more memory.
    """
    train = dataclasses.replace(config.train, local_epochs=min(1, config.train.local_epochs))
    data = prepare(config.data)
    sizes = [client.num_examples for client in data.clients]
    config = dataclasses.replace(
        config,
        train=train,
        resume="",
        # The largest client trains in every round, and sends its model as it is.
        fraction_train=1.0,
        participation=ParticipationConfig(),
        secure_aggregation=False,
    )
    grid = InlineGrid(client_app, len(sizes))
    grid.have_same_data = True
    setup = set_up(grid, config, None, threading.Event())
    arrays = record_of(setup.evaluator.arrays())
    settings = ConfigRecord(dict(setup.settings()))
    largest, split = sizes.index(max(sizes)), tested_split(config.to_flat())

    def ask(messages: Iterable[Message]) -> None:
        (message,) = (m for m in messages if m.metadata.dst_node_id == FIRST_NODE + largest)
        add_client_config(message, "config", {"client-id": largest})
        (reply,) = grid.send_and_receive([message])
        if reply.has_error():
            raise ConfigError(str(reply.error.reason).split("\nMessage: ")[-1])

    try:
        for server_round in (1, 2):
            ask(setup.strategy.configure_train(server_round, arrays, settings, grid))
        if config.evaluate.by != "server":
            settings = ConfigRecord({**settings, "split": split})
            ask(setup.strategy.configure_evaluate(2, arrays, settings, grid))
        client = max(free - free_memory(device), peak_memory(device))
        if config.evaluate.by != "clients":
            setup.evaluator(setup.evaluator.arrays(), split)
    except (RuntimeError, ConfigError) as error:
        if not out_of_memory(str(error)):
            raise
        raise does_not_fit(config, peak_memory(device), free, "more than ") from error
    server = max(peak_memory(device) - client, 0)
    return Need(int(_MARGIN * client), int(_MARGIN * server))


def does_not_fit(config: RunConfig, needed: int, free: int, more: str = "") -> ConfigError:
    """Return the error for a model that is too large to be trained on the GPU."""
    return ConfigError(
        f"{config.label} with {config.model.name}: a single client needs {more}{needed:,} bytes "
        f"of GPU memory, but only {free:,} are free. Decrease train.batch-size or "
        "measure.memory-mb, stop other programs on the GPU (`nvidia-smi` lists them), or set "
        "train.device = 'cpu'."
    )


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the user's script, so that processes started in this context do not execute it.

    Nor do they import the libraries of Python from the working directory.
    """
    main, safe = sys.modules["__main__"], os.environ.get("PYTHONSAFEPATH", "")
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        sys.modules["__main__"], os.environ["PYTHONSAFEPATH"] = main, safe  # "" has no effect
