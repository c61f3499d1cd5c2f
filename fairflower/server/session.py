"""One run at the server, from the first message to a run folder that says how it ended."""

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
    """A run that begins, or goes on where another session left it.

    A ``config`` with ``resume`` is by `fairflower.server.checkpoint.resumed_config`; ``title`` is
    the run's name on the screen, by default the method's in reports. Setting ``stop`` ends the run
    early, with a readable run folder, which is ``folder`` once the clients have met. ``on_round``
    is called after every round of training with its number and figures
    (`fairflower.server.figures`). Where it returns True or raises ``StopRun``, the run is stopped
    there, and can be resumed; where it raises ``Pruned``, it is ended for good.
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
        # Clients get this config with every message: where files are must not
        # depend on the folder or the environment that a worker runs in.
        # Clients that have the data to themselves also know where, and so do the nodes of
        # a cluster unless they were told.
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
        """Train, and return the run folder, also where ``on_round`` stops the run.

        ``ConfigError`` or ``DataError`` if the run cannot begin, ``WriteError`` if the run folder
        can no longer be written, ``RoundFailed`` if too few clients sent a usable update,
        ``StrategyError`` if the strategy raised something else, ``RunInterrupted`` if ``stop``
        was set.
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
                with suppress(OSError):  # of a full disk; it then stays "running"
                    folder.finish("failed", error_text(error))
                raise WriteError(
                    f"{error_text(error)} What was done is in the run folder, and goes on with: "
                    f"fairflower run --resume {shlex.quote(str(folder.path))}"
                ) from error
            except Exception as error:
                log.traceback()
                folder.finish("failed", f"{type(error).__name__}: {error}")
                raise
            except BaseException:  # Ctrl-C, or what `flwr stop` raises: SystemExit, or Flower's own
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
        """Make the run folder, or open the one to resume and load what it was left with."""
        # By its id, clients that serve several runs tell what they keep for this one.
        facts = {"run_id": uuid.uuid4().hex, **setup.facts()}
        if self.resume is None:
            return RunFolder.create(self.config, facts), None
        saved = checkpoint.load(self.resume)
        if saved is None:
            return RunFolder.reopen(self.resume, self.config, facts), None
        if not saved.config:
            logger.warning(
                "The checkpoint is of an earlier version, which did not keep the settings in it: "
                "whether config.toml was changed since the run began is not known."
            )
        try:
            setup.strategy.load_state_dict(saved.state)
        except ValueError as error:
            raise ConfigError(f"{self.resume} cannot go on: {error}") from error
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
    # The last checkpoint stays: num-server-rounds can be raised later.
    checkpoint.prune(folder.path, keep=1)
    shutil.rmtree(client_states() / folder.run_id, ignore_errors=True)
    folder.finish(status, reason)


@contextmanager
def _logged(folder: RunFolder) -> Iterator[_LogFile]:
    """Copy Flower's log, and fairflower's, into the run folder."""
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
    """A log that a full disk ends in silence: the run itself will say what is wrong."""

    def traceback(self) -> None:
        """Write down the error that ends the run, and where it comes from; here alone."""
        facts = {"name": logger.name, "levelname": "ERROR", "msg": "The run failed:"}
        self.handle(logging.makeLogRecord({**facts, "exc_info": sys.exc_info()}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Print no traceback."""
