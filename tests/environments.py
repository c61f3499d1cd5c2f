"""Separate environments for the slow tests, with the built wheel installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from processes import ROOT, environment, run

#: uv's messages if no package index is reachable.
OFFLINE = ("Failed to fetch", "error sending request", "network was disabled")


def uv(*arguments: str | Path, cwd: Path) -> str:
    return run([sys.executable, "-m", "uv", *arguments], env=environment(cwd), cwd=cwd)


def built_wheel(folder: Path) -> Path:
    """Build the wheel from the sdist, as for a release, and return its path."""
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
    return python.parent


def uv_or_skip(*arguments: str | Path, cwd: Path) -> None:
    """Call uv; skip the test if no package index is reachable."""
    command = [sys.executable, "-m", "uv", "--quiet", *arguments]
    there = {"env": environment(cwd), "cwd": cwd}
    done = subprocess.run(command, check=False, capture_output=True, text=True, **there)
    if done.returncode and any(words in done.stderr for words in OFFLINE):
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr
