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
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.engines.launch import launch, quiet_flower, stop_on_interrupt
from fairflower.errors import USER_ERRORS, Stopped, told
from fairflower.plans.plan import Plan
from fairflower.report import read_run
from fairflower.server.progress import counting_bar, round_line
from fairflower.server.telling import OnRound


class Study(Protocol):
    """What adds runs to a plan as others end."""

    #: Runs that are still to be made, as far as can be known.
    total: int

    def watch(self, config: RunConfig) -> OnRound | None:
        """Make what is called after every round of a run that begins, if anything is."""

    def ended(self, config: RunConfig, error: Exception | None) -> tuple[list[RunConfig], bool]:
        """Note how a run ended; give the runs to make now, and whether the error is excused."""


def execute_side_by_side(
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
    run ends, and the ``study`` adds runs then. The first failure of a run is raised when all
    others have been made.
    """
    failure: BaseException | None = None
    # spawn: a fork would copy torch's threads' locks in whatever state they are.
    context = multiprocessing.get_context("spawn")
    with (
        counting_bar(console, "runs", transient=True) as bar,
        ProcessPoolExecutor(jobs, context, initializer=_prepare_worker) as pool,
    ):
        total = study.total if study else len(plan.runs)
        task = bar.add_task(f"{jobs} run{'s' * (jobs > 1)} at a time", total=total)
        pending: dict[Future[tuple[Path, str]], RunConfig] = {}

        def submit(configs: Iterable[RunConfig]) -> None:
            with _without_main():
                for config in configs:
                    here = dataclasses.replace(config, engine="inline", ray_address="")
                    watch = study.watch(config) if study else None
                    pending[pool.submit(_run, here, watch)] = config

        submit(plan.runs)
        while pending:
            done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            if stop.is_set():
                for process in multiprocessing.active_children():
                    process.terminate()  # which a run takes as it takes Ctrl-C
                pool.shutdown(wait=True, cancel_futures=True)
                raise Stopped
            for future in done:
                config = pending.pop(future)
                title = escape(f"{config.label}, seed {config.seed}")
                problem: Exception | None = None
                try:
                    folder, line = future.result()
                except USER_ERRORS as error:
                    problem = error
                else:
                    folders.append(folder)
                    said = f"[bold]{title}[/]  {escape(line)}"
                    console.print(said, soft_wrap=True, highlight=False)
                more, excused = study.ended(config, problem) if study else ([], False)
                if problem is not None:
                    failure = failure or (None if excused else problem)
                    what = "[yellow]{} is lost:[/]" if excused else "[red]{} failed:[/]"
                    said = f"{what.format(title)} {escape(told(problem))}"
                    console.print(said, soft_wrap=True, highlight=False)
                submit(more)
                bar.advance(task)
    if failure is not None:
        raise failure


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches runs by way of the parent
    signal.signal(signal.SIGTERM, lambda *_: _stopping.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave nobody at work on run folders that a new command wants to go on with."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(config: RunConfig, on_round: OnRound | None) -> tuple[Path, str]:
    """One run in this process: its folder, and its last round in words."""
    if _stopping.is_set():
        raise Stopped
    folders: list[Path] = []
    unseen = Console(file=io.StringIO())
    with quiet_flower(logging.NullHandler()), stop_on_interrupt(unseen.print) as stop:
        num_clients = len(prepare(config.data).clients)
        plan = Plan([config])
        try:
            launch(
                lambda grid: plan.execute(grid, unseen, stop, folders, on_round),
                config,
                num_clients,
            )
        except Stopped:
            _stopping.set()
            raise
    run = read_run(folders[0])
    accuracies = dict(zip(run.domains, run.accuracy[-1].tolist(), strict=True))
    line = round_line(run.last_round, config.num_server_rounds, accuracies)
    return run.path, f"{line}  {run.info['error'] or ''}".rstrip()
