"""The tuning protocol, which is the same for all methods, and pruning of trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import Pruned
from fairflower.numerics.metrics import AVG, MIN

#: Name of a study's file.
STUDY = "study.json"

#: A trial is pruned if its accuracy is lower than with the paper's values by this amount.
_BEHIND = 0.1

#: Key of the fraction of validation images, and its default in a study.
VALIDATION, SHARE = "data.validation-fraction", 0.2

#: Key of the number of validation images per domain, which replaces the fraction.
EXAMPLES = "data.validation-examples"


def is_study(folder: Path) -> bool:
    """Return whether a folder contains a study."""
    return (folder / STUDY).exists()


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
    prune : bool
        Whether trials are stopped early if they are clearly worse than the trial with the paper's
        values.
    federations : bool
        Whether each seed for the tests is also the federation's seed (``data.seed`` = ``seed``).
    """

    budget: int
    seeds: Sequence[int]
    select: str
    metric: str = "accuracy"
    training: bool = False
    defaults: bool = False
    prune: bool = True
    federations: bool = False


def selection_score(select: str, accuracies: Iterable[float]) -> float:
    """Return a trial's score: worst or average accuracy, or NaN if a domain was not tested."""
    values = list(accuracies)
    if not all(map(math.isfinite, values)):
        return math.nan
    return AVG(values) if select == "average" else MIN(values)


@dataclass(frozen=True)
class BaselinePruner:
    """Prunes a trial if its score is below a floor in the second half of the rounds.

    Attributes
    ----------
    select : str
        Criterion.
    metrics : sequence of str
        Names of the metrics, one per domain, from which the score is computed.
    floors : mapping
        Lowest acceptable score for each round.
    """

    select: str
    metrics: Sequence[str]
    floors: Mapping[int, float]

    @classmethod
    def of(
        cls,
        protocol: TuningProtocol,
        domains: Iterable[str],
        curve: Mapping[int, float],
        rounds: int,
        images: float,
    ) -> BaselinePruner:
        """Return a pruner with floors 0.1 below the ``curve`` of scores with the paper's values.

        The margin is at least two standard errors of the difference between two accuracies on
        ``images`` images (`effective_sample_size`).
        """
        margin = max(_BEHIND, 2 * math.sqrt(0.5 / images))
        floors = {r: value - margin for r, value in curve.items() if 2 * r >= rounds}
        metrics = [f"validation_{protocol.metric}/{domain}" for domain in domains]
        return cls(protocol.select, metrics, floors)

    def __call__(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Raise ``Pruned`` if a round's score is below its floor."""
        value = selection_score(self.select, [metrics.get(name, math.nan) for name in self.metrics])
        floor = self.floors.get(server_round, 0.0)
        if value < floor - 1e-9:  # tolerance for rounding at the floor
            raise Pruned(
                f"pruned in round {server_round}: {100 * value:.1f} % on validation images, below "
                f"the floor of {100 * floor:.1f} % derived from the trial with the paper's values"
            )


def effective_sample_size(labels: NDArray[np.int64], metric: str) -> float:
    """Return the number of images on which plain accuracy has the same variance as ``metric``.

    Balanced accuracy over K classes with n_c images each has the same variance as accuracy on K^2 /
    sum(1 / n_c) images.

    >>> round(effective_sample_size(np.array([0] * 98 + [1, 1]), "balanced_accuracy"), 2)
    7.84
    """
    if metric == "accuracy":
        return len(labels)
    counts = np.unique(labels, return_counts=True)[1]
    return float(len(counts) ** 2 / np.sum(1 / counts))
