"""Where a run's figures are logged beside its folder: one file per library, each an extra.

    track = "tensorboard"  # in a run config

A tracker is told the run config, the figures of every round (`fairflower.server.figures`) and,
at the end, the final ones. A run that is resumed goes on in the same run of the library.
"""

from __future__ import annotations

from importlib import import_module

from fairflower.errors import ConfigError, installed
from fairflower.registry import TRACKERS
from fairflower.trackers.tracker import Tracker

__all__ = ["Tracker", "check_tracker", "tracker_class"]


def tracker_class(track: str) -> type[Tracker]:
    """The tracker of this name."""
    module = import_module(f"fairflower.trackers.{track}")
    return getattr(module, TRACKERS[track])  # type: ignore[no-any-return]


def check_tracker(track: str) -> None:
    """Raise ``ConfigError``, with what to install, if the library of ``track`` is not there."""
    if track in TRACKERS and not installed(track):  # a folder as W&B makes one does not count
        raise ConfigError(
            f'track = "{track}": {track} is not installed. Run: pip install "fairflower[{track}]"'
        )
