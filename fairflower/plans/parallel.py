"""Parallel runs, each in a separate process."""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from flwr.serverapp import Grid
from rich.console import Console
from rich.markup import escape

from fairflower.config import RunConfig
from fairflower.config.text import counted
from fairflower.data import prepare
from fairflower.engines.launch import launch, quiet_flower, stop_on_interrupt
from fairflower.errors import (
    USER_ERRORS,
    Diverged,
    EngineError,
    GpuMemoryError,
    RunInterrupted,
    error_text,
    failure_text,
)
from fairflower.machine import HANGUP
from fairflower.plans.devices import without_main
from fairflower.plans.plan import Plan, run_key, run_title
from fairflower.server.folder import runs_home
from fairflower.server.progress import counting_bar, round_line
from fairflower.server.session import Session


class Study(Protocol):
    """Interface for adding runs to a plan when other runs end."""

    #: Expected number of remaining runs.
    total: int

    def title(self, config: RunConfig) -> str:
        """Return a run's name in messages, with the tuned values."""

    def ended(self, config: RunConfig, error: Exception | None) -> list[RunConfig]:
        """Record how a run ended; return new runs to start."""

    def died(self, config: RunConfig) -> list[RunConfig]:
        """Return the runs to start after a run's process died, including this run if needed."""


#: Run folder, and a line about the last tested round.
_Result = tuple[Path, str]


def execute_parallel(
    plan: Plan,
    jobs: int,
    console: Console,
    stop: threading.Event,
    folders: list[Path],
    study: Study | None = None,
) -> None:
    """Run a plan in ``jobs`` parallel processes, each on the inline engine.

    Parallel runs use the cores better than parallel clients within a run, which wait for each other
    in every round. Results are exactly the same on every engine. Each process uses one core and as
    much memory as one run. If a process dies, its run is resumed once from its last checkpoint. If
    GPU memory runs out, the run is also resumed once, and from then on half as many runs are
    executed in parallel. The first failure is raised after all other runs have ended.

    When ``stop`` is set, running runs stop between two replies, and no new run starts. ``folders``
    receives each run folder when its run ends. A ``study`` adds runs when other runs end.
    """
    with counting_bar(console, "runs", transient=True) as bar, _Processes(jobs) as processes:
        runs = _Runs(console, folders, processes, study)
        total = study.total if study else len(plan.runs)
        task = bar.add_task(counted(jobs, "parallel run"), total=total)
        new = plan.runs
        while True:
            for config in new:
                processes.submit(config)
            if not processes.at_work:
                break
            ended = processes.ended(timeout=0.5)
            stopped = stop.is_set()
            if stopped:  # nothing is retried; what has just completed is recorded
                ended = [(r, f) for r, f in ended if not isinstance(f.exception(), _FATAL)]
            new = [config for run, future in ended for config in runs.ended(run, future)]
            bar.update(task, completed=runs.over)
            if stopped:
                raise RunInterrupted
    if runs.failure is not None:
        raise runs.failure


class _Runs:
    """Records and prints how runs ended, and decides which runs to start next."""

    def __init__(
        self, console: Console, folders: list[Path], processes: _Processes, study: Study | None
    ) -> None:
        self._console, self._folders = console, folders
        self._processes, self._study = processes, study
        self._retried: set[str] = set()  # names of the runs that have failed once
        self.over = 0  # number of runs that have ended and are not retried
        self.failure: BaseException | None = None  # first failure of a run

    def ended(self, config: RunConfig, future: Future[_Result]) -> list[RunConfig]:
        """Record how a run ended; return the runs to start next."""
        name = self._study.title(config) if self._study else run_title(config)
        title = f"{name}, seed {config.seed}"
        first = (key := config.run_name or title) not in self._retried
        problem: Exception | None = None
        try:
            folder, line = future.result()
        except (BrokenProcessPool, RunInterrupted):
            if first:
                self._retried.add(key)
                self._print("yellow", f"{title}: its process died.", "The run is retried.")
                return self._again(config)
            problem = EngineError(
                f"The process of {title} died twice, perhaps because it ran out of memory. Repeat "
                "the command with fewer parallel runs (--jobs) to resume the run."
            )
        except GpuMemoryError as error:
            retries = first and config.gpu_memory_errors == "retry"
            if retries and (left := self._processes.halve()):
                self._retried.add(key)
                after = f"The run is retried; the number of parallel runs is now {left}."
                self._print("yellow", f"{title} ran out of GPU memory.", after)
                return self._again(config)
            problem = error
        except USER_ERRORS as error:
            problem = error
        else:
            self._folders.append(folder)
            self._print("bold", title, f" {line}")
        self.over += 1
        more = self._study.ended(config, problem) if self._study else []
        if self._study and isinstance(problem, Diverged):
            self._print("yellow", f"{title} is lost:", error_text(problem))
        elif problem is not None:
            self.failure = self.failure or problem
            self._print("red", f"{title} failed:", error_text(problem))
        return more

    def _again(self, config: RunConfig) -> list[RunConfig]:
        """Return the runs to start after a run's process died, including this run if needed."""
        if self._study:
            more = self._study.died(config)
            if config.run_name not in {other.run_name for other in more}:
                self.over += 1
            return more
        from fairflower.report import find_readable_runs  # slow to import, and rarely needed

        home, key = runs_home(config), run_key(config.to_flat())
        earlier = [run for run in find_readable_runs(home) if run_key(run.config) == key]
        if completed := [run.path for run in earlier if run.status == "completed"]:
            self._folders.append(completed[-1])
            self.over += 1
            return []
        return Plan([config]).resuming(home).runs

    def _print(self, color: str, title: str, text: str) -> None:
        line = f"[{color}]{escape(title)}[/] {escape(text)}"
        self._console.print(line, soft_wrap=True, highlight=False)


#: Errors after which a run's process is replaced. A new process can use all GPU memory that the old
#: process reserved.
_FATAL = (BrokenProcessPool, RunInterrupted, GpuMemoryError)


class _Processes:
    """Pool of processes that execute one run each, so that a dying process affects only its run."""

    def __init__(self, most: int) -> None:
        # Use spawn, because a fork would copy the locks of torch's threads in an arbitrary state.
        self._most = most
        self._context = multiprocessing.get_context("spawn")
        self._reader, self._writer = self._context.Pipe(duplex=False)
        self._idle = [self._new() for _ in range(most)]
        self._waiting: deque[RunConfig] = deque()
        self.at_work: dict[Future[_Result], tuple[RunConfig, ProcessPoolExecutor]] = {}

    def _new(self) -> ProcessPoolExecutor:
        with without_main():  # Python starts a process for semaphores
            return ProcessPoolExecutor(
                1, self._context, initializer=_prepare_worker, initargs=(self._reader,)
            )

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind:  # runs can be resumed, and may take hours to end
            self.stop()
        self.close()

    def submit(self, config: RunConfig) -> None:
        """Queue a run for the next idle process."""
        self._waiting.append(config)
        self._begin()

    def ended(self, timeout: float) -> list[tuple[RunConfig, Future[_Result]]]:
        """Wait up to ``timeout`` seconds for a run to end; return the ended runs."""
        done, _ = wait(self.at_work, timeout, FIRST_COMPLETED)
        ended = []
        for future in done:
            config, process = self.at_work.pop(future)
            wanted = len(self._idle) + len(self.at_work) < self._most
            fatal = isinstance(future.exception(), _FATAL)
            if fatal or not wanted:
                process.shutdown(wait=False)
            if wanted:
                self._idle.append(self._new() if fatal else process)
            ended.append((config, future))
        self._begin()
        return ended

    def halve(self) -> int:
        """Halve the number of parallel runs and return it; return 0 if it was already 1."""
        if self._most < 2:
            return 0
        self._most //= 2
        while self._idle and len(self._idle) + len(self.at_work) > self._most:
            self._idle.pop().shutdown(wait=False)
        return self._most

    def stop(self) -> None:
        """Ask all runs to stop."""
        self._writer.close()

    def close(self) -> None:
        """Wait until all running runs have ended, and then end the processes."""
        self._waiting.clear()
        for process in [*self._idle, *(process for _, process in self.at_work.values())]:
            process.shutdown(wait=True)

    def _begin(self) -> None:
        while self._waiting and self._idle and len(self.at_work) < self._most:
            config = self._waiting.popleft()
            inline = dataclasses.replace(config, engine="inline", ray_address="")
            process = self._idle.pop()
            with without_main():
                try:
                    future = process.submit(_run, inline)
                except BrokenProcessPool:  # the idle process has died
                    process = self._new()
                    future = process.submit(_run, inline)
            self.at_work[future] = config, process


#: Set in a worker process that has been asked to stop, so that it starts no further run.
_stopping = threading.Event()


def _prepare_worker(stop: Connection) -> None:
    gc.freeze()  # runs free messages by full collections, which need not search imported modules
    for number in (signal.SIGINT, *HANGUP):  # the parent process handles these
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _stopping.set())
    threading.Thread(target=_end_with_parent, args=(stop,), daemon=True).start()


def _end_with_parent(stop: Connection) -> None:
    """Stop the run when the parent process closes the pipe, and exit when the parent has ended.

    The parent process does not send a signal, because on Windows a signal ends a process at once.
    A new command can resume the runs once this process has exited.
    """
    with suppress(EOFError, OSError):
        stop.recv_bytes()
    signal.raise_signal(signal.SIGTERM)
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(config: RunConfig) -> _Result:
    """Run a config in this process; return its folder and a line about the last tested round."""
    console = Console(file=io.StringIO())
    stopping = stop_on_interrupt(console.print, [signal.SIGTERM])
    sessions: list[Session] = []

    def run(grid: Grid) -> None:
        sessions.append(Session(grid, config, console, stop=stop))
        sessions[0].run()

    with quiet_flower(logging.NullHandler()), stopping as stop:
        if _stopping.is_set():  # before the run's own handler was installed
            raise RunInterrupted
        try:
            launch(run, config, len(prepare(config.data).clients))
        except RunInterrupted:
            _stopping.set()
            raise
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # the parent would count this process as dead
                raise RuntimeError(failure_text(error)) from error
            raise
    folder = sessions[0].folder
    assert folder is not None  # the run has ended
    metrics = folder.metrics
    server_round, scores = metrics.last_test()
    line = round_line(server_round, config.num_server_rounds, scores, score=metrics.primary)
    return folder.path, line
