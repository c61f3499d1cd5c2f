"""A client's device and number of threads; GPUs of this machine as PyTorch sees them."""

import os
import re
import sys
from pathlib import Path

import torch

from fairflower.errors import ConfigError

#: Matches PyTorch's errors for a GPU without enough free memory, with the sizes that they name.
_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|MPS)( error:| backend)? out of memory"
    r"(\. Tried to allocate [\d.]+ \w+)?"
    r"(\. GPU \d+ has a total capacity of [\d.]+ \w+ of which [\d.]+ \w+ is free)?"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
)

#: Paths where Linux shows an NVIDIA GPU and the version of its driver.
_DEVICE, _DRIVER = Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version")


def choose_device(name: str = "auto", *, option: str = "") -> torch.device:
    """Return the device that ``train.device`` or a command-line ``option`` names.

    The name is ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps`` (a Mac's GPU). ``auto`` means
    ``cuda`` if there is a GPU (for a Ray worker: if Ray assigned a GPU to it), and otherwise
    ``cpu``. It never means ``mps``, for which PyTorch has neither float64 (`float64_on`) nor
    deterministic kernels. Raises ``ConfigError`` if the name is unknown, or the GPU does not exist.

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
    remedy = f"Use {option} auto." if option else "Use train.device = 'auto'."
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"{given}: PyTorch finds no Apple GPU on this machine. {remedy}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            grant = "" if option else " Or grant clients a GPU (client-gpus, on Ray)."
            raise ConfigError(f"{given}: this process sees {count} CUDA device(s). {remedy}{grant}")
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


def gpu_names() -> list[str]:
    """Return the names of the GPUs that this process can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def free_memory(device: torch.device) -> int:
    """Return the number of free bytes on a GPU; other processes may use them, too."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that this process has reserved on a GPU."""
    return int(torch.cuda.max_memory_reserved(device))


def out_of_memory(text: str) -> str:
    """Return the part of an error's text that says that a GPU is out of memory; "" otherwise.

    >>> out_of_memory("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. See above.")
    'CUDA out of memory. Tried to allocate 2.00 GiB'
    >>> out_of_memory("ValueError: expected 10 classes")
    ''
    """
    match = _OUT_OF_MEMORY.search(text)
    return match[0] if match else ""


def unused_gpu() -> str:
    """Return why PyTorch does not use this machine's GPU and what to do; "" if there is no GPU.

    Raises ``ConfigError`` if there is a GPU, but PyTorch does not support its driver.
    """
    if torch.cuda.is_available() or not _DEVICE.exists():
        return ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides the GPU; remove this variable to use it"
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} was built without CUDA, so the GPU is not used; install "
            "a PyTorch build with CUDA (https://pytorch.org) to use it"
        )
    reason = "CUDA fails to initialize."
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".") + "."
    found = re.search(r"\d+(\.\d+)+", _DRIVER.read_text()) if _DRIVER.exists() else None
    raise ConfigError(
        f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) cannot use this machine's GPU: "
        f"{reason} The NVIDIA driver is {found[0] if found else 'unknown'}. Update the driver, "
        "install a PyTorch build for it (https://pytorch.org), or set train.device = 'cpu'."
    )
