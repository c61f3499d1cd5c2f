"""Executing a plan and printing its progress."""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.status import Status

from fairflower.config import DataConfig, RunConfig, counted
from fairflower.engines.choice import chosen_engine, engine_line
from fairflower.errors import USER_ERRORS, ConfigError, RunInterrupted
from fairflower.participation.availability import check_availabilities
from fairflower.plans.jobs import auto_jobs
from fairflower.plans.plan import Plan
from fairflower.plans.protocol import is_study
from fairflower.server.checkpoint import resumable_configs
from fairflower.server.folder import check_place, lock_folder, runs_home
from fairflower.server.privacy import planned, together
from fairflower.trackers import check_tracker

if TYPE_CHECKING:  # Flower is slow to import, and a plan is checked before Flower is needed
    from flwr.serverapp import Grid

    from fairflower.data import Federation
    from fairflower.plans.devices import Placement
    from fairflower.plans.parallel import Study
    from fairflower.server.callbacks import OnRound


@contextmanager
def spinner(what: str, console: Console) -> Iterator[Status]:
    """Show a spinner with a text, or only print the text if the console is not a terminal."""
    if not console.is_terminal:
        console.print(f"{what} ...", highlight=False)
    with console.status(what) as status:
        yield status


@contextmanager
def locked_folder(
    folder: Path, wanted: Literal["comparison", "study"] = "comparison"
) -> Iterator[None]:
    """Create the folder of a comparison or a study, and lock it against other processes.

    Raises ``ConfigError`` if another process has locked the folder, if the folder of a comparison
    is needed but this is the folder of a study, or vice versa.
    """
    made = "comparison" if (folder / "runs").exists() else wanted
    kind = "study" if is_study(folder) else made
    if kind != wanted:
        lost = ", or its trials/ was deleted" if wanted == "study" else ""
        raise ConfigError(f"{folder} is the folder of a {kind}{lost}. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    held = lock_folder(folder)
    try:
        yield
    finally:
        held.release()


def announce(plan: Plan, console: Console) -> None:
    """Print a summary of a plan and, for private runs, what they reveal together."""
    console.print(escape(plan.summary()), soft_wrap=True, highlight=False)
    if note := together(planned(config) for config in plan.runs if config.privacy.on):
        console.print(f"Differential privacy: {note}", soft_wrap=True, highlight=False)


def setup_summary(plan: Plan, federation: Federation) -> str:
    """Return lines that describe the data and the training settings of all runs of a plan."""
    from fairflower.data.cache import make_data_set

    def shared(key: str) -> str:
        values = {str(attrgetter(key)(config)) for config in plan.runs}
        return values.pop() if len(values) == 1 else "various"

    clients, domains = len(federation.clients), len(federation.domains)
    sizes = {
        "for training": sum(client.num_examples for client in federation.clients),
        "for validation": sum(federation.validation_sizes),
        "for tests": sum(federation.test_sizes),
    }
    fraction, data = shared("fraction_train"), plan.runs[0].data
    notes = ""
    if data.imbalance_factor > 1:
        notes += ", set by data.imbalance-factor instead of data.clients-per-domain"
    data_set = make_data_set(data)
    built_in = type(data_set).__module__.startswith("fairflower.")
    if data.dir and built_in and data_set.folder is None:
        notes += f", not read from data.dir, because {data.name} does not use it"
    examples = ", ".join(f"{size:,} {purpose}" for purpose, size in sizes.items() if size)
    if unused := int(federation.redraw.get("unused", 0)):
        part = data.fraction or data.examples_per_client or data_set.fraction
        equal = f"what is left of {data.clients_per_domain} clients of equal size per domain"
        why = "data.fraction or data.examples-per-client" if part else equal
        examples += f", {unused:,} training examples unused ({why})"
    participation = "" if fraction == "1.0" else f", fraction-train {fraction}"
    return (
        f"  data      {counted(clients, 'client')} of {counted(domains, 'domain')}{notes}; "
        f"{federation.kind}: {examples}\n"
        f"  training  {shared('model.name')}, lr {shared('train.lr')}, local epochs "
        f"{shared('train.local_epochs')}, batch size {shared('train.batch_size')}, "
        f"{shared('train.optimizer')}{participation}"
        f"{_masks(plan.runs[0], clients)}{_overlap(plan)}"
    )


def _overlap(plan: Plan) -> str:
    """Return a line about the examples that two federations of a plan share, or "" for one."""
    from fairflower.data import prepare
    from fairflower.data.cache import shared_examples
    from fairflower.report.tables.notes import SAME

    first = plan.runs[0].data
    others = (run.data for run in plan.runs if replace(run.data, seed=first.seed) == first)
    other = next((data for data in others if data.seed != first.seed), None)
    if other is None:
        return ""
    shares = shared_examples(first, other)
    if prepare(first).division == prepare(other).division:
        return f"\n  overlap   {SAME.format(f'{first.seed} and {other.seed}')}"
    uncovered = "" if first.redraw else " Intervals do not cover what other examples would change."
    return (
        f"\n  overlap   federations {first.seed} and {other.seed} share "
        f"{100 * shares['train']:.0f} % of their training examples and {100 * shares['test']:.0f} %"
        f" of their test examples.{uncovered}"
    )


def _masks(config: RunConfig, clients: int) -> str:
    """Return a line about secure aggregation, or "" if it is off."""
    if not config.secure_aggregation:
        return ""
    from fairflower.config.secure import check_secure_cohort
    from fairflower.secure.protocol import SMALLEST_SUM
    from fairflower.secure.rounds import described
    from fairflower.server.setup import num_selected

    selected = num_selected(config, clients)
    check_secure_cohort(selected, SMALLEST_SUM)
    masks = described(selected)
    return (
        f"\n  secure    sums over {masks['clients']} clients, of which up to "
        f"{masks['shares'] - masks['threshold']} may fail during training"
    )


def remaining_plan(plan: Plan, folder: Path, console: Console) -> Plan:
    """Return the plan without completed runs, and with stopped runs set to resume; print counts.

    Earlier runs are read from all run folders below ``folder``.
    """
    from fairflower.report import find_readable_runs

    planned, earlier = len(plan.runs), list(find_readable_runs(folder))
    left = plan.without(earlier)
    if len(left.runs) < planned:
        console.print(f"{planned - len(left.runs)} of {planned} runs are already completed.")
    if count := plan.update_tuned(earlier):
        console.print(f"The setting tuned has been changed in {counted(count, 'run folder')}.")
    plan = left.resuming(resumable_configs(folder))
    if count := sum(bool(config.resume) for config in plan.runs):
        console.print(f"{count} of {planned} runs will be resumed.")
    return plan


def execute(
    plan: Plan,
    console: Console,
    folders: list[Path] | None = None,
    jobs: int | None = 1,
    on_round: OnRound | None = None,
    study: Study | None = None,
    home: Path | None = None,
) -> list[Path]:
    """Run a plan and return its run folders.

    Parameters
    ----------
    folders : list, optional
        Receives each run folder when its run ends, even if a later run fails.
    jobs : int or None
        Number of parallel runs; None means `fairflower.plans.jobs.auto_jobs`.
    on_round : callable, optional
        As in `fairflower.server.session.Session`. If given, the runs are executed one after
        another.
    study : Study, optional
        Adds runs when other runs end. With a study, each run has its own process.
    home : Path, optional
        Output folder of the command, with which it resumes its runs. Default: the plan is a single
        run.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, SIGTERM or a notebook's stop button.
    UserError, OSError
        The first failure of a run; raised after all other runs have ended.
    """
    folders = [] if folders is None else folders
    if not plan.runs:
        return folders
    for track in dict.fromkeys(config.track for config in plan.runs):
        check_tracker(track)
    with spinner("Loading Flower and PyTorch", console):
        from fairflower.data import prepare
        from fairflower.engines.launch import quiet_flower, stop_on_interrupt
        from fairflower.plans.devices import parallel_line, place_clients
        from fairflower.server.setup import check_client_settings

    first = plan.runs[0]
    if study is None:
        # Before the data are prepared: an error if Ray is required but not installed.
        first = replace(first, engine=chosen_engine(first))
    _check_before_data(plan)
    with spinner(f"Preparing {first.data.name}", console):
        federation = prepare(first.data)
    check_client_settings(first, federation)
    console.print(escape(setup_summary(plan, federation)), soft_wrap=True, highlight=False)
    jobs = jobs or auto_jobs(plan, study.total if study else None)
    parallel = study is not None or (jobs > 1 and on_round is None)
    if parallel:
        jobs = min(jobs, study.total if study else len(plan.runs))  # each has a process and pipes
        line = parallel_line(plan.runs, jobs)
    else:
        if first.engine == "ray":
            examples = sum(client.num_examples for client in federation.clients)
            first = replace(first, engine=chosen_engine(plan.runs[0], examples * len(plan.runs)))
        if engine := engine_line(plan.runs[0]) if first.engine == "inline" else "":
            console.print(f"  engine    {escape(engine)}", soft_wrap=True, highlight=False)
        num_clients = max([len(federation.clients), *_client_counts(plan, first.data)])
        placed = place_clients([first, *plan.runs[1:]], num_clients)
        line = placed.line
    if line:
        console.print(f"  device    {escape(line)}", soft_wrap=True, highlight=False)
    handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, rich_tracebacks=False
    )
    with quiet_flower(handler), stop_on_interrupt(console.print) as stop:
        try:
            if parallel:
                from fairflower.plans.parallel import execute_parallel

                execute_parallel(plan, jobs, console, stop, folders, study)
            else:
                _execute_in_turn(plan, placed, num_clients, console, stop, folders, on_round)
        except RunInterrupted:
            console.print(f"Stopped.{escape(_how_to_resume(folders, home))}", soft_wrap=True)
            raise KeyboardInterrupt from None
    return folders


def _how_to_resume(folders: list[Path], home: Path | None) -> str:
    """Return a sentence that says how to resume a stopped command; "" if it has no checkpoint."""
    place = home or (folders[-1] if folders else None)
    if place is None or not any(place.rglob("checkpoints/round-*")):
        return ""
    path = shlex.quote(str(place))
    if home is None:
        return f" To resume the run: fairflower run --resume {path}"
    return f" To resume unfinished runs, repeat the command with --output-dir {path}"


def _check_before_data(plan: Plan) -> None:
    """Check folders, availabilities, weights and devices before the data, which may be slow."""
    from fairflower.models.weights import check_file
    from fairflower.training.device import choose_device

    for place in {Path(c.resume) if c.resume else runs_home(c) for c in plan.runs}:
        check_place(place)
    check_availabilities(plan.runs)
    for weights in {c.model.file for c in plan.runs if not c.resume} - {""}:
        check_file(weights)
    for device in {c.train.device for c in plan.runs if not c.ray_address}:  # a cluster has its own
        choose_device(device)


def _execute_in_turn(
    plan: Plan,
    placed: Placement,
    num_clients: int,
    console: Console,
    stop: threading.Event,
    folders: list[Path],
    on_round: OnRound | None,
) -> None:
    """Run a plan on one engine, which has nodes for ``num_clients`` clients."""
    from fairflower.engines.launch import launch

    with spinner(f"Starting the engine ({placed.config.engine})", console) as starting:

        def run_all(grid: Grid) -> None:
            starting.stop()
            plan.execute(grid, console, stop, folders, on_round)

        auto = plan.runs[0].engine == "auto" and not plan.runs[0].ray_address
        launch(run_all, placed.config, num_clients, placed.num_gpus, fall_back=auto)


def _client_counts(plan: Plan, first: DataConfig) -> Iterator[int]:
    """Yield the number of clients for a plan's other data settings, with the seed of the first."""
    from fairflower.data import prepare

    for data in {replace(config.data, seed=first.seed) for config in plan.runs} - {first}:
        with suppress(*USER_ERRORS):  # raised again by the runs with these data, and only by them
            yield len(prepare(data).clients)
