"""Processor, kernels and library versions, on which the exact bits of a result depend."""

import ctypes
import gc
import os
import platform
import re
import signal
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

VERSIONS_OF = ("fairflower", "flwr", "flwr-datasets", "torch", "torchvision", "ray", "numpy")

#: Packages of the extra "solvers", on which only some strategies' results depend.
SOLVERS = ("cvxpy", "scikit-learn", "scipy")

#: Instruction sets that determine which kernels PyTorch, oneDNN and MKL use.
INSTRUCTION_SETS = ("avx2", "avx512f", "amx_tile", "asimd", "sve", "sve2")

#: Signal that a closed terminal sends; empty on Windows, which does not have it.
HANGUP: tuple[int, ...] = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()

_CPUINFO = Path("/proc/cpuinfo")


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of the packages that affect every run's results, and of more.

    A package that is missing is "not installed".
    """
    packages = (*VERSIONS_OF, *more)
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


@cache  # reading metadata takes a millisecond for each package
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe this machine: system, number of cores, and properties that affect rounding.

    The processor's name includes its family and model, because several generations share a name.
    ``kernels`` is the instruction set that PyTorch's kernels use; other libraries choose kernels
    from ``instructions``. ``gpu`` is missing if ``device`` is ``"cpu"``.
    """
    import torch  # imported late, because reports do not need torch

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
    """Free the messages of earlier rounds, and return free memory pages from glibc to the system.

    Reading ``array_records`` of a message creates a reference cycle inside Flower. Only a full run
    of the garbage collector frees the message with its arrays, and Python starts full runs too
    rarely: several rounds' models would stay in memory.

    glibc keeps freed pages. They become more fragmented in every round, so the process would grow.
    Without glibc, no pages are returned.
    """
    gc.collect()
    if platform.system() != "Linux":  # on Windows CDLL(None) is an error
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
