"""Executing a plan: the choice of engine and parallel runs, and printing its progress."""

from __future__ import annotations

import logging
import math
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.status import Status

from fairflower.config import RunConfig
from fairflower.config.settings import Engine
from fairflower.config.text import counted
from fairflower.errors import (
    USER_ERRORS,
    ConfigError,
    NotInstalled,
    RunInterrupted,
    error_text,
    installed,
    require,
)
from fairflower.numerics.threads import cpus
from fairflower.participation.availability import check_availabilities
from fairflower.plans.plan import Plan, run_title
from fairflower.registry import MODEL_OF
from fairflower.server.folder import check_place, lock_folder, runs_home
from fairflower.server.privacy import planned, together
from fairflower.trackers import check_tracker

if TYPE_CHECKING:  # Flower is slow to import, and a plan is checked before Flower is needed
    from flwr.serverapp import Grid

    from fairflower.data import Federation
    from fairflower.plans.parallel import Study
    from fairflower.server.progress import OnRound


@contextmanager
def spinner(what: str, console: Console) -> Iterator[Status]:
    """Show a spinner with a text, or only print the text if the console is not a terminal."""
    if not console.is_terminal:
        console.print(f"{what} ...", highlight=False)
    with console.status(what) as status:
        yield status


#: Trials in a study. The folder `trials` in ~/.fairflower has trial deployments, which have other
#: names.
_TRIALS = "trials/*-trial*"


def is_study(folder: Path) -> bool:
    """Return whether a folder contains a study."""
    return any(folder.glob(_TRIALS))


def check_no_studies(*folders: Path) -> None:
    """Raise ``ConfigError`` if a folder is a study or contains one: trials are no test runs."""
    for folder in folders:
        studies = sorted({trial.parents[1] for trial in folder.rglob(_TRIALS)})
        if studies:
            found = f"{folder} {'is a study' if folder in studies else 'contains studies'}"
            runs = shlex.join(str(study / "runs") for study in studies)
            raise ConfigError(
                f"{found}. For a report that includes the trials, repeat the study's "
                "`fairflower tune` command with the same --output-dir; completed runs are kept. "
                "For the test runs only, including those of earlier choices, name instead: "
                f"{runs}"
            )


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
    of_data = (
        f"  data      {counted(clients, 'client')} of {counted(domains, 'domain')}{notes}; "
        f"{federation.kind}: {examples}\n"
    )
    if tested := plan.runs[0].evaluate.model:
        return f"{of_data}  model     {tested}, tested without training"
    return (
        f"{of_data}"
        f"  training  {shared('model.name')}, lr {shared('train.lr')}, local epochs "
        f"{shared('train.local_epochs')}, batch size {shared('train.batch_size')}, "
        f"{shared('train.optimizer')}{participation}"
        f"{_masks(plan.runs[0], clients)}{_overlap(plan)}"
    )


def _overlap(plan: Plan) -> str:
    """Return a line about the examples that two federations of a plan share, or "" for one."""
    from fairflower.data import prepare
    from fairflower.data.cache import shared_examples
    from fairflower.report.notes import SAME

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
    plan = left.resuming(folder)
    if count := sum(bool(config.resume) for config in plan.runs):
        console.print(f"{count} of {planned} runs will be resumed.")
    return plan


def run_comparison(
    plan: Plan,
    folder: Path,
    console: Console,
    jobs: int | None,
    at_end: Callable[[], object] = lambda: None,
) -> None:
    """Run the remaining runs of a comparison; their run folders are in ``folder/runs``.

    Completed runs are kept, and unfinished runs are resumed. ``at_end`` is called when the runs
    have ended, even after a failure or an interruption, provided that some run can be read. Raises
    ``ConfigError`` if another process uses the folder, or its runs used other data, and what
    `execute` raises.
    """
    announce(plan, console)
    with locked_folder(folder):
        left = remaining_plan(plan, folder / "runs", console)
        folders: list[Path] = []
        try:
            execute(left, console, folders, jobs, home=folder)
        finally:
            if folders or len(left.runs) < len(plan.runs):
                at_end()


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
        Number of parallel runs; None means `auto_jobs`.
    on_round : callable, optional
        As in `fairflower.server.session.Session`; the runs are then executed one after another.
    study : Study, optional
        Adds runs when other runs end. With a study, each run has its own process.
    home : Path, optional
        Output folder with which the command resumes its runs. Default: the plan is a single run.

    Raises ``KeyboardInterrupt`` after Ctrl-C, SIGTERM or a notebook's stop button, and, after all
    other runs have ended, the first failure of a run: a ``UserError`` or an ``OSError``.
    """
    folders = [] if folders is None else folders
    if not plan.runs:
        return folders
    for track in dict.fromkeys(config.track for config in plan.runs):
        check_tracker(track)
    with spinner("Loading Flower and PyTorch", console):
        from fairflower.data import prepare
        from fairflower.data.files import said
        from fairflower.engines.launch import quiet_flower, stop_on_interrupt
        from fairflower.plans.devices import parallel_line
        from fairflower.plans.parallel import execute_parallel
        from fairflower.server.setup import check_client_settings, check_num_clients

    first = plan.runs[0]
    if study is None:
        # Before the data are prepared: an error if Ray is required but not installed.
        first = replace(first, engine=chosen_engine(first))
    _check_before_data(plan)
    said.clear()  # warnings are said once in a command, but again in the next of a notebook
    with spinner(f"Preparing {first.data.name}", console):
        federation = prepare(first.data)
    check_client_settings(first, federation)
    for config in {run.label: run for run in plan.runs}.values():
        check_num_clients(config, config.strategy.make(), len(federation.clients))
    console.print(escape(setup_summary(plan, federation)), soft_wrap=True, highlight=False)
    jobs = jobs or auto_jobs(plan, study.total if study else None)
    in_turn = None
    if study is not None or (jobs > 1 and on_round is None):
        jobs = min(jobs, study.total if study else len(plan.runs))  # each has a process and pipes
        _say(console, "device", parallel_line(plan.runs, jobs))
    else:
        in_turn = _on_one_engine(plan, first, federation, console, folders, on_round)
    handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, rich_tracebacks=False
    )
    with quiet_flower(handler), stop_on_interrupt(console.print) as stop:
        try:
            if in_turn:
                in_turn(stop)
            else:
                execute_parallel(plan, jobs, console, stop, folders, study)
        except RunInterrupted:
            console.print(f"Stopped.{escape(_how_to_resume(folders, home))}", soft_wrap=True)
            raise KeyboardInterrupt from None
    return folders


def _say(console: Console, name: str, line: str) -> None:
    if line:
        console.print(f"  {name:<9} {escape(line)}", soft_wrap=True, highlight=False)


def _on_one_engine(
    plan: Plan,
    first: RunConfig,
    federation: Federation,
    console: Console,
    folders: list[Path],
    on_round: OnRound | None,
) -> Callable[[threading.Event], None]:
    """Choose and print the engine and the device; return a function that executes the runs."""
    from fairflower.data import prepare
    from fairflower.engines.launch import launch
    from fairflower.plans.devices import place_clients

    if first.engine == "ray":
        examples = sum(client.num_examples for client in federation.clients)
        first = replace(first, engine=chosen_engine(plan.runs[0], examples * len(plan.runs)))
    if first.engine == "inline":
        _say(console, "engine", engine_line(plan.runs[0]))
    counts = [len(federation.clients)]
    for data in {replace(c.data, seed=first.data.seed) for c in plan.runs} - {first.data}:
        with suppress(*USER_ERRORS):  # raised again by the runs with these data, and only by them
            counts.append(len(prepare(data).clients))
    placed = place_clients([first, *plan.runs[1:]], max(counts))
    _say(console, "device", placed.line)

    def run(stop: threading.Event) -> None:
        with spinner(f"Starting the engine ({placed.config.engine})", console) as starting:

            def run_all(grid: Grid) -> None:
                starting.stop()
                execute_in_turn(plan.runs, grid, console, stop, folders, on_round)

            auto = plan.runs[0].engine == "auto" and not plan.runs[0].ray_address
            launch(run_all, placed.config, max(counts), placed.num_gpus, fall_back=auto)

    return run


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
    from fairflower.models.pretrained import check_file
    from fairflower.training.device import choose_device

    for place in {Path(c.resume) if c.resume else runs_home(c) for c in plan.runs}:
        check_place(place)
    check_availabilities(plan.runs)
    for weights in {c.model.file for c in plan.runs if not c.resume} - {""}:
        check_file(weights)
    for device in {c.train.device for c in plan.runs if not c.ray_address}:  # a cluster has its own
        choose_device(device)


def execute_in_turn(
    runs: Sequence[RunConfig],
    grid: Grid,
    console: Console,
    stop: threading.Event,
    folders: list[Path],
    on_round: OnRound | None = None,
) -> None:
    """Execute runs one after another; append each run folder to ``folders``.

    If a run fails, the others are still executed, and the first failure is raised at the end.
    """
    from fairflower.server.session import Session

    failure: Exception | None = None
    for number, config in enumerate(runs, 1):
        title = run_title(config)
        if len(runs) > 1:
            title += f", seed {config.seed} ({number} of {len(runs)})"
        session = Session(grid, config, console, title=title, stop=stop, on_round=on_round)
        try:
            session.run()
        except USER_ERRORS as error:
            failure = failure or error
            if len(runs) > 1:
                line = f"[red]{escape(title)} failed:[/] {escape(error_text(error))}"
                console.print(line, soft_wrap=True)
        finally:
            if session.folder is not None:
                folders.append(session.folder.path)
    if failure is not None:
        raise failure


# --- engine and parallel runs --------------------------------------------------------------------

_REMEDY = 'pip install "fairflower[sim]"'

#: Setting for parallel clients -> its values that ask for none, the default first.
_INACTIVE: dict[str, tuple[Any, ...]] = {
    "ray-address": ("",),
    "engine": ("auto", "inline"),
    "workers": (0,),
    "client-gpus": ("auto", 0),
}


def for_parallel_clients(flat: Mapping[str, Any]) -> str:
    """Return the first key in ``flat`` that only runs with parallel clients follow; "" if none."""
    return next((key for key, off in _INACTIVE.items() if flat.get(key, off[0]) not in off), "")


def resolve_jobs(flat: Mapping[str, Any], jobs: int | None, dashes: str = "--") -> int | None:
    """Return the number of parallel runs; None means that `auto_jobs` decides.

    If ``jobs`` is None, the result is 1 if ``flat`` sets an engine, its workers or a cluster, and
    None otherwise. Raises ``ConfigError`` for several jobs with settings `for_parallel_clients`.
    The error writes ``dashes`` before the option's name; in Python there are none.
    """
    if jobs not in (None, 1) and (key := for_parallel_clients(flat)):
        raise ConfigError(
            f"{dashes}jobs {jobs}: parallel runs use the inline engine, on this machine and with "
            f"one client at a time, but {key} = {flat[key]!r} is set. Remove {dashes}jobs or {key}."
        )
    chosen = flat.get("ray-address") or flat.get("workers") or flat.get("engine", "auto") != "auto"
    return 1 if jobs is None and chosen else jobs


def auto_jobs(plan: Plan, runs: int | None = None) -> int:
    """Choose the number of parallel runs for this machine.

    The number is as large as the CPU cores and, on a GPU, its memory allow. If there are fewer
    runs, it is the number of runs, or 1 with Ray, whose parallel clients use all cores. If
    ``client-gpus`` is a number, it is 1, because this setting applies to parallel clients. ``runs``
    is the expected number of runs of a study, which never uses Ray.
    """
    # Imported late, because torch is slow to import.
    from fairflower.plans.devices import runs_that_fit

    if any(config.client_gpus not in ("auto", 0.0) for config in plan.runs):
        return 1
    capacity = cpus() // max(config.client_cpus for config in plan.runs)
    if capacity > 1 and (fitting := runs_that_fit(plan.runs)):
        capacity = min(capacity, fitting)
    count = len(plan.runs) if runs is None else runs
    if count >= capacity:
        return max(1, capacity)
    return 1 if runs is None and installed("ray") else max(1, count)


#: Number of times that examples are used below which a small network is trained before Ray starts.
_FEW_USES = 20_000


def chosen_engine(config: RunConfig, examples: float = math.inf) -> Engine:
    """Return the engine of a run: ``"ray"``, ``"flower"`` or ``"inline"``.

    ``engine = "auto"`` means Ray if it is installed and can save time, and otherwise this process,
    with the same results: it cannot if one client trains at a time anyway, or on few ``examples``
    (of all runs; infinite means unknown, hence Ray). Raises ``NotInstalled`` if ``engine`` or
    ``ray-address`` requires Ray, and Ray is not installed.
    """
    if installed("ray"):
        if config.engine != "auto":
            return config.engine
        wanted = config.ray_address or config.workers > 1 or config.client_gpus != "auto"
        uses = examples * config.num_server_rounds * config.train.local_epochs
        small = config.model.name in MODEL_OF.values() and uses < _FEW_USES
        if wanted or math.isinf(uses) or not (small or cpus() < 2 * config.client_cpus):
            return "ray"
        from fairflower.training.device import choose_device  # late: it imports torch

        return "inline" if choose_device(config.train.device).type == "cpu" else "ray"
    if config.ray_address:
        require("sim", f"ray-address = {config.ray_address!r}", "ray")
    if config.engine in ("auto", "inline"):
        return "inline"
    raise NotInstalled(
        f"engine = {config.engine!r} needs ray. Run: {_REMEDY}, or set engine = 'inline', which "
        "gives exactly the same results."
    )


def engine_line(config: RunConfig) -> str:
    """Explain why a run uses the inline engine (`chosen_engine`); "" if its config sets the engine.

    If the inline engine ignores ``workers``, the line says so.
    """
    if config.engine == "inline" and config.workers:
        return f"inline, one client at a time; workers = {config.workers} has no effect"
    if config.engine != "auto":
        return ""
    if installed("ray"):
        return "inline, one client at a time, because Ray's start would take longer than it saves"
    line = (
        "inline, one client at a time, because Ray is not installed. For parallel clients: "
        f"{_REMEDY}"
    )
    return line + f"; workers = {config.workers} has no effect" * bool(config.workers)
