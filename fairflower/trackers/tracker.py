"""What a tracker has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from fairflower.config import Scalar


class Tracker(ABC):
    """Logs one run.

    Parameters
    ----------
    folder : Path
        The run folder, whose name is the run's.
    config : mapping
        The run config.
    key : str
        By which the library knows the run; empty: it is new.
    after : int
        The last round that is not made again; -1 if the run begins.
    """

    #: By which the library knows the run, for `key` of the session that resumes it.
    key: str

    @abstractmethod
    def __init__(
        self, folder: Path, config: Mapping[str, Scalar], key: str, after: int
    ) -> None: ...

    @abstractmethod
    def round(self, server_round: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a round."""

    @abstractmethod
    def end(self, status: str, final: Mapping[str, float]) -> None:
        """Log the final figures, and how the run ended: completed, stopped or failed."""


def markdown(final: Mapping[str, float]) -> str:
    """The final figures as a table, in percent.

    >>> print(markdown({"accuracy/mnist": 0.912}))
    | | accuracy, % |
    | --- | ---: |
    | mnist | 91.20 |
    """
    rows = [f"| {name.partition('/')[2]} | {100 * value:.2f} |" for name, value in final.items()]
    return "\n".join(["| | accuracy, % |", "| --- | ---: |", *rows])
