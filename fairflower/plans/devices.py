"""Use of this machine's GPUs: how many clients or runs share one, by the memory that they need.

The memory is measured in a client's first epochs, in a separate process.
"""

import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from fairflower.config.text import counted
from fairflower.data import prepare
from fairflower.engines.inline import FIRST_NODE, InlineGrid
from fairflower.engines.ray_cluster import share_of, worker_capacity
from fairflower.errors import ConfigError, EngineError
from fairflower.numerics.threads import cpus
from fairflower.server.setup import set_up
from fairflower.training.device import (
    choose_device,
    free_memory,
    gpu_names,
    out_of_memory,
    peak_memory,
    unused_gpu,
)

#: Factor applied to the measured bytes, because later rounds and fragmentation need more.
_MARGIN = 1.2


@dataclass(frozen=True)
class Placement:
    """Config for the engine, number of GPUs for Ray, and a line about the device to print."""

    config: RunConfig
    num_gpus: int | None = None
    line: str = ""


def place_clients(runs: Sequence[RunConfig], num_clients: int) -> Placement:
    """Choose the device of the clients, for runs that are executed one after another.

    ``client-gpus = "auto"`` is replaced by a fraction of a GPU, so that as many clients train in
    parallel as GPU memory and CPUs allow. A number stays as it is. Raises ``ConfigError`` if no GPU
    of this machine can hold a client, or PyTorch does not accept the GPU's driver.
    """
    config = runs[0]
    if config.ray_address:
        unused = config.client_gpus == "auto" and config.train.device != "cpu"
        line = (
            "cpu for clients, because client-gpus = 'auto' does not use the GPUs of a cluster. "
            "To use them, set client-gpus to the fraction of a GPU per client"
        )
        return Placement(config, line=line if unused else "")
    device = choose_device(config.train.device)
    if device.type == "cpu":
        return _without_gpu(config)
    names = ", ".join(dict.fromkeys(gpu_names()))
    name = f"{device.type} ({names})" if names else device.type
    if config.engine == "inline":
        return Placement(config, line=f"{name}, one client at a time")
    if device.type != "cuda" and config.client_gpus == "auto":  # Ray does not count this device
        shared = f"{name}, shared by all clients without a limit"
        return Placement(replace(config, client_gpus=0.0), line=shared)
    count = len(gpu_names())
    if config.client_gpus != "auto":
        return _granted(config, num_clients, name, count)
    pinned = config.train.device.startswith("cuda:")
    free, need = memory(runs, device)
    client = max(need.client, 1)
    others = 0 if pinned else count - 1  # GPUs that do not run the server's tests
    fitting = max(1, (free - need.server) // client) + others * (free // client)
    slots = config.workers or cpus() // config.client_cpus
    workers = max(1, min(slots, fitting, num_clients))
    line = f"{name}, {counted(workers, 'client')} at a time"
    if pinned:  # Ray would hide this GPU from workers that get another GPU
        return Placement(replace(config, client_gpus=0.0, workers=workers), None, line)
    share = share_of(-(-workers // count))
    return Placement(replace(config, client_gpus=share, workers=workers), count, line)


def runs_that_fit(runs: Sequence[RunConfig]) -> int | None:
    """Return how many parallel runs fit in the GPU's memory; None if there is no such limit.

    Each trains one client at a time. Raises ``ConfigError`` if not even a single client fits.
    """
    device = choose_device(runs[0].train.device)
    if device.type != "cuda":
        return None
    free, need = memory(runs, device)
    return max(1, free // max(need.client + need.server, 1))


def parallel_line(runs: Sequence[RunConfig], jobs: int) -> str:
    """Describe the device of parallel runs in one line; "" on a machine without a GPU."""
    device = choose_device(runs[0].train.device)
    if device.type == "cpu":
        return _without_gpu(replace(runs[0], client_gpus="auto")).line
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    line = f"{device}{name}, {counted(jobs, 'run')} at a time"
    others = len(gpu_names()) - 1
    if others > 0 and runs[0].train.device in ("auto", "cuda"):
        line += (
            f"; {others} more GPU{'s are' if others > 1 else ' is'} not used by parallel runs "
            "(--jobs 1 uses all GPUs)"
        )
    return line


def _granted(config: RunConfig, num_clients: int, name: str, count: int) -> Placement:
    """Return the placement for a numeric ``client-gpus``."""
    gpus = float(config.client_gpus)
    if not gpus:
        if config.train.device != "auto":
            return Placement(config, line=f"{name}, shared by all clients without a limit")
        how = 'client-gpus = "auto" uses it'
        return Placement(
            config, line=f"cpu, because client-gpus = 0; {name} is not used by clients ({how})"
        )
    if config.train.device.startswith("cuda:"):
        raise ConfigError(
            f"client-gpus = {gpus:g}, train.device = '{config.train.device}': Ray chooses each "
            "client's GPU, and the client sees no other. Set train.device = 'auto', or, to train "
            "on this GPU, client-gpus = 'auto' or 0."
        )
    if gpus > count:
        raise ConfigError(
            f"client-gpus = {gpus:g}: this machine has {counted(count, 'GPU')}, {name}. Set "
            f"client-gpus to at most {count}, or to 'auto'."
        )
    fitting = worker_capacity({"CPU": cpus(), "GPU": count}, config.client_cpus, gpus)
    workers = min(fitting, config.workers or fitting, num_clients)
    line = f"{name}, {gpus:g} of a GPU per client, {workers} clients at a time"
    return Placement(config, count, line)


def _without_gpu(config: RunConfig) -> Placement:
    """Return a placement on the CPU; its line says why if the machine has a GPU."""
    why = unused_gpu() if config.train.device == "auto" else ""
    if config.client_gpus not in ("auto", 0.0) and config.engine != "inline":
        asked = f"client-gpus = {config.client_gpus:g}"
        if config.train.device == "cpu":
            raise ConfigError(
                f"{asked}: train.device = 'cpu' does not use a GPU. Remove one of the two settings."
            )
        why = why or "PyTorch does not find a GPU"
        raise ConfigError(f"{asked}: {why}. Set client-gpus = 'auto' to train on the CPU.")
    return Placement(config, line=f"cpu: {why}" if why else "")


# --- memory --------------------------------------------------------------------------------------


class Need(NamedTuple):
    """GPU memory needed by a client's process and the server's tests, in bytes, with a margin."""

    client: int
    server: int


def memory(runs: Sequence[RunConfig], device: torch.device) -> tuple[int, Need]:
    """Return the free memory of a GPU in bytes, and the largest need of one of the runs' methods.

    Methods are combinations of a client (with arguments) and a set of measurements. Raises
    ``ConfigError`` if not even a single client fits on the GPU.
    """
    kinds = {(run.client.label, run.strategy.make()._measurements): run for run in reversed(runs)}
    return _measured(tuple(kinds.values()), device)


@functools.lru_cache(maxsize=4)
def _measured(configs: tuple[RunConfig, ...], device: torch.device) -> tuple[int, Need]:
    free = free_memory(device)
    needs = in_process(configs, device, free)
    for config, need in zip(configs, needs, strict=True):
        if need.client > free:
            raise does_not_fit(config, need.client, free)
    return free, Need(*map(max, zip(*needs, strict=True)))


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
    sizes = [client.num_examples for client in prepare(config.data).clients]
    config = replace(
        config,
        train=replace(config.train, local_epochs=min(1, config.train.local_epochs)),
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
