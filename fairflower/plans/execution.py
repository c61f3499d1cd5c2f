"""Executing a plan: the choice of engine and parallel runs, and printing its progress."""

from __future__ import annotations

import logging
import math
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
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
    quoted,
    require,
)
from fairflower.numerics.threads import cpus
from fairflower.participation.availability import check_availabilities
from fairflower.paths import TRIALS
from fairflower.plans.plan import Plan, fact_lines, run_title
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


@contextmanager
def locked_folder(
    folder: Path, wanted: Literal["comparison", "study"] = "comparison"
) -> Iterator[None]:
    """Create the folder of a comparison or a study, and lock it against other processes.

    Raises ``ConfigError`` if another process has locked the folder, if the folder of a comparison
    is needed but this is the folder of a study, or vice versa.
    """
    made = "comparison" if (folder / "runs").exists() else wanted
    kind = "study" if any(folder.glob(TRIALS)) else made
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
    first, fraction = plan.runs[0], shared("fraction_train")
    notes, data = "", first.data
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
    facts = {
        "data": f"{counted(clients, 'client')} of {counted(domains, 'domain')}{notes}; "
        f"{federation.kind}: {examples}"
    }
    if tested := first.evaluate.model:
        facts["model"] = f"{tested}, tested without training"
    else:
        facts["training"] = (
            f"{shared('model.name')}, lr {shared('train.lr')}, local epochs "
            f"{shared('train.local_epochs')}, batch size {shared('train.batch_size')}, "
            f"{shared('train.optimizer')}{participation}"
        )
        facts |= {"secure": _masks(first, clients), "overlap": _overlap(plan)}
    return fact_lines(facts)


def _overlap(plan: Plan) -> str:
    """Describe the examples that two federations of a plan share; "" if there is one."""
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
        return SAME.format(f"{first.seed} and {other.seed}")
    uncovered = "" if first.redraw else " Intervals do not cover what other examples would change."
    return (
        f"federations {first.seed} and {other.seed} share {100 * shares['train']:.0f} % of their "
        f"training examples and {100 * shares['test']:.0f} % of their test examples.{uncovered}"
    )


def _masks(config: RunConfig, clients: int) -> str:
    """Describe secure aggregation; "" if it is off."""
    if not config.secure_aggregation:
        return ""
    from fairflower.config.secure import check_secure_cohort
    from fairflower.secure.protocol import SMALLEST_SUM, shares_of
    from fairflower.server.setup import num_selected

    selected = num_selected(config, clients)
    check_secure_cohort(selected, SMALLEST_SUM)
    shares, threshold = shares_of(selected)
    failing = shares - threshold
    return f"sums over {selected} clients, of which up to {failing} may fail during training"


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
    have ended, even after a failure or an interruption, if there are any run folders. Raises
    ``ConfigError`` if another process uses the folder, its runs used other data, or the clients of
    parallel ``jobs`` would be parallel, too, and what `execute` raises.
    """
    if jobs not in (None, 1):
        check_parallel(plan, f"{jobs} parallel runs (jobs)")
    announce(plan, console)
    with locked_folder(folder):
        left = remaining_plan(plan, folder / "runs", console)
        try:
            execute(left, console, jobs, home=folder)
        finally:
            if any(folder.glob("runs/*/run.json")):
                at_end()


def execute(
    plan: Plan,
    console: Console,
    jobs: int | None = 1,
    on_round: OnRound | None = None,
    study: Study | None = None,
    home: Path | None = None,
) -> list[Path]:
    """Run a plan and return its run folders.

    Parameters
    ----------
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
    folders: list[Path] = []
    if not plan.runs:
        return folders
    for track in dict.fromkeys(config.track for config in plan.runs):
        check_tracker(track)
    with spinner("Loading Flower and PyTorch", console):
        from fairflower.data import prepare
        from fairflower.data.files import said
        from fairflower.engines.launch import launch, quiet_flower, stop_on_interrupt
        from fairflower.plans.devices import parallel_line, place_clients
        from fairflower.plans.parallel import execute_parallel
        from fairflower.server.setup import check_client_settings, check_num_clients

    first = plan.runs[0]
    if study is None:
        # Before the data are prepared: an error if Ray is required but not installed.
        first = replace(first, engine=chosen_engine(first)[0])
    _check_before_data(plan)
    said.clear()  # warnings are said once in a command, but again in the next of a notebook
    with spinner(f"Preparing {first.data.name}", console):
        federation = prepare(first.data)
    check_client_settings(first, federation)
    for config in {run.label: run for run in plan.runs}.values():
        check_num_clients(config, config.strategy.make(), len(federation.clients))
    console.print(escape(setup_summary(plan, federation)), soft_wrap=True, highlight=False)
    jobs = jobs or auto_jobs(plan, study.total if study else None)
    in_turn = study is None and (jobs == 1 or on_round is not None)
    if in_turn:
        uses = sum(client.num_examples for client in federation.clients) * len(plan.runs)
        engine, line = chosen_engine(plan.runs[0], uses)
        _say(console, "engine", line)
        clients = _most_clients(plan.runs, len(federation.clients))
        placed = place_clients([replace(first, engine=engine), *plan.runs[1:]], clients)
        _say(console, "device", placed.line)
    else:
        jobs = min(jobs, study.total if study else len(plan.runs))  # each has a process and pipes
        _say(console, "device", parallel_line(plan.runs, jobs))
    handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, rich_tracebacks=False
    )
    with quiet_flower(handler), stop_on_interrupt(console.print) as stop:
        try:
            if not in_turn:
                execute_parallel(plan, jobs, console, stop, folders, study)
                return folders
            with spinner(f"Starting the engine ({placed.config.engine})", console) as starting:

                def run_all(grid: Grid) -> None:
                    starting.stop()
                    execute_in_turn(plan.runs, grid, console, stop, folders, on_round)

                auto = plan.runs[0].engine == "auto" and not plan.runs[0].ray_address
                launch(run_all, placed.config, clients, placed.num_gpus, fall_back=auto)
        except RunInterrupted:
            console.print(f"Stopped.{escape(_how_to_resume(folders, home))}", soft_wrap=True)
            raise KeyboardInterrupt from None
    return folders


def _say(console: Console, name: str, line: str) -> None:
    if line:
        console.print(escape(fact_lines({name: line})), soft_wrap=True, highlight=False)


def _most_clients(runs: Sequence[RunConfig], of_first: int) -> int:
    """Return the largest number of clients of a run; the first run has ``of_first``."""
    from fairflower.data import prepare

    first, counts = runs[0].data, [of_first]
    for data in {replace(config.data, seed=first.seed) for config in runs} - {first}:
        with suppress(*USER_ERRORS):  # raised again by the runs with these data, and only by them
            counts.append(len(prepare(data).clients))
    return max(counts)


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

#: Setting for parallel clients -> its values that ask for none.
_INACTIVE: dict[str, tuple[Any, ...]] = {
    "ray-address": ("",),
    "engine": ("auto", "inline"),
    "workers": (0,),
    "client-gpus": ("auto", 0),
}


def parse_jobs(jobs: str | int | None) -> int | None:
    """Return a number of parallel runs; None, for ``"auto"`` and None, means `auto_jobs`."""
    if jobs in (None, "auto"):
        return None
    if not str(jobs).isdecimal() or int(jobs) < 1:
        raise ConfigError(f"jobs = {quoted(jobs)}: expected auto or a whole number >= 1.")
    return int(jobs)


def check_parallel(plan: Plan, what: str) -> None:
    """Raise ``ConfigError`` if runs are to be parallel, as ``what`` says, and clients, too."""
    first = plan.runs[0]
    for key, off in _INACTIVE.items():
        if (value := getattr(first, key.replace("-", "_"))) not in off:
            raise ConfigError(
                f"{key} = {value!r}: {what} use the inline engine, on this machine and with one "
                "client at a time. Remove this setting."
            )


def auto_jobs(plan: Plan, runs: int | None = None) -> int:
    """Choose the number of parallel runs for this machine.

    The number is as large as the CPU cores and, on a GPU, its memory allow. If there are fewer
    runs, it is the number of runs, or 1 with Ray, whose parallel clients use all cores. It is also
    1 if ``client-gpus`` is a number, or an engine, its workers or a cluster are set. ``runs`` is
    the expected number of runs of a study, which never uses Ray.
    """
    # Imported late, because torch is slow to import.
    from fairflower.plans.devices import runs_that_fit

    first = plan.runs[0]
    if any(config.client_gpus not in ("auto", 0.0) for config in plan.runs):
        return 1
    if runs is None and (first.ray_address or first.workers or first.engine != "auto"):
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


def chosen_engine(config: RunConfig, examples: float = math.inf) -> tuple[Engine, str]:
    """Return the engine of a run, ray, flower or inline, and a line that says why it is inline.

    ``engine = "auto"`` means Ray if it is installed and can save time, and otherwise this process,
    with the same results: it cannot if one client trains at a time anyway, or on few ``examples``
    (of all runs; infinite means unknown, hence Ray). Raises ``NotInstalled`` if ``engine`` or
    ``ray-address`` requires Ray, and Ray is not installed.
    """
    inline = "inline, one client at a time"
    unused = f"; workers = {config.workers} has no effect" if config.workers else ""
    if config.engine == "inline":
        return "inline", f"{inline}{unused}" if unused else ""
    if installed("ray"):
        if config.engine != "auto":
            return config.engine, ""
        wanted = config.ray_address or config.workers > 1 or config.client_gpus != "auto"
        uses = examples * config.num_server_rounds * config.train.local_epochs
        small = config.model.name in MODEL_OF.values() and uses < _FEW_USES
        if wanted or math.isinf(uses) or not (small or cpus() < 2 * config.client_cpus):
            return "ray", ""
        from fairflower.training.device import choose_device  # late: it imports torch

        if choose_device(config.train.device).type != "cpu":
            return "ray", ""
        return "inline", f"{inline}, because Ray's start would take longer than it saves"
    if config.ray_address:
        require("sim", f"ray-address = {config.ray_address!r}", "ray")
    if config.engine == "auto":
        why = f"because Ray is not installed. For parallel clients: {_REMEDY}"
        return "inline", f"{inline}, {why}{unused}"
    raise NotInstalled(
        f"engine = {config.engine!r} needs ray. Run: {_REMEDY}, or set engine = 'inline', which "
        "gives exactly the same results."
    )
