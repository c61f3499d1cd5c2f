"""How methods are tuned, the same for all of them, and which trials are pruned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fairflower.errors import ConfigError, Pruned
from fairflower.numerics.metrics import AVG, MIN

#: How far, as a fraction, a trial has to be behind the paper's values to be pruned.
_BEHIND = 0.1

#: File of a study, in its folder.
STUDY = "study.db"

#: The share of images for validation, and what it is where a study's settings have none.
VALIDATION, SHARE = "data.validation-fraction", 0.2

#: Images for validation of each domain, instead of a share.
EXAMPLES = "data.validation-examples"


@dataclass(frozen=True)
class TuningProtocol:
    """How methods are tuned, the same for all of them."""

    budget: int  # trials of each method
    seeds: Sequence[int]  # of the runs that are tested
    select: str  # one of `fairflower.report.tuning.CRITERIA`
    metric: str = "accuracy"  # or another of `fairflower.report.tuning.METRICS`, that it is of
    training: bool = False  # whether learning rate and epochs of local training are tuned, too
    defaults: bool = False  # whether the paper's values are tested beside those chosen
    prune: bool = True


def check_disjoint_seeds(named: str, seeds: Sequence[int], seed: int, remedy: str) -> None:
    """Raise ``ConfigError`` if a test is to have the trials' seed."""
    if seed in seeds:
        raise ConfigError(
            f"{named}: {seed} is the seed of the trials, and tests are to have fresh ones. "
            f"{remedy}."
        )


def selection_score(select: str, accuracies: Iterable[float]) -> float:
    """What a criterion looks at first of accuracies by domain; NaN if one was not tested."""
    values = list(accuracies)
    if not all(map(math.isfinite, values)):
        return math.nan
    return AVG(values) if select == "average" else MIN(values)


@dataclass(frozen=True)
class BaselinePruner:
    """Prunes a trial that is clearly behind the paper's values.

    That is, from the second half of the rounds on, below the ``floors`` by round. ``figures`` are
    the names of what the criterion looks at, a domain each.
    """

    select: str
    figures: Sequence[str]
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
        """With floors below a curve by ten points.

        And by no less than two standard errors of the difference of two accuracies on so many
        images (`effective_sample_size`), which may be luck.
        """
        margin = max(_BEHIND, 2 * math.sqrt(0.5 / images))
        floors = {r: value - margin for r, value in curve.items() if 2 * r >= rounds}
        figures = [f"validation_{protocol.metric}/{domain}" for domain in domains]
        return cls(protocol.select, figures, floors)

    def __call__(self, server_round: int, figures: Mapping[str, float]) -> None:
        """Raise ``Pruned`` if a round's accuracies are too low."""
        value = selection_score(self.select, [figures.get(name, math.nan) for name in self.figures])
        floor = self.floors.get(server_round, 0.0)
        if value < floor - 1e-9:  # at the floor it is not behind, however that was rounded
            raise Pruned(
                f"pruned: in round {server_round} {100 * value:.1f} % on validation images, where "
                f"less than {100 * floor:.1f} % is clearly behind the paper's values"
            )


def effective_sample_size(labels: NDArray[np.int64], metric: str) -> float:
    """How many images would tell plain accuracy as precisely as these tell a metric.

    The class-balanced accuracy of K classes with n_c images each has the variance of an accuracy on
    K^2 / sum(1 / n_c).

    >>> round(effective_sample_size(np.array([0] * 98 + [1, 1]), "balanced_accuracy"), 2)
    7.84
    """
    if metric == "accuracy":
        return len(labels)
    counts = np.unique(labels, return_counts=True)[1]
    return float(len(counts) ** 2 / np.sum(1 / counts))
