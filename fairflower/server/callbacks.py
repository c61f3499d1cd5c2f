"""Callbacks that are called after each round: a tracker and the user's function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from fairflower.config import RunConfig
from fairflower.config.methods import TrackerSpec
from fairflower.errors import StopRun, logger
from fairflower.server.folder import RunFolder
from fairflower.server.history import Metrics
from fairflower.trackers import Tracker

#: Called with a round's number and metrics; returning True stops the run after the round.
OnRound = Callable[[int, Metrics], object]


class CallbackList:
    """Calls ``on_round`` and the tracker set by ``track`` after each round.

    If the tracker fails, it is disabled with a warning, and ``untracked`` in ``run.json`` says in
    which round and why. An exception in ``on_round`` ends the run.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, on_round: OnRound | None) -> None:
        self._folder, self._config, self._on_round = folder, config, on_round
        self._spec = TrackerSpec.read(config.track)
        self._tracker: Tracker | None = None
        self._round = 0

    def begin(self, after: int) -> None:
        """Start tracking; ``after`` is the last completed round, or -1 for a new run."""
        track, self._round = self._config.track, after + 1
        if track == "none":
            return
        keys = self._folder.fact("tracked") or {}
        config = self._config.concise()
        try:
            tracker = self._spec.make(self._folder.path, config, keys.get(track, ""), after)
            key = str(tracker.key)
        except Exception as error:
            self._disable(error)
            return
        self._tracker = tracker
        self._folder.note("tracked", {**keys, track: key})

    def round(self, server_round: int, metrics: Metrics) -> bool:
        """Call the tracker and ``on_round`` after a round; return True if the run should stop."""
        self._round = server_round
        self._track(lambda tracker: tracker.round(server_round, metrics))
        if self._on_round is None or server_round == 0:
            return False
        try:
            answer = self._on_round(server_round, dict(metrics))
        except StopRun:
            return True
        return isinstance(answer, bool | np.bool_) and bool(answer)

    def end(self) -> None:
        """Pass the final metrics and the status of the run to the tracker."""
        status, final = str(self._folder.fact("status")), self._folder.metrics.final()
        self._track(lambda tracker: tracker.end(status, final))

    def _track(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is not None:
            try:
                with self._spec.naming_failures():
                    call(self._tracker)
            except Exception as error:
                self._disable(error)

    def _disable(self, error: Exception) -> None:
        """Go on without the tracker: libraries and the network may raise anything."""
        logger.warning("track = %s failed and is now disabled: %s", self._config.track, error)
        self._tracker = None
        earlier = self._folder.fact("untracked") or {}
        with suppress(OSError):  # a full disk ends the run elsewhere, with its own error
            self._folder.note("untracked", {**earlier, str(self._round): str(error)})
