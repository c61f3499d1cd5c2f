"""Shared fixtures, options and hooks of the tests."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

from fairflower.machine import HANGUP
from fairflower.numerics.threads import cpus

# No deadline: a busy machine must not fail tests. Every run draws other examples, the nightly run
# more of them.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=200)

# Importing makes a million objects, none of which is garbage: searching for it would take a tenth
# of the time in which tests are collected.
gc.disable()

# The test processes share compiled modules, also where Python is told to write none: each of them
# would compile the libraries again, which takes half a minute.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Keeps Ray from installing a separate environment for its workers.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# The test processes beside it take much memory: Ray would kill workers of runs that are compared.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")


# With numexpr, which tests need for another library, pandas takes the column "round" in a query for
# numexpr's function.
pd.set_option("compute.use_numexpr", False)

#: Libraries that most tests import; compiling them in a new environment takes half a minute.
LARGE = ("torch", "scipy.stats", "ray", "pandas", "torchvision", "sklearn", "flwr.simulation")

#: Signals of which commands set the handlers.
STOPS = (signal.SIGINT, signal.SIGTERM, *HANGUP)

#: Mark of tests for some systems -> whether to skip them on this system, and the reason.
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
    if config.getoption("numprocesses", None) is None:  # else worker processes run the tests
        with suppress(
            ModuleNotFoundError
        ):  # an installation without torch: tests/deploy/test_light.py
            import torch

            # The tests' networks are so small that several threads are slower than one.
            torch.set_num_threads(1)


def compile_in_turn(worker: int) -> None:
    """Import the large libraries, each in one process at a time, so that none is compiled twice.

    The processes start with different libraries.
    """
    from filelock import FileLock

    first = worker % len(LARGE)
    for library in LARGE[first:] + LARGE[:first]:
        lock = Path(tempfile.gettempdir(), f"fairflower-tests-{library}.lock")
        with suppress(ModuleNotFoundError), FileLock(lock):
            import_module(library)


#: Number of imported modules when `leave_out_of_collections` was called last.
modules = 0


def leave_out_of_collections() -> None:
    """Let the garbage collector ignore all that there is now.

    Imported modules stay, and each round of a run starts a full collection, which would take 0.2
    seconds with all libraries.
    """
    global modules
    if modules:  # importing the tests left no garbage
        gc.collect()
    modules = len(sys.modules)
    gc.freeze()


def pytest_collection_finish() -> None:
    # Several test processes, each with a thread for every core, would wait for each other.
    threadpool_limits(1)
    atexit.register(gc.unfreeze)  # some libraries warn of objects that are left at exit
    leave_out_of_collections()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    # Tests run Flower's engine on Ray; the environments of later tests must not see our packages.
    from fairflower.flower_compat import unchanged_import_path

    with unchanged_import_path():
        result = yield
    if nextitem and (nextitem.path != item.path or len(sys.modules) > modules):
        leave_out_of_collections()
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        # Slow files, many of which wait for processes, alternate with files that only compute, of
        # which there are more. Long files come first, so that no worker starts one at the end.
        size = Counter(item.path for item in items)
        slow_files = {item.path for item in items if "slow" in item.keywords}
        kinds: tuple[list[Path], list[Path]] = [], []
        for path, _ in size.most_common():
            kinds[path not in slow_files].append(path)
        order = {path: k for k, path in enumerate(chain.from_iterable(zip_longest(*kinds)))}
        items.sort(key=lambda item: order[item.path])
    nightly = config.getoption("--nightly")
    if not nightly:
        leave_a_few(items)
        config.hook.pytest_deselected(items=[i for i in items if "nightly" in i.keywords])
        items[:] = [item for item in items if "nightly" not in item.keywords]
    # Tests of real processes can time out on a busy machine: rerun once; the summary counts reruns.
    slow = pytest.mark.flaky(reruns=1)
    if not (nightly or config.getoption("--slow")):
        slow = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(slow)
        for name, (skipped, reason) in ELSEWHERE.items():
            if skipped and name in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def leave_a_few(items: list[pytest.Item]) -> None:
    """Mark as nightly the cases of tests marked ``few(n)``, except n of them, evenly spaced."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if "few" in item.keywords and "nightly" not in item.keywords:
            cases.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for alike in cases.values():
        (n,) = next(alike[0].iter_markers("few")).args
        for k, item in enumerate(alike):
            if (k * n) // len(alike) == ((k - 1) * n) // len(alike):
                item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With ``-n auto``, use three workers per two cores for slow tests, which wait for processes.

    Each worker first imports all tests, which takes some 15 seconds and a gigabyte.
    """
    slow = config.getoption("--slow") or config.getoption("--nightly")
    return -(-3 * cpus() // 2) if slow else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``, run a file's tests in one worker: they share fixtures and processes."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # they are sorted already
    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary home folder; the tests of a session share prepared data in it."""
    if "FAIRFLOWER_TEST_HOME" not in os.environ:
        os.environ["FAIRFLOWER_TEST_HOME"] = str(tmp_path_factory.mktemp("home"))
    monkeypatch.setenv("FAIRFLOWER_HOME", os.environ["FAIRFLOWER_TEST_HOME"])
    # Their files need not survive a power failure, and waiting for the disk takes long.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Be a server for Flower, after a test in which this process was a site; keep its signals.

    Commands set handlers of signals, which end with their process.
    """
    from fairflower.flower_compat import set_task_identity

    set_task_identity()
    if files := sys.modules.get("fairflower.data.files"):  # warnings are said once in a process
        files.said.clear()
    if torch := sys.modules.get("torch"):  # clients of a test may have been threads
        torch.backends.cuda.enable_flash_sdp(True)
    handlers = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in handlers.items():
        if handler is not None:  # not set by Python
            signal.signal(number, handler)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the test's own folder as the home folder, so that nothing is shared with other tests."""
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path))


@pytest.fixture
def context() -> Any:
    """Return the Flower context of partition 3."""
    from flwr.app import Context, RecordDict

    return Context(1, 1, {"partition-id": 3}, RecordDict(), {})


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures of the page (SVG) as usual; write empty files instead of other figures."""
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
    """Write empty figures: drawing takes most of a report's time."""

    def save(figure: Any, target: Any, **options: Any) -> None:
        if isinstance(target, io.StringIO):
            target.write("<svg></svg>")
        else:
            Path(target).touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture
def digits_dir() -> str:
    """Return the folder of the papers' digits, or skip the test if there is none."""
    folder = os.environ.get("FAIRFLOWER_DATA", "")
    if not os.path.exists(os.path.join(folder, "mnist.npz")):
        pytest.skip("FAIRFLOWER_DATA does not name a folder with mnist.npz, usps.npz, ...")
    return folder
