"""Parallel runs whose processes are killed with SIGKILL or lack memory: other runs continue."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from out_of_memory_client import REASON
from resuming import SETTINGS, outcome, resume, session
from rich.console import Console
from studies import SMALL, tuned_of, tuning

from fairflower.config import RunConfig, StrategyConfig
from fairflower.errors import EngineError, GpuMemoryError, RunInterrupted
from fairflower.plans import parallel
from fairflower.plans.parallel import _Processes, execute_parallel
from fairflower.plans.plan import Plan
from fairflower.plans.tuning import TuningStudies

pytestmark = [pytest.mark.slow, pytest.mark.linux]  # /proc shows which process uses a folder

ROUNDS = 30  # enough to kill a run before its last round, also on a busy machine
NAMES = ("fedavg-seed0", "uniform-seed0", "fedheal-seed0")


def plan(home: Path) -> Plan:
    flat = {**SETTINGS, "num-server-rounds": ROUNDS, "output-dir": str(home)}
    return Plan.grid(flat, StrategyConfig.parse("fedavg,uniform,fedheal"), [0])


def make(todo: Plan, study: TuningStudies | None = None) -> tuple[str, BaseException | None]:
    """Execute a plan with two jobs; return what was printed, and the error at the end."""
    console = Console(file=io.StringIO(), width=300)
    error = None
    try:
        execute_parallel(todo, 2, console, threading.Event(), [], study)
    except EngineError as problem:
        error = problem
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text, error


@contextmanager
def killing(*moments: tuple[Path, Callable[[Path], bool]]) -> Iterator[list[int]]:
    """Kill the process of each run folder as soon as its condition holds, one after the other."""
    killed: list[int] = []
    over = threading.Event()

    def watch() -> None:
        for folder, is_reached in moments:
            while not (pids := at_work_on(folder)) or not is_reached(folder):
                if over.wait(0.002):
                    return
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            while at_work_on(folder) == pids:
                time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def at_work_on(folder: Path) -> list[int]:
    """Return the child processes that have a run folder open."""
    pids = []
    for process in multiprocessing.active_children():
        with suppress(OSError):
            places = [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
            pids += [process.pid] * (str(folder) in places)
    return [pid for pid in pids if pid]


def after(server_round: int) -> Callable[[Path], bool]:
    """Return the condition that the checkpoint of this or a later round exists."""
    first = f"round-{server_round:06}.safetensors"
    return lambda folder: any(p.name >= first for p in folder.glob("checkpoints/round-*"))


def at_once(folder: Path) -> bool:
    """Condition that always holds: the run is killed before anything can be resumed."""
    return True


def facts(folder: Path) -> dict[str, Any]:
    run_facts: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return run_facts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs, one after the other in this process."""
    home: Path = tmp_path_factory.mktemp("whole")
    for config in plan(home).runs:
        session(config).run()
    return home


@pytest.mark.nightly
@pytest.mark.parametrize("moment", [at_once, after(0), after(4)], ids=["begun", "0", "4"])
def test_a_run_whose_process_is_killed_is_retried_and_other_runs_are_unaffected(
    moment: Callable[[Path], bool], whole: Path, tmp_path: Path
) -> None:
    with killing((tmp_path / "uniform-seed0", moment)) as killed:
        output, error = make(plan(tmp_path))
    assert len(killed) == 1
    assert error is None
    assert "uniform, seed 0: its process died. The run is retried." in output
    folders = [path.parent for path in tmp_path.glob("*/run.json")]
    assert len(folders) == len(NAMES)
    for folder in folders:
        name = folder.name.removesuffix("-2")  # of a retry whose first folder has no run.json
        assert outcome(folder) == outcome(whole / name)
        assert bool(facts(folder).get("resumed")) == (name == "uniform-seed0" == folder.name)


@pytest.mark.nightly
def test_a_run_whose_process_dies_twice_fails_and_other_runs_complete(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "uniform-seed0"
    with killing((folder, after(1)), (folder, after(3))) as killed:
        output, error = make(plan(tmp_path))
    assert len(killed) == 2
    assert str(error).startswith("The process of uniform, seed 0 died twice")
    assert output.count(" died") == 2
    assert "uniform, seed 0 failed: The process of" in output
    for name in {*NAMES} - {folder.name}:
        assert outcome(tmp_path / name) == outcome(whole / name)
    resume(folder)
    assert outcome(folder) == outcome(whole / folder.name)


@pytest.mark.nightly
def test_a_process_that_is_killed_between_two_runs_is_replaced(whole: Path, tmp_path: Path) -> None:
    processes = _Processes(1)
    for number, config in enumerate(plan(tmp_path).runs[:2]):
        processes.submit(config)
        while not (ended := processes.ended(timeout=10)):
            pass
        (_, future), *_ = ended
        folder, _ = future.result()
        assert outcome(folder) == outcome(whole / folder.name)
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        assert number or not processes.at_work
    processes.close()


@pytest.mark.nightly
def test_a_study_with_killed_processes_equals_an_uninterrupted_study(tmp_path: Path) -> None:
    """This covers leaderboards, too, as each of their benchmarks is a study."""
    settings = {**SMALL, "num-server-rounds": ROUNDS, "train.local-epochs": 1}
    protocol = {"budget": 2, "seeds": [1], "settings": settings}
    alone = tuning(tmp_path / "alone", "fedheal", **protocol)
    assert make(alone.plan, alone)[1] is None
    study = tuning(tmp_path / "killed", "fedheal", **protocol)
    first, last = (tmp_path / "killed" / place for place in ("trials", "runs"))
    with killing(
        (first / "fedheal-trial0", at_once),
        (first / "fedheal-trial1", after(4)),
        (last / "fedheal-seed1", after(2)),
    ) as killed:
        output, error = make(study.plan, study)
    assert len(killed) == 3
    assert error is None
    assert output.count(" died") == 3
    assert study.tuned() == alone.tuned()
    assert tuned_of(study, "fedheal").count("completed") == 2
    for path in (tmp_path / "alone").rglob("run.json"):
        there = tmp_path / "killed" / path.parent.relative_to(tmp_path / "alone")
        assert outcome(there) == outcome(path.parent)


def out_of_memory_plan(
    home: Path, monkeypatch: pytest.MonkeyPatch, failures: int, **more: Any
) -> Plan:
    """Return a plan whose clients run out of GPU memory ``failures`` times."""
    monkeypatch.setenv("OUT_OF_MEMORY", f"{failures}:{home}")
    flat = {
        **SETTINGS,
        "output-dir": str(home),
        "client.name": "out_of_memory_client:OutOfMemoryClient",
        **more,
    }
    return Plan.grid(flat, StrategyConfig.parse("fedavg"), [0])


@pytest.mark.nightly
def test_a_run_without_gpu_memory_is_retried_with_fewer_parallel_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, error = make(out_of_memory_plan(tmp_path, monkeypatch, failures=1))
    assert error is None
    assert (
        "ran out of GPU memory. The run is retried; the number of parallel runs is now 1." in output
    )
    all_facts = [facts(path.parent) for path in tmp_path.glob("*/run.json")]
    assert [run_facts["status"] for run_facts in all_facts] == ["completed"] * 2
    assert [bool(run_facts.get("resumed")) for run_facts in all_facts].count(True) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("errors", ["retry", "stop"])
def test_a_run_that_always_lacks_gpu_memory_fails_and_can_be_resumed(
    errors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = out_of_memory_plan(tmp_path, monkeypatch, 99, **{"gpu-memory-errors": errors})
    output, error = make(todo)
    assert isinstance(error, GpuMemoryError)
    assert f"({REASON}). Resume the run with fewer" in str(error)
    assert output.count("The run is retried") == (errors == "retry")
    assert output.count(" failed: ") == 2
    for folder in (path.parent for path in tmp_path.glob("*/run.json")):
        assert facts(folder)["status"] == "failed"
        monkeypatch.setenv("OUT_OF_MEMORY", f"0:{tmp_path}")
        resume(folder)
        assert facts(folder)["status"] == "completed"


def test_a_run_that_gets_a_stop_signal_while_it_starts_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives after the handler of the previous run and before that of the next run."""

    @contextmanager
    def late(handler: object) -> Iterator[None]:
        parallel._stopping.set()
        yield

    monkeypatch.setattr(parallel, "_stopping", threading.Event())
    monkeypatch.setattr(parallel, "quiet_flower", late)
    monkeypatch.setattr(parallel, "launch", lambda *_: pytest.fail("the run started"))
    with pytest.raises(RunInterrupted):
        parallel._run(RunConfig(output_dir=str(tmp_path)))


def test_completed_runs_are_recorded_before_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a leaderboard would repeat them. Runs whose process died are not retried."""
    stop, recorded = threading.Event(), []

    class Processes:
        at_work = True

        def submit(self, config: RunConfig) -> None:
            stop.set()  # Ctrl-C while the runs are at work

        def ended(self, timeout: float) -> list[tuple[RunConfig, Future[tuple[Path, str]]]]:
            completed, died = Future[tuple[Path, str]](), Future[tuple[Path, str]]()
            completed.set_result((tmp_path, "done"))
            died.set_exception(RunInterrupted())
            return [*zip(plan(tmp_path).runs, (completed, died), strict=False)]

    class Recording:
        total = 2

        def title(self, config: RunConfig) -> str:
            return config.run_name

        def ended(self, config: RunConfig, error: Exception | None) -> list[RunConfig]:
            recorded.append(config.run_name)
            return []

        def died(self, config: RunConfig) -> list[RunConfig]:
            pytest.fail("no run is retried")

    monkeypatch.setattr(parallel, "_Processes", lambda _: nullcontext(Processes()))
    console = Console(file=io.StringIO())
    with pytest.raises(RunInterrupted):
        execute_parallel(plan(tmp_path), 2, console, stop, [], Recording())
    assert recorded == ["fedavg-seed0"]


class Odd(Exception):
    """Cannot be unpickled, as some libraries' exceptions cannot."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def test_an_exception_that_cannot_be_unpickled_is_reported_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Odd("a hole", "the data")

    monkeypatch.setattr(parallel, "launch", fail)
    with pytest.raises(RuntimeError, match=r"Odd: a hole in the data \(test_parallel\.py, line"):
        parallel._run(RunConfig(output_dir=str(tmp_path)))
