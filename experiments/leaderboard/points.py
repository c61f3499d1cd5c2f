"""The settings to try for a method: those of its paper, then points of a Sobol sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fairflower.arguments import ArgumentSpec, Search
from fairflower.config import RunConfig
from fairflower.errors import ConfigError
from fairflower.plans.tuning import search_space

LR = "train.lr"

#: Bounds of the learning rate, as multiples of the benchmark's learning rate.
_LOW, _HIGH = 0.25, 2.5

#: Number of dimensions: the largest number of settings to tune.
_DIMENSIONS = 16


def ranges(config: RunConfig) -> dict[str, ArgumentSpec]:
    """Return the settings to tune for a method: the learning rate and all arguments with a range.

    The learning rate comes first; its range is from a quarter to two and a half times that of the
    config. Rounds and local epochs are the same for all methods, so that all methods get
    the same amount of training.
    """
    lr = config.train.lr
    return {
        LR: ArgumentSpec(lr, search=Search(_LOW * lr, _HIGH * lr, log=True)),
        **search_space(config),
    }


def points(
    tunable: Mapping[str, ArgumentSpec], count: int, scrambling: int
) -> list[dict[str, float]]:
    """Return the settings to try: the defaults, then ``count - 1`` points of a Sobol sequence.

    The k-th of the `ranges` uses the k-th dimension of a Sobol sequence with Owen scrambling,
    seeded by ``scrambling``. All methods therefore try the same learning rates. Raises
    ``ConfigError`` if there are more settings than dimensions, 16.
    """
    from scipy.stats import qmc  # late: it takes a second to import

    if len(tunable) > _DIMENSIONS:
        raise ConfigError(
            f"{len(tunable)} settings to tune ({', '.join(tunable)}), but a leaderboard tunes at "
            f"most {_DIMENSIONS}. Remove Search or Range from arguments that need no tuning."
        )

    sequence = qmc.Sobol(_DIMENSIONS, rng=scrambling)
    places = sequence.random_base2(math.ceil(math.log2(max(count - 1, 1))))[: count - 1]
    return [
        {key: argument.default for key, argument in tunable.items()},
        *(
            {
                key: argument.at(float(place))
                for (key, argument), place in zip(tunable.items(), row, strict=False)
            }
            for row in places
        ),
    ]
