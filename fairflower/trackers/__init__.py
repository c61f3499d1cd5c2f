"""Experiment trackers: TensorBoard, MLflow, W&B, and your own. Libraries are optional extras.

    track = "tensorboard"  # in a run config

A tracker logs the run config, the metrics of every round (`fairflower.server.history`) and the
final metrics. A resumed run continues the same run in the tracker. ``track`` can also name a
subclass of `Tracker` in another package (``my_package.module:Class``).
"""

from __future__ import annotations

from fairflower.errors import ConfigError, installed
from fairflower.registry import TRACKERS
from fairflower.trackers.tracker import Tracker

__all__ = ["Tracker", "check_tracker"]


def check_tracker(track: str) -> None:
    """Raise ``ConfigError`` if the library of ``track`` is not installed."""
    if track in TRACKERS.data and not installed(track):  # W&B's folder "wandb" does not count
        raise ConfigError(
            f'track = "{track}": {track} is not installed. Run: pip install "fairflower[{track}]"'
        )
