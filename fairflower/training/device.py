"""Choice of a client's device, and of its number of threads."""

from __future__ import annotations

import re
import sys

import torch

from fairflower.errors import ConfigError


def choose_device(name: str = "auto", *, option: str = "") -> torch.device:
    """Turn ``train.device``, or a command's ``option``, into a device that this process may use.

    Parameters
    ----------
    name
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto`` is ``cuda`` where there
        is a GPU that this process, if it is a Ray worker, was granted, else ``cpu``.
    option
        What errors call it on a command line, where it is not ``train.device``.

    Raises
    ------
    ConfigError
        On another name, or a GPU that is not there.
    """
    given = f"{option} {name!r}" if option else f"train.device = {name!r}"
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"{given}: expected auto, cpu, cuda or cuda:N.")
    if name == "auto":
        granted = _granted_by_ray("GPU")
        forbidden = granted is not None and granted <= 0
        return torch.device("cuda" if torch.cuda.is_available() and not forbidden else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            remedy = "train.device = 'auto', or grant clients a GPU (client-gpus, on Ray)"
            raise ConfigError(
                f"{given}: this process sees {count} CUDA device(s). "
                f"Use {f'{option} auto' if option else remedy}."
            )
    return device


def limit_threads(n: int = 1) -> int:
    """Let torch use as many threads as there are CPUs for this process; return how many.

    In a Ray worker that is the number of CPUs that Ray assigned to it, and n
    elsewhere. More threads than free cores make a training step slower, not faster.
    """
    granted = _granted_by_ray("CPU")
    threads = max(1, n if granted is None else int(granted))
    torch.set_num_threads(threads)
    return threads


def _granted_by_ray(resource: str) -> float | None:
    """Share of "CPU" or "GPU" that this Ray worker was assigned; None outside of Ray."""
    ray = sys.modules.get("ray")  # a worker has imported it; others need not
    # Another thread may be in the middle of importing it, which a worker's never is.
    if ray is None or not getattr(ray, "is_initialized", bool)():
        return None
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    return float(context.get_assigned_resources().get(resource, 0))
