"""Choice of a client's device and number of threads."""

from __future__ import annotations

import os
import re
import sys

import torch

from fairflower.errors import ConfigError


def choose_device(name: str = "auto", *, option: str = "") -> torch.device:
    """Return the device that ``train.device`` or a command-line ``option`` names.

    The name is ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps`` (a Mac's GPU). ``auto`` means
    ``cuda`` if there is a GPU (for a Ray worker: if Ray assigned a GPU to it), and otherwise
    ``cpu``. It never means ``mps``, for which PyTorch has neither float64 (`float64_on`) nor
    deterministic kernels. Raises ``ConfigError`` if the name is unknown, or the GPU does not exist.

    Examples
    --------
    >>> choose_device("cpu")
    device(type='cpu')
    """
    given = f"{option} {name!r}" if option else f"train.device = {name!r}"
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise ConfigError(f"{given}: expected auto, cpu, cuda, cuda:N or mps.")
    if name not in ("cpu", "mps"):  # makes cuBLAS deterministic; read when the GPU is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if name == "auto":
        granted = _granted_by_ray("GPU")
        forbidden = granted is not None and granted <= 0
        return torch.device("cuda" if torch.cuda.is_available() and not forbidden else "cpu")
    device = torch.device(name)
    if device.type == "mps" and not torch.backends.mps.is_available():
        remedy = f"{option} auto" if option else "train.device = 'auto'"
        raise ConfigError(f"{given}: PyTorch finds no Apple GPU on this machine. Use {remedy}.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            remedy = "train.device = 'auto', or grant clients a GPU (client-gpus, on Ray)"
            raise ConfigError(
                f"{given}: this process sees {count} CUDA device(s). "
                f"Use {f'{option} auto' if option else remedy}."
            )
    return device


def float64_on(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64, or float32 on ``mps``, which lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def limit_threads(n: int = 1) -> int:
    """Set torch's number of threads, and return it.

    In a Ray worker it is the number of CPUs that Ray assigned to the worker, and otherwise ``n``.
    More threads than free cores slow down training.
    """
    granted = _granted_by_ray("CPU")
    threads = max(1, n if granted is None else int(granted))
    torch.set_num_threads(threads)
    return threads


def _granted_by_ray(resource: str) -> float | None:
    """Return how much "CPU" or "GPU" Ray assigned to this worker; None outside of Ray."""
    ray = sys.modules.get("ray")  # always imported in a worker
    # Outside of workers another thread may still be importing it.
    if ray is None or not getattr(ray, "is_initialized", bool)():
        return None
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    return float(context.get_assigned_resources().get(resource, 0))
