"""Processor, kernels and library versions, which influence the bits of a run's result."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VERSIONS_OF = ("fairflower", "flwr", "flwr-datasets", "torch", "torchvision", "ray", "numpy")

#: Instruction sets by which PyTorch, oneDNN and MKL choose their kernels.
INSTRUCTION_SETS = ("avx2", "avx512f", "amx_tile", "asimd", "sve", "sve2")

#: Processor flags of units that compute with bfloat16.
BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}

#: The signal of a closed terminal; empty on Windows, which has none.
HANGUP: tuple[int, ...] = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()

_CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's numbers depend on."""
    installed = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return the machine's system, its cores, and what else affects how sums are rounded.

    The processor's name includes family and model, as several generations share a name.
    ``kernels`` is the instruction set of PyTorch's kernels; other libraries choose theirs by
    ``instructions``. ``gpu`` is missing if ``device`` is ``"cpu"``.
    """
    import torch  # late: reports do not need torch

    name, instructions = processor(_CPUINFO.read_text() if _CPUINFO.exists() else _sysctl())
    facts = {
        "system": platform.platform(terse=True),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "processor": name or platform.processor() or platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "instructions": " ".join(instructions),
    }
    if device != "cpu" and device != "mps" and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(device if device != "auto" else None)
    return facts


def processor(cpuinfo: str) -> tuple[str, list[str]]:
    r"""Return the name of the first processor in ``/proc/cpuinfo``, and its `INSTRUCTION_SETS`.

    >>> processor("model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t: 1\nflags\t: avx avx2")
    ('AMD EPYC family 25 model 1', ['avx2'])
    """
    first = cpuinfo.strip().split("\n\n")[0]
    facts = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*?)[ \t]*$", first, re.MULTILINE))
    # Arm processors have numbers but no name.
    keys = ("cpu family", "model", "CPU implementer", "CPU part")
    numbers = [f"{key.removeprefix('cpu ')} {facts[key]}" for key in keys if key in facts]
    flags = set((facts.get("flags") or facts.get("Features", "")).split())
    return (
        " ".join([*([facts["model name"]] if "model name" in facts else []), *numbers]),
        [name for name in INSTRUCTION_SETS if name in flags],
    )


def has_bf16(cpuinfo: str) -> bool:
    r"""Return whether ``/proc/cpuinfo`` lists units that compute with bfloat16.

    >>> has_bf16("flags\t: avx2 avx512_bf16"), has_bf16("Features\t: asimd"), has_bf16("")
    (True, False, False)
    """
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return bool(flags and BF16_UNITS & set(flags[1].split()))


def about_precision(precision: str, device: torch.device) -> str:
    """Return a note about ``train.precision``, "" for float32."""
    if precision == "float32":
        return ""
    note = (
        f"train.precision = {precision!r}: only local steps use 16 bits; tests, measurements, "
        "weights and messages are float32."
    )
    if device.type == "cuda":
        import torch  # late: reports do not need torch

        units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        units = has_bf16(_CPUINFO.read_text() if _CPUINFO.exists() else "")
    if not units:
        note += (
            " This machine has no known units for bfloat16: clients on it are faster with "
            "'float32'."
        )
    return note


def _sysctl() -> str:
    """Return macOS's processor name in the format of ``/proc/cpuinfo``."""
    try:
        answer = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"model name : {answer.stdout.strip()}"


def release_memory() -> None:
    """Return free memory pages from glibc to the system.

    glibc keeps freed pages, whose gaps fragment from round to round, so that the process would
    grow. Without glibc nothing is done.
    """
    if platform.system() != "Linux":  # on Windows CDLL(None) is an error
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
