"""What a run's bits depend on beside its config and seed: processor, kernels, libraries."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VERSIONS_OF = ("fairflower", "flwr", "flwr-datasets", "torch", "torchvision", "ray", "numpy")

#: Instruction sets by which PyTorch, oneDNN and MKL choose their kernels.
INSTRUCTION_SETS = ("avx2", "avx512f", "amx_tile", "asimd", "sve", "sve2")

#: Any of them computes with bfloat16.
BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}

_CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine: system, cores, and what decides how its sums are rounded.

    The processor has its family and model, as the name alone may stand for several
    generations. PyTorch's own kernels use the instruction set ``kernels``; by ``instructions``
    other libraries choose theirs. A GPU is named unless ``device`` is ``"cpu"``.
    """
    import torch  # late: reports need none of it

    name, instructions = processor(_CPUINFO.read_text() if _CPUINFO.exists() else _sysctl())
    found = {
        "system": platform.platform(terse=True),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "processor": name or platform.processor() or platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "instructions": " ".join(instructions),
    }
    if device != "cpu" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(device if device != "auto" else None)
    return found


def processor(cpuinfo: str) -> tuple[str, list[str]]:
    r"""The name of ``/proc/cpuinfo``'s first processor, and those of `INSTRUCTION_SETS` it has.

    >>> processor("model name\t: AMD EPYC\ncpu family\t: 25\nmodel\t: 1\nflags\t: avx avx2")
    ('AMD EPYC family 25 model 1', ['avx2'])
    """
    first = cpuinfo.strip().split("\n\n")[0]
    facts = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*?)[ \t]*$", first, re.MULTILINE))
    # An Arm processor has no name, only numbers.
    keys = ("cpu family", "model", "CPU implementer", "CPU part")
    numbers = [f"{key.removeprefix('cpu ')} {facts[key]}" for key in keys if key in facts]
    flags = set((facts.get("flags") or facts.get("Features", "")).split())
    return (
        " ".join([*([facts["model name"]] if "model name" in facts else []), *numbers]),
        [name for name in INSTRUCTION_SETS if name in flags],
    )


def has_bf16(cpuinfo: str) -> bool:
    r"""Look in ``/proc/cpuinfo`` for units that compute with bfloat16.

    >>> has_bf16("flags\t: avx2 avx512_bf16"), has_bf16("Features\t: asimd"), has_bf16("")
    (True, False, False)
    """
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return bool(flags and BF16_UNITS & set(flags[1].split()))


def about_precision(precision: str, device: torch.device) -> str:
    """What the user of a ``train.precision`` has to know; nothing about float32."""
    if precision == "float32":
        return ""
    note = (
        f"train.precision = {precision!r}: only local steps are taken in 16 bits; tests, "
        "measurements, weights and all that is sent are float32."
    )
    if device.type == "cuda":
        import torch  # late: reports need none of it

        units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        units = has_bf16(_CPUINFO.read_text() if _CPUINFO.exists() else "")
    if not units:
        note += (
            " This machine has no units for bfloat16 that are known here: clients on it are "
            "faster with 'float32'."
        )
    return note


def _sysctl() -> str:
    """Ask macOS for its processor's name, and write it as ``/proc/cpuinfo`` would."""
    try:
        answer = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"model name : {answer.stdout.strip()}"


def release_memory() -> None:
    """Give pages that are free to the system, which glibc keeps in case they are wanted again.

    Between a round's messages and arrays of all sizes it finds less and less room for the next
    round's, so that what it holds grows though nothing is kept. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
