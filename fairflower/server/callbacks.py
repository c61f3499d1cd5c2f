"""Who is told of a run's rounds: a tracker, and the user's callback."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fairflower.config import RunConfig
from fairflower.errors import StopRun, logger
from fairflower.server.figures import Figures
from fairflower.server.folder import RunFolder
from fairflower.trackers import Tracker, tracker_class

#: Gets a round's number and figures; what it returns is True if the run is to stop there.
OnRound = Callable[[int, Figures], object]


class CallbackList:
    """Tells the tracker that ``track`` names, and ``on_round``, of a run's rounds.

    A tracker that fails in mid-run is left out with a warning; what ``on_round`` raises ends
    the run.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, on_round: OnRound | None) -> None:
        self._folder, self._config, self._on_round = folder, config, on_round
        self._tracker: Tracker | None = None

    def begin(self, after: int) -> None:
        """Begin to track, ``after`` -1, or go on after a round in the same run of the tracker."""
        track = self._config.track
        if track == "none":
            return
        keys = self._folder.fact("tracked") or {}
        config = self._config.concise()
        key = keys.get(track, "")
        self._tracker = tracker_class(track)(self._folder.path, config, key, after)
        self._folder.note("tracked", {**keys, track: self._tracker.key})

    def round(self, server_round: int, figures: Figures) -> bool:
        """Tell of a round; True if the callback wants the run to stop after it."""
        self._track(lambda tracker: tracker.round(server_round, figures))
        if self._on_round is None or server_round == 0:
            return False
        try:
            answer = self._on_round(server_round, dict(figures))
        except StopRun:
            return True
        return isinstance(answer, bool | np.bool_) and bool(answer)

    def end(self) -> None:
        """Tell the tracker the final figures, and how the run ended."""
        status, final = str(self._folder.fact("status")), self._folder.figures.final()
        self._track(lambda tracker: tracker.end(status, final))

    def _track(self, tell: Callable[[Tracker], None]) -> None:
        if self._tracker is not None:
            try:
                tell(self._tracker)
            except Exception as error:  # it may be anything: a library's, or the network's
                logger.warning("track = %s failed, and is left out: %s", self._config.track, error)
                self._tracker = None
