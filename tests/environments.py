"""Separate environments for the slow tests, with the built wheel installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import pytest
from filelock import FileLock
from processes import ROOT, environment, run

#: uv's messages if no package index is reachable.
OFFLINE = ("Failed to fetch", "error sending request", "network was disabled")


def uv(*arguments: str | Path, cwd: Path) -> str:
    return run([sys.executable, "-m", "uv", *arguments], env=environment(cwd), cwd=cwd)


def built_wheel(factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the sdist, as for a release, once for all test processes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not list(folder.glob("*.whl")):
            uv_or_skip("build", "--out-dir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def environment_with(folder: Path, *what: str) -> Path:
    """Create an environment with ``what`` and its dependencies, and return its `bin` folder.

    The versions are those of the tests' environment, which need no second download.
    """
    installed = {d.name: d.version.partition("+")[0] for d in distributions()}
    here = {name: v for name, v in installed.items() if name != "fairflower"}
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(f"{name}=={version}" for name, version in here.items()))
    uv("venv", "--python", sys.executable, folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    install = ["pip", "install", "--python", python, "--constraint", constraints]
    uv_or_skip(*install, *what, cwd=folder)
    link_compiled(next(folder.glob("venv/lib/*/site-packages")))
    return python.parent


def link_compiled(packages: Path) -> None:
    """Link the compiled modules of the tests' environment; Python ignores those of other files."""
    ours = Path(sysconfig.get_path("purelib"))
    for folder in ours.rglob("__pycache__"):
        there = packages / folder.relative_to(ours)
        if there.parent.is_dir():
            with suppress(OSError):  # another file system
                shutil.copytree(folder, there, copy_function=os.link)


def uv_or_skip(*arguments: str | Path, cwd: Path) -> None:
    """Call uv; skip the test if no package index is reachable."""
    command = [sys.executable, "-m", "uv", "--quiet", *arguments]
    there = {"env": environment(cwd), "cwd": cwd}
    done = subprocess.run(command, check=False, capture_output=True, text=True, **there)
    if done.returncode and any(words in done.stderr for words in OFFLINE):
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr
