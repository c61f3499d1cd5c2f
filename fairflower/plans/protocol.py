"""The tuning protocol, which is the same for all methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Key of the number of validation examples per domain, which replaces the fraction.
EXAMPLES = "data.validation-examples"

#: Trials in a study. The folder `trials` in ~/.fairflower has trial deployments, which have other
#: names.
_TRIALS = "trials/*-trial*"


def is_study(folder: Path) -> bool:
    """Return whether a folder contains a study."""
    return any(folder.glob(_TRIALS))


def studies_in(folder: Path) -> list[Path]:
    """Return the studies among a folder and the folders below it."""
    return sorted({trial.parents[1] for trial in folder.rglob(_TRIALS)})


@dataclass(frozen=True)
class TuningProtocol:
    """Settings of a study.

    Attributes
    ----------
    budget : int
        Number of trials per method.
    seeds : sequence of int
        Random seeds for the tests.
    select : str
        Criterion for choosing a trial, a key of `fairflower.report.tuning.CRITERIA`.
    metric : str
        Metric of the criterion, a key of `fairflower.report.tuning.METRICS`.
    training : bool
        Whether the learning rate and the local epochs are also tuned.
    defaults : bool
        Whether the paper's values are also tested.
    federations : bool
        Whether each seed for the tests is also the federation's seed (``data.seed`` = ``seed``).
    """

    budget: int
    seeds: Sequence[int]
    select: str
    metric: str = "accuracy"
    training: bool = False
    defaults: bool = False
    federations: bool = False
