"""The interface of experiment trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from fairflower.config import Scalar


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


def metrics_markdown(final: Mapping[str, float]) -> str:
    """Return the final metrics as a Markdown table, in percent.

    Examples
    --------
    >>> print(metrics_markdown({"accuracy/mnist": 0.912}))
    | | accuracy, % |
    | --- | ---: |
    | mnist | 91.20 |
    """
    rows = [f"| {name.partition('/')[2]} | {100 * value:.2f} |" for name, value in final.items()]
    return "\n".join(["| | accuracy, % |", "| --- | ---: |", *rows])
