"""A run on the server, from the first message to the complete run folder."""

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
from typing import Any

from flwr.serverapp import Grid
from rich.console import Console

from fairflower.config import RunConfig
from fairflower.config.settings import CheckpointConfig
from fairflower.data import with_absolute_dir
from fairflower.engines.ray_cluster import last_words
from fairflower.errors import ConfigError, RunInterrupted, StopRun, WriteError, error_text, logger
from fairflower.participation.availability import absolute_trace
from fairflower.paths import client_states
from fairflower.server import checkpoint
from fairflower.server.checkpoint import Checkpoint
from fairflower.server.folder import LOG, RunFolder, lock_folder
from fairflower.server.known_sites import note_sites
from fairflower.server.progress import CallbackList, OnRound, RunProgress
from fairflower.server.rounds import RoundLoop
from fairflower.server.setup import RunSetup, set_up
from fairflower.server.statistics import describe_sites
from fairflower.trackers import check_tracker


class Session:
    """A new or resumed run.

    To resume a run, ``config`` comes from `fairflower.server.checkpoint.resumed_config`. Progress
    is printed on the ``console`` under a ``title``, by default the method's label. The event
    ``stop`` ends the run early; it can then be resumed. ``on_round`` is called after every training
    round with its number and metrics. If it returns True or raises ``StopRun``, the run stops and
    can be resumed. ``folder`` is the run folder, or None before the clients are registered.
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
        # Every message contains this config, so paths must not depend on the working directory or
        # environment of a worker. Sites know the path of their data, and so do the nodes of a
        # cluster if data.dir is not set.
        by_clients, who = config.evaluate.by == "clients", config.participation
        nodes_have_paths = by_clients or (config.ray_address and not config.data.dir)
        self.config = replace(
            config,
            data=config.data if nodes_have_paths else with_absolute_dir(config.data),
            model=config.model.resolve(),
            participation=replace(who, availability=absolute_trace(who.availability)),
            resume="",
        )
        self.resume = Path(config.resume).expanduser().absolute() if config.resume else None
        self.console = console
        self.title = title or config.label
        self.stop = stop or threading.Event()
        self.on_round = on_round
        self.folder: RunFolder | None = None

    def run(self) -> Path:
        """Execute the run and return the path of its folder, even if ``on_round`` stops the run.

        With ``statistics``, sites only describe their data (`describe_sites`).

        Raises ``ConfigError`` or ``DataError`` if the run cannot start, ``WriteError`` if its
        folder can no longer be written, ``EngineError`` if the engine cannot continue, for example
        because a client runs out of GPU memory, ``MetricError`` if a user-defined metric fails and
        ``evaluate.metric-errors`` is ``"stop"``, ``RoundFailed`` if too few clients sent a valid
        update, ``StrategyError`` if the strategy raises an exception, and ``RunInterrupted`` if
        ``stop`` is set.
        """
        if self.config.statistics:
            return describe_sites(self.grid, self.config, self.stop, self.console)
        with self.console.status("Waiting for the clients"):
            setup = set_up(self.grid, self.config, self.resume, self.stop)
        self.folder, saved = self._open(setup)
        folder = self.folder
        progress = RunProgress(self.console, self.title, self.config.num_server_rounds)
        callbacks = CallbackList(folder, self.config, self.on_round)
        last_words.prepare(
            "\nError: This run has ended at once. If nobody stopped it, Ray's node on this machine "
            f"was killed, or lacked memory (limited by a scheduler?). {self._remedy(folder)}\n"
        )
        with _log_file(folder.path / LOG) as log:
            try:
                self._introduce(setup, log)
                folder.write_models(saved, self.config)
                begun = saved or setup.trained
                done = begun.server_round if begun else 0
                progress.start(folder.path, done, folder.metrics.primary)
                callbacks.begin(saved.server_round if saved else -1)
                rounds = RoundLoop(self.grid, setup, folder, self.stop)
                rounds.run(saved, progress, callbacks.round)
                # The last checkpoint is kept, because num-server-rounds can be increased later.
                keep = self.config.checkpoint.keep
                checkpoint.prune(folder.path, keep if keep > CheckpointConfig.keep else 1)
                folder.finish("completed")
            except StopRun:
                folder.finish("stopped")
            except RunInterrupted:
                folder.finish("stopped")
                raise
            except OSError as error:
                _write(log, "ERROR", "The run failed:", sys.exc_info())
                with suppress(OSError):  # on a full disk the status stays "running"
                    folder.finish("failed", error_text(error))
                raise WriteError(f"{error_text(error)} {self._remedy(folder)}") from error
            except Exception as error:
                _write(log, "ERROR", "The run failed:", sys.exc_info())
                folder.finish("failed", f"{type(error).__name__}: {error}")
                raise
            except BaseException:  # Ctrl-C, or `flwr stop`: SystemExit or an exception of Flower
                folder.finish("stopped")
                raise
            finally:
                callbacks.end()
                progress.stop()
                where = f"run folder: {folder.path}"
                self.console.print(where, soft_wrap=True, style="dim", markup=False)
        if folder.status == "completed":  # others are resumed with their clients' state
            shutil.rmtree(client_states() / folder.run_id, ignore_errors=True)
        return folder.path

    def _remedy(self, folder: RunFolder) -> str:
        how = f"resume with: fairflower run --resume {shlex.quote(str(folder.path))}"
        if not self.config.checkpoint.every:
            how = "start a new run, because checkpoint.every = 0"
        return f"The finished rounds are in the run folder; {how}"

    def _introduce(self, setup: RunSetup, log: logging.Handler) -> None:
        """Log what was said of the data, which sites take part, and settings without effect."""
        for level, text in setup.remarks:
            _write(log, level, text)
        registry, evaluator, config = setup.registry, setup.evaluator, self.config
        for client in sorted(registry.infos) if registry.sites else ():
            logger.info("%s takes part: %s", registry.name_of(client), registry.about(client))
        note_sites(registry)
        if note := config.client.factory.run_warning(evaluator.model, config.evaluate.by):
            logger.warning(note)
        if config.evaluate.adabn and not evaluator.adabn:
            logger.warning(
                "evaluate.adabn: the network has no BatchNorm layers with running statistics, so "
                "the held-out domain is not tested with AdaBN."
            )

    def _open(self, setup: RunSetup) -> tuple[RunFolder, Checkpoint | None]:
        """Create the run folder, or open the folder of a run to resume and load its checkpoint."""
        # Clients that take part in several runs store their state by run id.
        facts = {"run_id": uuid.uuid4().hex, **setup.facts()}
        if self.resume is None:
            return RunFolder.create(self.config, facts), None
        path, lock = self.resume, lock_folder(self.resume)
        try:
            # Check again: another process may have resumed the run in the meantime.
            checkpoint.resumed_config(path, {"num-server-rounds": self.config.num_server_rounds})
            saved = checkpoint.load(path)
            if saved:
                try:
                    setup.strategy.load_state_dict(saved.state)
                except ValueError as error:
                    raise ConfigError(f"{path} cannot be resumed: {error}") from error
            folder = RunFolder.reopen(path, self.config, facts, lock, saved)
            if saved:  # else later, damaged checkpoints would outlive good ones
                checkpoint.delete_later(path, saved.server_round)
        except BaseException:
            lock.release()
            raise
        return folder, saved


@contextmanager
def _log_file(path: Path) -> Iterator[logging.Handler]:
    """Copy the log messages of Flower and fairflower to a file.

    Write errors, such as a full disk, are ignored, because the run reports them anyway.
    """
    file, root = logging.FileHandler(path, encoding="utf-8"), logging.getLogger("flwr")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    file.handleError = lambda record: None  # type: ignore[method-assign]
    root.addHandler(file)
    try:
        yield file
    finally:
        root.removeHandler(file)
        with suppress(OSError):
            file.close()


def _write(log: logging.Handler, level: str, text: str, exc_info: Any = None) -> None:
    """Write a text, and an exception's traceback, only to this log."""
    facts = {"levelname": level, "msg": "%s", "args": (text,), "exc_info": exc_info}
    log.handle(logging.makeLogRecord(facts))
