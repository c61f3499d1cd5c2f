"""Makes the runs of a plan, with a person at the screen: what is there already, what goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.status import Status

from fairflower.errors import ConfigError, RunInterrupted
from fairflower.plans.plan import Plan, auto_jobs
from fairflower.plans.protocol import STUDY
from fairflower.server.checkpoint import resumable_configs
from fairflower.server.folder import check_place, lock_folder, runs_home
from fairflower.trackers import check_tracker

if TYPE_CHECKING:  # Flower is slow to import, and a plan is checked before it runs
    from flwr.serverapp import Grid

    from fairflower.data import Federation
    from fairflower.plans.parallel import Study
    from fairflower.server.callbacks import OnRound


@contextmanager
def spinner(what: str, console: Console) -> Iterator[Status]:
    """Say what is being done, as long as it takes: a spinner, or a line where there is none."""
    if not console.is_terminal:
        console.print(f"{what} ...", highlight=False)
    with console.status(what) as status:
        yield status


@contextmanager
def locked_folder(folder: Path, study: bool = False) -> Iterator[None]:
    """Make a comparison's folder, or a ``study``'s, and keep other processes from it.

    ``ConfigError`` if one is at work there, or the folder is of the other kind.
    """
    is_study = (folder / STUDY).exists()
    if is_study != study and (is_study or (folder / "runs").exists()):
        raise ConfigError(
            f"{folder} is of a {'study' if is_study else 'comparison'}, with runs of its own. "
            "Choose another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    held = lock_folder(folder)
    try:
        yield
    finally:
        os.close(held)


def announce(plan: Plan, console: Console) -> None:
    """Print what is run."""
    console.print(escape(plan.summary()), soft_wrap=True, highlight=False)


def setup_summary(plan: Plan, federation: Federation) -> str:
    """What all runs of a plan train on, and how, in two lines."""
    from fairflower.data.cache import make_data_set

    def of_all(key: str) -> str:
        found = {str(attrgetter(key)(config)) for config in plan.runs}
        return found.pop() if len(found) == 1 else "various"

    clients, domains = len(federation.clients), len(federation.domains)
    sizes = {
        "to train on": sum(client.num_examples for client in federation.clients),
        "for validation": sum(federation.validation_sizes),
        "for tests": sum(federation.test_sizes),
    }
    asked, data = of_all("fraction_train"), plan.runs[0].data
    unread = bool(data.dir) and make_data_set(data).folder is None
    unequal = data.imbalance_factor > 1
    return (
        f"  data      {clients} client{'s' * (clients > 1)} of {domains} domain"
        f"{'s' * (domains > 1)}"
        + ", by data.imbalance-factor and not data.clients-per-domain" * unequal
        + f", not from data.dir, which {data.name} does not read" * unread
        + f"; {federation.kind}: "
        + ", ".join(f"{size:,} {purpose}" for purpose, size in sizes.items() if size)
        + f"\n  training  {of_all('model.name')}, lr {of_all('train.lr')}, local epochs "
        f"{of_all('train.local_epochs')}, batch size {of_all('train.batch_size')}, "
        f"{of_all('train.optimizer')}" + f", fraction-train {asked}" * (asked != "1.0")
    )


def remaining_plan(plan: Plan, folder: Path, console: Console) -> Plan:
    """What is left to do of a plan, as runs below ``folder`` are there or were stopped; say so."""
    from fairflower.report import find_readable_runs

    planned = len(plan.runs)
    plan = plan.without(find_readable_runs(folder))
    if len(plan.runs) < planned:
        console.print(f"{planned - len(plan.runs)} of {planned} runs are there already.")
    plan = plan.resuming(resumable_configs(folder))
    if count := sum(bool(config.resume) for config in plan.runs):
        console.print(f"{count} of {planned} runs go on where they were stopped.")
    return plan


def execute(
    plan: Plan,
    console: Console,
    folders: list[Path] | None = None,
    jobs: int | None = 1,
    on_round: OnRound | None = None,
    study: Study | None = None,
) -> list[Path]:
    """Make the runs, if there are any; ``folders`` grows as they end, whatever happens to the rest.

    ``jobs`` at a time; None: as many as fit. ``on_round`` (`fairflower.server.session.Session`)
    takes them one at a time. With a ``study``, which adds runs as others end, each is in a process
    of its own.

    Raises
    ------
    KeyboardInterrupt
        If it was stopped, by Ctrl-C, SIGTERM or a notebook's stop button.
    UserError, OSError
        The first failure of a run, when the others have been made.
    """
    folders = [] if folders is None else folders
    if not plan.runs:
        return folders
    for track in dict.fromkeys(config.track for config in plan.runs):
        check_tracker(track)
    with spinner("Loading Flower and PyTorch", console):
        from fairflower.data import prepare
        from fairflower.engines.launch import launch, quiet_flower, stop_on_interrupt
        from fairflower.models.weights import check_file
        from fairflower.plans.parallel import execute_parallel

    first = plan.runs[0]
    for place in {Path(c.resume) if c.resume else runs_home(c) for c in plan.runs}:
        check_place(place)
    for weights in {c.model.weights for c in plan.runs if not c.resume} - {"", "imagenet"}:
        check_file(weights)  # before the data, which may take minutes to prepare
    with spinner(f"Preparing {first.data.name}", console):
        federation = prepare(first.data)
    console.print(escape(setup_summary(plan, federation)), soft_wrap=True, highlight=False)
    jobs = jobs or auto_jobs(plan, study.total if study else None)
    handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, rich_tracebacks=False
    )
    with quiet_flower(handler), stop_on_interrupt(console.print) as stop:
        try:
            if study or (jobs > 1 and on_round is None):
                execute_parallel(plan, jobs, console, stop, folders, study)
            else:
                with spinner(f"Starting the engine ({first.engine})", console) as starting:

                    def run_all(grid: Grid) -> None:
                        starting.stop()
                        plan.execute(grid, console, stop, folders, on_round)

                    launch(run_all, first, len(federation.clients))
        except RunInterrupted:
            console.print("Stopped." + (" The run folder has what was done." if folders else ""))
            raise KeyboardInterrupt from None
    return folders
