"""Experiment trackers: TensorBoard, MLflow and W&B. Each library is an optional extra.

    track = "tensorboard"  # in a run config

A tracker logs the run config, the metrics of every round (`fairflower.server.history`) and the
final metrics. A resumed run continues the same run in the tracker.
"""

from __future__ import annotations

from importlib import import_module

from fairflower.errors import ConfigError, installed
from fairflower.registry import TRACKERS
from fairflower.trackers.tracker import Tracker

__all__ = ["Tracker", "check_tracker", "tracker_class"]


def tracker_class(track: str) -> type[Tracker]:
    """Return the tracker class with this name.

    Examples
    --------
    >>> from fairflower.trackers import tracker_class
    >>> tracker_class("tensorboard").__name__
    'TensorBoard'
    """
    module = import_module(f"fairflower.trackers.{track}")
    return getattr(module, TRACKERS[track])  # type: ignore[no-any-return]


def check_tracker(track: str) -> None:
    """Raise ``ConfigError`` if the library of ``track`` is not installed."""
    if track in TRACKERS and not installed(track):  # W&B's folder "wandb" does not count
        raise ConfigError(
            f'track = "{track}": {track} is not installed. Run: pip install "fairflower[{track}]"'
        )
