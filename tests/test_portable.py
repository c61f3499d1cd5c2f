"""Systems without POSIX, such as Windows: every module can be imported and a run trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, environment

from fairflower import files, paths
from fairflower.data import files as data_files
from fairflower.errors import ConfigError
from fairflower.training.device import choose_device, float64_on

#: Emulate Windows: remove POSIX modules and what `os` and `signal` lack there. It affects only
#: fairflower's modules, because other packages are imported first.
WINDOWS = """
import os, signal, sys
{first}
ABSENT = {{"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in ABSENT:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Blocked())
for name in (
    *("O_CLOEXEC", "sched_getaffinity", "killpg", "getuid", "geteuid", "setsid", "getsid"),
    *("sysconf", "mkfifo", "mknod", "fork", "uname", "chown"),
):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "pthread_sigmask"):
    delattr(signal, name)
sys.platform = "win32"
"""

LIBRARIES = """
import cvxpy, datasets, filelock, flwr_datasets, jinja2, matplotlib.pyplot, multiprocessing.spawn
import multiprocessing.popen_spawn_posix, pandas, PIL.Image, ray, rich.live
import scipy.stats, sklearn.cluster, statsmodels.api, subprocess, torch._dynamo, torch.func
import torchvision, typer.testing
import flwr.server, flwr.client, flwr.simulation, flwr.serverapp, flwr.clientapp
from sqlalchemy.dialects import sqlite
"""

IMPORTS = """
import importlib, pkgutil, subprocess
del os.O_NONBLOCK  # filelock's code for this system has it
subprocess.CREATE_NEW_PROCESS_GROUP = 512  # Windows's
import fairflower
for module in pkgutil.walk_packages(fairflower.__path__, "fairflower."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print("imported", sum(name.startswith("fairflower.") for name in sys.modules))
"""

TESTS = """
import importlib, pathlib, subprocess
from _pytest.outcomes import Skipped
del os.O_NONBLOCK
subprocess.CREATE_NEW_PROCESS_GROUP = 512
tests = pathlib.Path({tests!r})
sys.path[:0] = [str(tests), *(str(tests.parent / name) for name in {paths})]
skipped = []
for file in sorted(tests.rglob("test_*.py")):
    sys.path.insert(0, str(file.parent))
    try:
        importlib.import_module(file.stem)
    except Skipped:
        skipped.append(file.stem)
    sys.path.pop(0)
print(*skipped)
"""

TRAINS = """
import fairflower as ff
small = {"data.clients-per-domain": 1, "data.examples-per-client": 20, "train.local-epochs": 1}
run = ff.run(strategy="fedheal", rounds=2, engine="inline", settings=small, output_dir="runs")
print(run.status if hasattr(run, "status") else run)
"""


def on_windows(code: str, folder: Path) -> str:
    program = WINDOWS.format(first=LIBRARIES) + code
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(folder) | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_modules_can_be_imported_and_a_run_trained_without_posix(tmp_path: Path) -> None:
    assert int(on_windows(TRAINS + IMPORTS, tmp_path).split()[-1]) > 150
    assert list(tmp_path.glob("runs/*/model.safetensors"))


@pytest.mark.nightly
def test_all_test_modules_can_be_imported_without_posix(tmp_path: Path) -> None:
    tests = TESTS.format(tests=str(ROOT / "tests"), paths=["docs", "experiments"])
    skipped = on_windows("import pytest, hypothesis, psutil, nbclient" + tests, tmp_path).split()
    assert skipped == ["test_signals"]


def test_replacing_a_file_is_retried_while_it_is_open_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    rename, refused = Path.replace, [PermissionError(), PermissionError()]

    def replace(self: Path, target: Path) -> Path:
        if refused:
            raise refused.pop()
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with files.replacing(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert paths.read_text(tmp_path / "file") == "new"


def test_the_limit_of_a_container_bounds_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = data_files.free_memory()
    (tmp_path / "cgroup").write_text(f"0::/../../..{tmp_path}\n")
    for name, text in (("max", "5000"), ("current", "3000"), ("stat", "anon 9\ninactive_file 700")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(data_files, "_CGROUP", tmp_path / "cgroup")
    assert data_files.free_memory() == 2700
    (tmp_path / "memory.max").write_text("max\n")
    assert data_files.free_memory() > min(host, 10**8) / 2


def test_free_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files.Path, "read_text", lambda self, encoding: "")
    assert data_files.free_memory() > 10**8


def test_a_missing_apple_gpu_is_reported_and_mps_sums_in_float32() -> None:
    if not torch.backends.mps.is_available():
        with pytest.raises(
            ConfigError, match=r"'mps': PyTorch finds no Apple GPU on this machine\. Use"
        ):
            choose_device("mps")
    assert float64_on(torch.device("mps")) is torch.float32
    assert float64_on(torch.device("cpu")) is torch.float64
