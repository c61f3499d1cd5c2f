"""Experiment trackers: TensorBoard, MLflow, W&B, and your own. Libraries are optional extras.

    track = "tensorboard"  # in a run config

A tracker logs the run config, the metrics of every round (`fairflower.server.history`) and the
final metrics. A resumed run continues the same run in the tracker. ``track`` can also name a
subclass of `Tracker` in another package (``my_package.module:Class``).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from fairflower.config.text import Scalar
from fairflower.errors import ConfigError, installed
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.registry import TRACKERS


class Tracker(ABC):
    """Base class of trackers, which log a run.

    Parameters
    ----------
    folder : Path
        The run folder; its name is the run's name.
    config : mapping
        The run config.
    key : str
        The run's id in the tracking library; empty for a new run.
    after : int
        Last round that a resumed run does not repeat; -1 for a new run.
    """

    #: The run's id in the tracking library; a resumed run passes it as ``key``.
    key: str
    #: The primary score of what is learnt, which is set before the first round.
    score: Score = ACCURACY

    @abstractmethod
    def __init__(
        self, folder: Path, config: Mapping[str, Scalar], key: str, after: int
    ) -> None: ...

    @abstractmethod
    def round(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round."""

    @abstractmethod
    def end(self, status: str, final: Mapping[str, float]) -> None:
        """Log the final metrics and the status: completed, stopped or failed."""


def metrics_markdown(final: Mapping[str, float], score: Score = ACCURACY) -> str:
    """Return the final metrics, values of a score, as a Markdown table.

    Examples
    --------
    >>> print(metrics_markdown({"accuracy/mnist": 0.912}))
    | | accuracy, % |
    | --- | ---: |
    | mnist | 91.20 |
    """
    score = score.legible(final.values())
    rows = [
        f"| {name.partition('/')[2]} | {score.shown(value):.{score.digits}f} |"
        for name, value in final.items()
    ]
    return "\n".join([f"| | {score.axis} |", "| --- | ---: |", *rows])


def check_tracker(track: str) -> None:
    """Raise ``ConfigError`` if the library of ``track`` is not installed."""
    if track in TRACKERS.data and not installed(track):  # W&B's folder "wandb" does not count
        raise ConfigError(
            f'track = "{track}": {track} is not installed. Run: pip install "fairflower[{track}]"'
        )
