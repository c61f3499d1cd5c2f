"""GPUs of this machine as PyTorch sees them: names, memory, and why a GPU is not used."""

from __future__ import annotations

import os
import re
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
    found = re.search(r"\d+(\.\d+)+", _DRIVER.read_text()) if _DRIVER.exists() else None
    raise ConfigError(
        f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) cannot use this machine's GPU: "
        f"{_reason()} The NVIDIA driver is {found[0] if found else 'unknown'}. Update the driver, "
        "install a PyTorch build for it (https://pytorch.org), or set train.device = 'cpu'."
    )


def _reason() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().split("\n")[0].rstrip(".") + "."
    return "CUDA fails to initialize."
