"""Shared pieces of the tests."""

from __future__ import annotations

import gc
import io
import os
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fairflower.numerics.threads import cpus

# A busy machine is no failure. Every run draws other examples; the nightly one draws most of them.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=200)

# Ray, wherever a test imports it, is not to install an environment of its own for its workers.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


#: What most tests import, which takes a new environment half a minute to compile.
LARGE = ("torch", "scipy.stats", "ray", "pandas", "torchvision", "sklearn", "flwr.simulation")

#: Marks of tests that need a system: whether this one is another, and the reason to skip them.
ELSEWHERE = {
    "posix": (sys.platform == "win32", "Windows has no named pipes, signals or links as POSIX has"),
    "linux": (sys.platform != "linux", "paths and messages of Linux"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--nightly", action="store_true", help="run all, those marked nightly, too")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if config.getoption("--nightly") else "quick")
    if worker := getattr(config, "workerinput", None):
        compile_in_turn(int(worker["workerid"].removeprefix("gw")))
    if config.getoption("numprocesses", None) is None:  # else others run the tests
        with suppress(ModuleNotFoundError):  # a light installation: tests/deploy/test_light.py
            import torch

            # The tests' networks are so small that threads cost more than they bring.
            torch.set_num_threads(1)


def compile_in_turn(worker: int) -> None:
    """Import the large libraries, each in one process at a time, so that none is compiled twice.

    Every process begins with another one.
    """
    from filelock import FileLock

    first = worker % len(LARGE)
    for library in LARGE[first:] + LARGE[:first]:
        lock = Path(tempfile.gettempdir(), f"fairflower-tests-{library}.lock")
        with suppress(ModuleNotFoundError), FileLock(lock):
            import_module(library)


def pytest_collection_finish() -> None:
    # What was imported stays, so the garbage collector can ignore it (Flower's q-FedAvg calls it
    # in every round).
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        # The long files first, so that no worker is left with one of them at the end.
        size = Counter(item.path for item in items)
        long = {item.path for item in items if "slow" in item.keywords}
        items.sort(key=lambda item: (item.path not in long, -size[item.path]))
    nightly = config.getoption("--nightly")
    if not nightly:
        config.hook.pytest_deselected(items=[i for i in items if "nightly" in i.keywords])
        items[:] = [item for item in items if "nightly" not in item.keywords]
    # Real processes can be late on a busy machine: once more, which the summary counts ("rerun").
    slow = pytest.mark.flaky(reruns=1)
    if not (nightly or config.getoption("--slow")):
        slow = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(slow)
        for name, (skipped, reason) in ELSEWHERE.items():
            if skipped and name in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With ``-n auto``, two for each core if slow tests wait for their processes."""
    slow = config.getoption("--slow") or config.getoption("--nightly")
    return 2 * cpus() if slow else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``, a file's tests stay together: they share what they have started."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # they are in order
    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the home folder; prepared data is shared by one session's tests."""
    if "FAIRFLOWER_TEST_HOME" not in os.environ:
        os.environ["FAIRFLOWER_TEST_HOME"] = str(tmp_path_factory.mktemp("home"))
    monkeypatch.setenv("FAIRFLOWER_HOME", os.environ["FAIRFLOWER_TEST_HOME"])


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures for the page as they are, but with no layout sought, and files without pixels."""
    from matplotlib.figure import Figure

    savefig = Figure.savefig

    def save(figure: Any, target: Any, **options: Any) -> None:
        if options.get("format") == "svg":
            savefig(figure, target, **options)
        else:
            figure.set_layout_engine("none")
            Path(target).touch()

    monkeypatch.setattr(Figure, "savefig", save)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not drawn, which takes most of a report's time: they are empty."""

    def save(figure: Any, target: Any, **options: Any) -> None:
        if isinstance(target, io.StringIO):
            target.write("<svg></svg>")
        else:
            Path(target).touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture
def digits_dir() -> str:
    """The folder of the papers' digits, where there is one."""
    folder = os.environ.get("FAIRFLOWER_DATA", "")
    if not os.path.exists(os.path.join(folder, "mnist.npz")):
        pytest.skip("FAIRFLOWER_DATA does not name a folder with mnist.npz, usps.npz, ...")
    return folder
