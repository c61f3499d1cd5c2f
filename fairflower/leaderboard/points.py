"""The settings to try for a method: the paper's, then points of a Sobol sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fairflower.arguments import Search
from fairflower.config import RunConfig
from fairflower.plans.search_space import TunableArgument, search_space

LR = "train.lr"

#: Bounds of the learning rate, as multiples of the benchmark's.
_LOW, _HIGH = 0.25, 2.5

#: More dimensions than any method has arguments to tune.
_DIMENSIONS = 16


def ranges(config: RunConfig) -> dict[str, TunableArgument]:
    """Return the tuned settings of a method: learning rate, and arguments with a range.

    The learning rate comes first, from a quarter to two and a half times the config's. Rounds and
    local epochs are the same for all methods, so that all train equally long.
    """
    lr = config.train.lr
    return {
        LR: TunableArgument(Search(_LOW * lr, _HIGH * lr, log=True), lr, False),
        **search_space(config),
    }


def points(
    found: Mapping[str, TunableArgument], count: int, scrambling: int
) -> list[dict[str, float]]:
    """Return the settings to try: the defaults, then ``count - 1`` points.

    The k-th of `ranges` has the k-th dimension of Sobol's sequence with Owen's scrambling by this
    seed: all methods try the same learning rates. (Its first 2^m points fill every dimension
    evenly.)
    """
    from scipy.stats import qmc  # late: it takes a second to import

    sequence = qmc.Sobol(_DIMENSIONS, rng=scrambling)
    places = sequence.random_base2(math.ceil(math.log2(max(count - 1, 1))))[: count - 1]
    return [
        {key: argument.default for key, argument in found.items()},
        *(
            {
                key: argument.search.at(float(place), argument.whole)
                for (key, argument), place in zip(found.items(), row, strict=False)
            }
            for row in places
        ),
    ]
