"""Several runs at a time, each in a process of its own."""

from __future__ import annotations

import dataclasses
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.engines.launch import launch, quiet_flower, stop_on_interrupt
from fairflower.errors import USER_ERRORS, EngineError, RunInterrupted, error_text
from fairflower.plans.plan import Plan, run_key
from fairflower.report import find_readable_runs, read_run
from fairflower.server.callbacks import OnRound
from fairflower.server.checkpoint import resumable_configs
from fairflower.server.folder import runs_home
from fairflower.server.progress import counting_bar, round_line


class Study(Protocol):
    """What adds runs to a plan as others end."""

    #: Runs that are still to be made, as far as can be known.
    total: int

    def watch(self, config: RunConfig) -> OnRound | None:
        """Make what is called after every round of a run that begins, if anything is."""

    def ended(self, config: RunConfig, error: Exception | None) -> tuple[list[RunConfig], bool]:
        """Note how a run ended; give the runs to make now, and whether the error is excused."""

    def died(self, config: RunConfig) -> list[RunConfig]:
        """Give the runs to make when a run's process has died: it once more, if need be."""


#: A run's folder, and its last round in words.
_Result = tuple[Path, str]


def execute_parallel(
    plan: Plan,
    jobs: int,
    console: Console,
    stop: threading.Event,
    folders: list[Path],
    study: Study | None = None,
) -> None:
    """Make a plan's runs, ``jobs`` at a time, on the inline engine.

    Runs share nothing, so they fill the cores better than the clients of one run,
    which wait for each other every round; the engine moves no bit of a result. Each of
    the ``jobs`` processes takes one core, and the memory of one run. ``stop`` stops the runs
    at work between two replies and begins no more; ``folders`` gets each run folder as its
    run ends, and the ``study`` adds runs then. A run whose process dies is made once more, from
    its last checkpoint. The first failure of a run is raised when all others have been made.
    """
    runs = _Runs(console, folders, study)
    with counting_bar(console, "runs", transient=True) as bar, _processes(jobs) as processes:
        total = study.total if study else len(plan.runs)
        task = bar.add_task(f"{jobs} run{'s' * (jobs > 1)} at a time", total=total)
        new = plan.runs
        while True:
            for config in new:
                processes.submit(config, study.watch(config) if study else None)
            if not processes.at_work:
                break
            ended = processes.ended(timeout=0.5)
            if stop.is_set():
                processes.stop()
                raise RunInterrupted
            new = []
            for config, future in ended:
                more, over = runs.ended(config, future)
                new += more
                bar.advance(task, over)
    if runs.failure is not None:
        raise runs.failure


class _Runs:
    """What becomes of a plan's runs, said on the screen; and which runs follow."""

    def __init__(self, console: Console, folders: list[Path], study: Study | None) -> None:
        self._console, self._folders, self._study = console, folders, study
        self._deaths: Counter[str] = Counter()
        self.failure: BaseException | None = None  # the first of a run

    def ended(self, config: RunConfig, future: Future[_Result]) -> tuple[list[RunConfig], bool]:
        """Note how a run ended; return the runs that follow, and whether it is over."""
        title = f"{config.label}, seed {config.seed}"
        problem: Exception | None = None
        try:
            folder, line = future.result()
        except (BrokenProcessPool, RunInterrupted):
            name = config.run_name or title
            self._deaths[name] += 1
            if self._deaths[name] == 1:
                self._say("yellow", f"{title}: its process has died.", "It is made once more.")
                return self._again(config)
            problem = EngineError(
                f"The process of {title} has died twice, perhaps for want of memory. Make fewer "
                "runs at a time (--jobs), by the same command: the run goes on where it was."
            )
        except USER_ERRORS as error:
            problem = error
        else:
            self._folders.append(folder)
            self._say("bold", title, f" {line}")
        more, excused = self._study.ended(config, problem) if self._study else ([], False)
        if problem is not None:
            self.failure = self.failure or (None if excused else problem)
            how = ("yellow", "is lost") if excused else ("red", "failed")
            self._say(how[0], f"{title} {how[1]}:", error_text(problem))
        return more, True

    def _again(self, config: RunConfig) -> tuple[list[RunConfig], bool]:
        """Let a run go on from its last checkpoint, if it has one; or see that it had ended."""
        if self._study:
            more = self._study.died(config)
            return more, all(other.run_name != config.run_name for other in more)
        home, key = runs_home(config), run_key(config.to_flat())
        made = [run for run in find_readable_runs(home) if run_key(run.config) == key]
        if whole := [run.path for run in made if run.status == "completed"]:
            self._folders.append(whole[-1])
            return [], True
        return Plan([config]).resuming(resumable_configs(home)).runs, False

    def _say(self, color: str, what: str, text: str) -> None:
        said = f"[{color}]{escape(what)}[/] {escape(text)}"
        self._console.print(said, soft_wrap=True, highlight=False)


class _Processes:
    """Processes, each with one run at a time; the death of one of them takes its run alone."""

    def __init__(self, most: int) -> None:
        self._idle = [self._new() for _ in range(most)]
        self._waiting: deque[tuple[RunConfig, OnRound | None]] = deque()
        self.at_work: dict[Future[_Result], tuple[RunConfig, ProcessPoolExecutor]] = {}

    @staticmethod
    def _new() -> ProcessPoolExecutor:
        # spawn: a fork would copy torch's threads' locks in whatever state they are.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, context, initializer=_prepare_worker)

    def submit(self, config: RunConfig, watch: OnRound | None) -> None:
        """Make a run, as soon as a process has nothing else to do."""
        self._waiting.append((config, watch))
        self._begin()

    def ended(self, timeout: float) -> list[tuple[RunConfig, Future[_Result]]]:
        """Wait for a run to end, so many seconds; return those that have."""
        done, _ = wait(self.at_work, timeout, FIRST_COMPLETED)
        found = []
        for future in done:
            config, process = self.at_work.pop(future)
            if isinstance(future.exception(), (BrokenProcessPool, RunInterrupted)):
                process.shutdown(wait=False)
                process = self._new()
            self._idle.append(process)
            found.append((config, future))
        self._begin()
        return found

    def stop(self) -> None:
        """Ask all runs to stop."""
        for process in multiprocessing.active_children():
            process.terminate()  # which a run takes as it takes Ctrl-C

    def close(self) -> None:
        """Wait for the runs at work, and end the processes."""
        self._waiting.clear()
        for process in [*self._idle, *(process for _, process in self.at_work.values())]:
            process.shutdown(wait=True)

    def _begin(self) -> None:
        while self._waiting and self._idle:
            config, watch = self._waiting.popleft()
            here = dataclasses.replace(config, engine="inline", ray_address="")
            process = self._idle.pop()
            with _without_main():
                try:
                    future = process.submit(_run, here, watch)
                except BrokenProcessPool:  # it has died while it had nothing to do
                    process = self._new()
                    future = process.submit(_run, here, watch)
            self.at_work[future] = config, process


@contextmanager
def _processes(most: int) -> Iterator[_Processes]:
    made = _Processes(most)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """Start processes that do not run the user's script again, of which they need nothing."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


#: Set in a worker once it was asked to stop: it takes up no run that waits for it.
_stopping = threading.Event()


def _prepare_worker() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach runs by way of the parent
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _stopping.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave nobody at work on run folders that a new command wants to go on with."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(config: RunConfig, on_round: OnRound | None) -> _Result:
    """One run in this process."""
    if _stopping.is_set():
        raise RunInterrupted
    folders: list[Path] = []
    unseen = Console(file=io.StringIO())
    stopping = stop_on_interrupt(unseen.print, [signal.SIGTERM])
    with quiet_flower(logging.NullHandler()), stopping as stop:
        num_clients = len(prepare(config.data).clients)
        plan = Plan([config])
        try:
            launch(
                lambda grid: plan.execute(grid, unseen, stop, folders, on_round),
                config,
                num_clients,
            )
        except RunInterrupted:
            _stopping.set()
            raise
    run = read_run(folders[0])
    accuracies = dict(zip(run.domains, run.accuracy[-1].tolist(), strict=True))
    line = round_line(run.last_round, config.num_server_rounds, accuracies)
    return run.path, f"{line}  {run.info['error'] or ''}".rstrip()
