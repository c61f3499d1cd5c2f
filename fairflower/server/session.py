"""A run at the server, from the first message to the finished run folder."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flwr.serverapp import Grid
from rich.console import Console

from fairflower.config import RunConfig
from fairflower.data import with_absolute_dir
from fairflower.errors import (
    ConfigError,
    Pruned,
    RunInterrupted,
    StopRun,
    WriteError,
    error_text,
    logger,
)
from fairflower.machine import about_precision
from fairflower.paths import client_states
from fairflower.server import checkpoint
from fairflower.server.callbacks import CallbackList, OnRound
from fairflower.server.checkpoint import Checkpoint
from fairflower.server.folder import LOG, RunFolder
from fairflower.server.progress import RunProgress
from fairflower.server.rounds import RoundLoop
from fairflower.server.setup import RunSetup, set_up
from fairflower.trackers import check_tracker


class Session:
    """A new run, or a run that is resumed.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : RunConfig
        The run; to resume, from `fairflower.server.checkpoint.resumed_config`.
    console : Console
        Console for the progress.
    title : str, default=""
        The run's name on the console; "" takes the method's label.
    stop : threading.Event, optional
        Ends the run early when set; the run can then be resumed.
    on_round : callable, optional
        Called after every round of training with its number and metrics. If it returns True or
        raises ``StopRun``, the run is stopped and can be resumed; ``Pruned`` ends it for good.

    Attributes
    ----------
    folder : RunFolder or None
        The run folder; None before the clients are registered.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        console: Console,
        *,
        title: str = "",
        stop: threading.Event | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        check_tracker(config.track)
        self.grid = grid
        # Every message carries this config: paths must not depend on a worker's working directory
        # or environment. Sites know the path of their data, as do the nodes of a cluster if
        # data.dir is not set.
        known = config.evaluate.by == "clients" or (config.ray_address and not config.data.dir)
        data = config.data if known else with_absolute_dir(config.data)
        self.config = replace(config, data=data, model=config.model.resolve(), resume="")
        self.resume = Path(config.resume).expanduser().absolute() if config.resume else None
        self.console = console
        self.title = title or config.label
        self.stop = stop or threading.Event()
        self.on_round = on_round
        self.folder: RunFolder | None = None

    def run(self) -> Path:
        """Make the run, and return the path of its folder, also if ``on_round`` stops the run.

        Raises
        ------
        ConfigError, DataError
            If the run cannot begin.
        WriteError
            If the run folder can no longer be written.
        RoundFailed
            If too few clients sent a usable update.
        StrategyError
            If the strategy raised an exception.
        RunInterrupted
            If ``stop`` was set.
        """
        with self.console.status("Waiting for the clients"):
            setup = set_up(self.grid, self.config, self.resume, self.stop)
        self.folder, saved = self._open(setup)
        folder = self.folder
        progress = RunProgress(self.console, self.title, self.config.num_server_rounds)
        callbacks = CallbackList(folder, self.config, self.on_round)
        with _logged(folder) as log:
            if note := about_precision(self.config.train.precision, setup.evaluator.device):
                logger.warning(note)
            client, by = self.config.client.factory, self.config.evaluate.by
            if note := client.remark(setup.evaluator.model, by):
                logger.warning(note)
            if self.config.evaluate.adabn and not setup.evaluator.adabn:
                logger.warning(
                    "evaluate.adabn: the network has no BatchNorm with running statistics, so "
                    "there is no second test of the held-out domain."
                )
            progress.start(folder.path)
            try:
                callbacks.begin(saved.server_round if saved else -1)
                rounds = RoundLoop(self.grid, setup, folder, self.stop)
                rounds.run(saved, progress, callbacks.round)
            except StopRun:
                folder.finish("stopped")
            except Pruned as reason:
                _close(folder, "pruned", str(reason))
            except RunInterrupted:
                folder.finish("stopped")
                raise
            except OSError as error:
                with suppress(OSError):  # on a full disk the status stays "running"
                    folder.finish("failed", error_text(error))
                raise WriteError(
                    f"{error_text(error)} The finished rounds are in the run folder; resume with: "
                    f"fairflower run --resume {shlex.quote(str(folder.path))}"
                ) from error
            except Exception as error:
                log.traceback()
                folder.finish("failed", f"{type(error).__name__}: {error}")
                raise
            except BaseException:  # Ctrl-C, or `flwr stop`: SystemExit or an exception of Flower
                folder.finish("stopped")
                raise
            else:
                _close(folder, "completed")
            finally:
                callbacks.end()
                progress.stop()
                where = f"run folder: {folder.path}"
                self.console.print(where, soft_wrap=True, style="dim", markup=False)
        return folder.path

    def _open(self, setup: RunSetup) -> tuple[RunFolder, Checkpoint | None]:
        """Create the run folder, or open the folder to resume and load its checkpoint."""
        # Clients that serve several runs store their state by run id.
        facts = {"run_id": uuid.uuid4().hex, **setup.facts()}
        if self.resume is None:
            return RunFolder.create(self.config, facts), None
        saved = checkpoint.load(self.resume)
        if saved is None:
            return RunFolder.reopen(self.resume, self.config, facts), None
        if not saved.config:
            logger.warning(
                "The checkpoint is of an earlier version and has no settings: it is unknown "
                "whether config.toml was changed since the run began."
            )
        try:
            setup.strategy.load_state_dict(saved.state)
        except ValueError as error:
            raise ConfigError(f"{self.resume} cannot be resumed: {error}") from error
        folder = RunFolder.reopen(
            self.resume,
            self.config,
            facts,
            server_round=saved.server_round,
            sizes=saved.sizes,
            seconds=saved.seconds,
        )
        folder.model(saved.model)
        return folder, saved


def _close(folder: RunFolder, status: str, reason: str | None = None) -> None:
    # The last checkpoint is kept, as num-server-rounds can be raised later.
    checkpoint.prune(folder.path, keep=1)
    shutil.rmtree(client_states() / folder.run_id, ignore_errors=True)
    folder.finish(status, reason)


@contextmanager
def _logged(folder: RunFolder) -> Iterator[_LogFile]:
    """Copy the log of Flower and fairflower into the run folder."""
    handler = _LogFile(folder.path / LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("flwr")
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        with suppress(OSError):
            handler.close()


class _LogFile(logging.FileHandler):
    """A log file that ignores write errors, for example of a full disk; the run reports them."""

    def traceback(self) -> None:
        """Write the current exception with its traceback to this file only."""
        facts = {"name": logger.name, "levelname": "ERROR", "msg": "The run failed:"}
        self.handle(logging.makeLogRecord({**facts, "exc_info": sys.exc_info()}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore errors in writing the log."""
