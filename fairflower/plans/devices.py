"""Use of this machine's GPUs: how many clients or runs share a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fairflower.config import RunConfig
from fairflower.config.text import counted
from fairflower.engines.ray_cluster import share_of, worker_capacity
from fairflower.errors import ConfigError
from fairflower.numerics.threads import cpus
from fairflower.plans import probe
from fairflower.training.device import choose_device
from fairflower.training.gpus import gpu_names, unused_gpu


@dataclass(frozen=True)
class Placement:
    """Config for the engine, number of GPUs for Ray, and a line about the device to print."""

    config: RunConfig
    num_gpus: int | None = None
    line: str = ""


def place_clients(runs: Sequence[RunConfig], num_clients: int) -> Placement:
    """Choose the device of the clients, for runs that are executed one after another.

    ``client-gpus = "auto"`` is replaced by a fraction of a GPU, so that as many clients train in
    parallel as GPU memory and CPUs allow. A number stays as it is.

    Raises
    ------
    ConfigError
        If no GPU of this machine can hold a client, or PyTorch does not accept the GPU's driver.
    """
    config = runs[0]
    if config.ray_address:
        return _on_cluster(config)
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
    fitting = _room(_methods(runs), device).clients(1 if pinned else count)
    slots = config.workers or cpus() // config.client_cpus
    workers = max(1, min(slots, fitting, num_clients))
    line = f"{name}, {counted(workers, 'client')} at a time"
    if pinned:  # Ray would hide this GPU from workers that get another GPU
        return Placement(replace(config, client_gpus=0.0, workers=workers), None, line)
    share = share_of(-(-workers // count))
    return Placement(replace(config, client_gpus=share, workers=workers), count, line)


def runs_that_fit(runs: Sequence[RunConfig]) -> int | None:
    """Return how many parallel runs fit in the GPU's memory; None if there is no such limit.

    Raises ``ConfigError`` if not even a single client fits.
    """
    device = choose_device(runs[0].train.device)
    return None if device.type != "cuda" else _room(_methods(runs), device).runs()


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


def _methods(runs: Sequence[RunConfig]) -> tuple[RunConfig, ...]:
    """Return a run for each combination of client (with arguments) and set of measurements."""
    kinds = {(run.client.label, run.strategy.make()._measurements): run for run in reversed(runs)}
    return tuple(kinds.values())


@functools.lru_cache(maxsize=4)
def _room(runs: tuple[RunConfig, ...], device: torch.device) -> probe.Room:
    return probe.measure(runs, device)


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


def _on_cluster(config: RunConfig) -> Placement:
    line = ""
    if config.client_gpus == "auto" and config.train.device != "cpu":
        line = (
            "cpu for clients, because client-gpus = 'auto' does not use the GPUs of a cluster. "
            "To use them, set client-gpus to the fraction of a GPU per client"
        )
    return Placement(config, line=line)
