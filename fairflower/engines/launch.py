"""Starting Flower apps on an engine: fairflower's or Flower's engine on Ray, or in this process."""

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fairflower.client_app import app as client_app
from fairflower.client_app import forget_code
from fairflower.config import DataConfig, RunConfig
from fairflower.data import prepare as prepare_data
from fairflower.data import with_absolute_dir
from fairflower.engines.inline import RUN_ID, SERVER_NODE, InlineGrid
from fairflower.engines.ray import RayGrid
from fairflower.engines.ray_cluster import prepare_ray
from fairflower.errors import ConfigError, EngineError
from fairflower.flower_compat import unchanged_import_path
from fairflower.machine import HANGUP
from fairflower.numerics.threads import cpus

logger = logging.getLogger(__name__)


def launch(
    server_main: Callable[[Grid], None],
    config: RunConfig,
    num_clients: int,
    num_gpus: int | None = None,
    fall_back: bool = False,
) -> None:
    """Call ``server_main`` with a grid of ``num_clients`` nodes that run fairflower's ClientApp.

    Callers replace ``engine = "auto"`` with `fairflower.plans.execution.chosen_engine`, and
    ``client-gpus = "auto"``, which means no GPU here, with a number (`fairflower.plans.devices`).
    ``num_gpus`` is as in `simulate`. With ``fall_back``, clients run in this process if Ray cannot
    start, with a warning. Raises the exceptions of ``server_main`` and of `simulate`.
    """
    server_app, began = ServerApp(), threading.Event()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        began.set()
        if isinstance(grid, InlineGrid):
            grid.have_same_data = True
        server_main(grid)

    # Without data.dir, the nodes of a cluster may have different default folders.
    data = with_absolute_dir(config.data) if config.data.dir else config.data
    prepare = functools.partial(_prepare, data)
    try:
        simulate(server_app, client_app, num_clients, config, prepare=prepare, num_gpus=num_gpus)
    except EngineError as error:
        if began.is_set() or not fall_back or config.engine != "ray":
            raise
        text = "%s Clients now run one at a time in this process (inline), with the same results."
        logger.warning(text, error)
        simulate(server_app, client_app, num_clients, replace(config, engine="inline"))


def _prepare(data: DataConfig) -> str:
    """Prepare a run's data on this machine, and return a description of the data without paths."""
    return replace(prepare_data(data), sources=()).to_json()


def simulate(
    server_app: ServerApp,
    client_app: ClientApp,
    num_supernodes: int,
    config: RunConfig,
    *,
    prepare: Callable[[], Any] | None = None,
    num_gpus: int | None = None,
    run_config: Mapping[str, bool | int | float | str] | None = None,
) -> Context:
    """Run a ServerApp and a ClientApp that use the message API, like Flower's ``run_simulation``.

    Parameters
    ----------
    num_supernodes : int
        Number of nodes. Node k's config has ``partition-id`` k and ``num-partitions``.
    config : RunConfig
        The settings of the engine: ``engine`` (not "auto"), ``ray_address``, ``workers``,
        ``client_cpus``, ``client_gpus`` and ``gpu_memory_errors``. This process's version of
        fairflower is copied to a Ray cluster. All other modules of the ClientApp must be installed
        on every node.
    prepare : callable, optional
        Called once on this machine and on every node of a cluster before clients run there, for
        example to download data. It must return the same value everywhere and may raise a
        ``UserError``.
    num_gpus : int, optional
        Number of GPUs on this machine for engine "ray". Default: all GPUs that Ray detects.
    run_config : mapping, optional
        ``context.run_config`` of both apps.

    Returns the context of the ServerApp with its state, which is empty for Flower's engine. Raises
    the exceptions of the ServerApp, ``GpuMemoryError`` if a client runs out of GPU memory, and
    ``ConfigError`` if no client fits, a cluster cannot be used, or the installed Flower has no
    simulation engine.
    """
    num_cpus = config.workers * config.client_cpus or cpus()
    if config.client_cpus > num_cpus and not config.ray_address:
        raise ConfigError(
            f"client-cpus = {config.client_cpus}: only {num_cpus} CPUs are available. Decrease "
            "client-cpus."
        )
    forget_code()
    settings = dict(run_config or {})
    context = Context(RUN_ID, SERVER_NODE, {}, RecordDict(), settings)
    if config.engine == "flower":
        granted = {"num_cpus": config.client_cpus, "num_gpus": config.gpus_of_client}
        _run_by_flower(server_app, client_app, num_supernodes, num_cpus, granted, settings)
        return context
    grid: InlineGrid
    threads = torch.get_num_threads()
    if config.engine == "inline":
        grid = InlineGrid(client_app, num_supernodes, settings)
    else:
        grid = RayGrid(
            client_app, num_supernodes, config, settings, prepare=prepare, num_gpus=num_gpus
        )
    try:
        server_app(grid, context)
    finally:
        grid.close()
        torch.set_num_threads(threads)  # clients in this process set it
    return context


def _run_by_flower(
    server_app: ServerApp,
    client_app: ClientApp,
    num_supernodes: int,
    num_cpus: int,
    granted: Mapping[str, float],
    settings: Mapping[str, Any],
) -> None:
    """Run the apps on Flower's deprecated engine; all clients together have ``num_cpus`` CPUs.

    Only ``run_simulation`` needs neither a daemon nor a copy of the app.
    """
    if settings:
        raise ConfigError("Flower's engine does not support run_config. Choose engine='ray'.")
    prepare_ray()  # before Flower imports Ray
    from flwr import simulation  # imported late, because it is slow

    run_simulation = getattr(simulation, "run_simulation", None)
    if not callable(run_simulation):  # a module may have the same name
        raise ConfigError(
            f"engine = 'flower': Flower {version('flwr')} has no run_simulation. Choose engine = "
            "'ray', which gives exactly the same results."
        )
    # "local" avoids joining a cluster that runs on this machine.
    local: dict[str, Any] = {"address": "local", "num_cpus": num_cpus}
    local |= {"logging_level": logging.ERROR, "log_to_driver": False}
    backend = {"client_resources": granted, "init_args": local}
    with unchanged_import_path():
        run_simulation(server_app, client_app, num_supernodes, backend_config=backend)


@contextmanager
def stop_on_interrupt(
    say: Callable[[str], Any], signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM, *HANGUP)
) -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C, SIGTERM or SIGHUP sets; a second signal exits immediately.

    The server ends the run between two replies, so that the run folder is complete. A closed
    terminal sends SIGHUP, sometimes more than once, so SIGHUP never exits immediately; under
    `nohup` it remains ignored.
    """
    stop = threading.Event()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(signum: int, frame: object) -> None:
        if signum in HANGUP:  # writing to a closed terminal fails
            devnull = os.open(os.devnull, os.O_WRONLY)
            for descriptor in terminals:
                os.dup2(devnull, descriptor)
            os.close(devnull)
        elif stop.is_set():
            os._exit(128 + signum)
        stop.set()
        say("Stopping: waiting for running clients. Press Ctrl-C again to exit immediately.")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    ignored = [number for number in HANGUP if signal.getsignal(number) is signal.SIG_IGN]
    handled = [number for number in signals if number not in ignored]
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def quiet_flower(handler: logging.Handler) -> Iterator[None]:
    """Show only fairflower's warnings; the run folder's log contains all messages."""
    root = logging.getLogger("flwr")
    shown, root.handlers = root.handlers, [handler]
    handler.addFilter(lambda line: line.name.startswith("flwr.fairflower"))
    try:
        yield
    finally:
        root.handlers = shown
